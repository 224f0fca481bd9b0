"""JSON Lines, the record of a run: appended and flushed as results come, so that interrupted work keeps what it had.

Each line is one object with `schema` and `kind`: "run" (first: target, settings, environment), "case" (one per
case), "finding" (one per shrunk failure), "end" (last: counts; missing when the run was killed).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TextIO

from verikda.run_case import CaseReport

SCHEMA = 1


def plain(value: Any) -> Any:
    """Strict JSON: non-finite numbers become strings, tuples lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def case_line(report: CaseReport) -> dict[str, Any]:
    """The `case` line of one report."""
    return {
        "kind": "case",
        "case": report.case.to_dict(),
        "verdict": report.verdict,
        "checks": {o.check: o.verdict for o in report.outcomes},
        "ratios": {o.check: dict(o.ratios) for o in report.outcomes if o.ratios},
        "detail": {o.check: o.detail for o in report.outcomes if o.detail and o.verdict != "pass"},
        "calls": report.calls,
        "seconds": round(report.seconds, 4),
    }


class Record:
    """An append-only JSON Lines file, or nothing when `path` is None.

    Raises
    ------
    OSError
        When the file cannot be opened for appending.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append one line and flush it."""
        if self._file is not None:
            self._file.write(json.dumps(plain({"schema": SCHEMA, **line}), allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
