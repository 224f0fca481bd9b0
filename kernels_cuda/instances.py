"""The kernel instances that are compiled for every architecture when the sources change (build.compile_all).

Callers may launch any other instance: it is compiled when first asked for. This list says which must never stop
compiling: each kernel at its smallest and its largest, in each dtype.
"""

from __future__ import annotations

INSTANCES: tuple[str, ...] = ()
