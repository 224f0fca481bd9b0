"""`verikda report`: a declared grid of cases measured on targets, and the page made from the measurements alone.

command  the command line                               run      the loop that appends lines
grid     which cases, and what is kept of each          measure  one case on one target: one line of JSON
stages   intermediates of the notes                     flags    other compiler flags on a GPU
claims   the notes' own claims, with inverse, exponentials, anchors and memory
lines    reading them back                              tables, charts, svg, captions, page   what is shown of them
diff     two files of lines compared
"""
