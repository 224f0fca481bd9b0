"""The chunked algorithm in NumPy, rounded to nearest exactly where a contract says, as a target.

It is what a perfect implementation of that contract would answer. Memory conditions do not apply to it: it
works on values, so every layout is the same to it and nothing around the inputs exists.
"""

from __future__ import annotations
