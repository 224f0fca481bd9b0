"""Numeric libraries on one thread each: what is checked is small, and their threads wait for each other.

On two busy cores a check of `transformers` takes ten times as long with two threads as with one. More cores are used by
more processes (`--jobs`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_OWN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What torch reads, the first one first. NumPy's OpenBLAS reads OPENBLAS_NUM_THREADS, then the first."""


def one_thread() -> None:
    """Have NumPy and torch take one thread in this process and in those that it starts, unless the user says otherwise.

    They read the environment when they are imported: call it before.
    """
    os.environ.setdefault(_OWN[0], os.environ.get(_OWN[1], "1"))


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """The same for torch alone and for the block alone, in a process that is not ours: torch may be imported already.

    Does nothing where torch is not imported.
    """
    torch = sys.modules.get("torch")
    if torch is None or any(name in os.environ for name in _OWN):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
