"""What `verikda capture` does: run a Python script, and keep the calls of delta-rule operators that it makes."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from verikda import show
from verikda.capture_calls import KNOWN, Capture
from verikda.status import FAIL, NOTHING, PASS


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
    """Run the script as Python would, and say what was kept, however it ended.

    Returns
    -------
    int
        The script's own exit status; where that is 0, 2 when no operator was called.

    Raises
    ------
    ValueError
        For a script that does not exist, or a function that cannot be found.
    OSError
        For a folder that cannot be made.
    """
    if not script.is_file():
        raise ValueError(f"{script} is no file; give the Python script whose calls are to be kept")
    folder.mkdir(parents=True, exist_ok=True)  # now, not at the first call of a long run
    before, path = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    try:
        with Capture(folder, list(functions) or installed(), limit, warn=False) as kept:
            status = _run(script)
    finally:
        sys.argv, sys.path[0] = before, path
    out = show.console()
    if not kept.count:
        out.print("no known operator was called through its module; name it with --function module:function")
        return status or NOTHING
    out.print(f"kept {kept.count} calls in {folder}; verikda replay FILE TARGET judges a target on one", markup=False)
    return status


def _run(script: Path) -> int:
    """Run the script; the exit status that Python would end with. An error of its own is shown as Python shows it."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or PASS
        print(end.code, file=sys.stderr)
        return FAIL
    except (Exception, KeyboardInterrupt) as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames or error.__traceback__))
        return FAIL
    return PASS
