"""Exit statuses: 0 pass, 1 a failure was found, 2 unusable input or nothing could be told."""

from __future__ import annotations

PASS, FAIL, NOTHING = 0, 1, 2


def status_of(verdict: str) -> int:
    """The exit status of a run with this verdict; of any but "pass" and "fail" it is `NOTHING`."""
    return {"pass": PASS, "fail": FAIL}.get(verdict, NOTHING)
