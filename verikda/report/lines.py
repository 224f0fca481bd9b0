"""Reading JSON Lines that `report`, `check --json` and `bench` wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verikda.case import parse_json
from verikda.record import SCHEMA

Line = dict[str, Any]
FIELDS: dict[str, dict[str, type]] = {
    "report": {"targets": list, "time": str, "environment": dict},
    "point": {"series": str, "target": str, "dtype": str, "case": dict, "verdict": str, "detail": str},
    "stages": {"target": str, "dtype": str, "case": dict, "errors": dict},
    "claim": {"claim": str},
    "case": {"case": dict, "checks": dict},
    "timing": {"target": str, "workload": dict},
    "end": {"interrupted": bool},
}
"""What a line of each kind has at least; lines of other kinds are not looked into."""


def read_lines(path: Path) -> list[Line]:
    """All lines of one file; a last line that was cut off in the middle is left out.

    Raises
    ------
    ValueError
        When a line is not one JSON object with the schema and a kind, or there is no line at all.
    OSError
        When the file cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}); give a JSON Lines file that verikda wrote"
        ) from None
    rows = text.split("\n")
    whole = rows.pop() == ""  # what follows the last end of line
    if not whole:
        rows = text.split("\n")
    found = []
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            found.append(_line(row))
        except ValueError as error:
            if not whole and number == len(rows):
                break
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path} holds no line; give a file that verikda report, check --json or bench wrote")
    return found


def _line(row: str) -> Line:
    data = parse_json(row)
    if not isinstance(data, dict):
        raise ValueError(f"it holds a {type(data).__name__}, not a JSON object; each line is one object")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"schema is {data.get('schema')!r}, only {SCHEMA} is read here; use the verikda that wrote it")
    if not isinstance(data.get("kind"), str):
        raise ValueError(f"kind is {data.get('kind')!r}; every line of verikda has one")
    for name, kind in FIELDS.get(data["kind"], {}).items():
        if not isinstance(data.get(name), kind):
            seen = repr(data[name])[:60] if name in data else "missing"
            raise ValueError(f"{name} of a line of kind {data['kind']!r} is {seen}; measure again to get a whole one")
    return data


def read_all(paths: Sequence[Path]) -> list[Line]:
    """Lines of several files, in turn. See `read_lines`."""
    return [line for path in paths for line in read_lines(path)]


def number(x: Any) -> float:
    """A number of a line; what JSON cannot say stands as a string, and None is NaN."""
    return math.nan if x is None else float(x)
