"""Reading JSON Lines that `report`, `check --json` and `bench` wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verikda.case import parse_json
from verikda.record import SCHEMA

Line = dict[str, Any]


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
    return data


def read_all(paths: Sequence[Path]) -> list[Line]:
    """Lines of several files, in turn. See `read_lines`."""
    return [line for path in paths for line in read_lines(path)]


def number(x: Any) -> float:
    """A number of a line; what JSON cannot say stands as a string, and None is NaN."""
    return math.nan if x is None else float(x)
