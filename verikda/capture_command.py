"""What `verikda capture` does: run a Python script, and keep the calls of delta-rule operators that it makes."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from verikda import show
from verikda.capture_calls import KNOWN, capture

KEPT, NOTHING = 0, 2


def installed() -> list[str]:
    """The known operators that can be imported here; their modules are imported, so that a script finds wrappers."""
    found = []
    for name in KNOWN:
        module, _, attribute = name.partition(":")
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            continue
        try:
            there = hasattr(importlib.import_module(module), attribute)
        except Exception:  # a library without its GPU fails in any way; the script could not use it either
            continue
        if there:
            found.append(name)
    return found


def capture_command(folder: Path, script: Path, arguments: Sequence[str], functions: Sequence[str], limit: int) -> int:
    """Run the script as Python would, and say what was kept; exit status 0, or 2 when no operator was called.

    Raises
    ------
    ValueError
        For a script that does not exist, or a function that cannot be found.
    """
    if not script.is_file():
        raise ValueError(f"{script} is no file; give the Python script whose calls are to be kept")
    before, path = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    try:
        with capture(folder, list(functions) or installed(), limit) as kept:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[0] = before, path
    out = show.console()
    if not kept.count:
        out.print("no known operator was called through its module; name it with --function module:function")
        return NOTHING
    out.print(f"kept {kept.count} calls in {folder}; verikda replay FILE TARGET judges a target on one", markup=False)
    return KEPT
