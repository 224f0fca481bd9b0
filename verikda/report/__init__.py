"""`verikda report`: a declared grid of cases measured on targets, and the page made from the measurements alone.

grid     which cases, and what is kept of each          measure  one case on one target: one line of JSON
stages   intermediates of the notes                     claims, inverse, exponentials, anchors   the notes' own claims
flags    other compiler flags on a GPU                  run      the loop that appends lines
lines    reading them back                              tables, charts, svg, page   what is shown of them
diff     two files of lines compared
"""
