"""JSON Lines, the record of a run: appended and flushed as results come, so that interrupted work keeps what it had.

Each line is one object with `schema` and `kind`: "run" (first: target, settings, environment), "case" (one per
case), "finding" (one per shrunk failure), "end" (last: counts, and the shares that were lost; missing when the run was
killed).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
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


def check_outputs(**paths: Path | None) -> None:
    """Refuse, before hours of work, files that cannot be written after it; writing makes folders that are missing.

    Parameters
    ----------
    paths : by the names of their options.

    Raises
    ------
    ValueError
        For a folder, for what cannot be written, and for one file under two names.
    """
    seen: dict[Path, str] = {}
    for said, path in _given(paths):
        if os.path.isdir(path):
            raise ValueError(f"{said} is a folder; name a file in it")
        _check_place(said, path)
        other = seen.setdefault(path.resolve(), said)
        if other != said and path.resolve() != Path(os.devnull):
            raise ValueError(f"{other} and {said} are one file; name two")


def check_folders(**paths: Path | None) -> None:
    """Refuse, before there is anything to put into them, folders that cannot be written or made.

    Parameters
    ----------
    paths : by the names of their options.

    Raises
    ------
    ValueError
        For a file, and for what cannot be written.
    """
    for said, path in _given(paths):
        if os.path.exists(path) and not os.path.isdir(path):
            raise ValueError(f"{said} is a file; name a folder")
        _check_place(said, path)


def _given(paths: Mapping[str, Path | None]) -> Iterator[tuple[str, Path]]:
    """Each path with its option, as the user wrote them."""
    for name, path in paths.items():
        if path is not None:
            yield f"--{name.replace('_', '-')} {path}", path


def _check_place(said: str, path: Path) -> None:
    """Refuse what is there and may not be written, and what is not there and cannot be made."""
    # os.path, unlike Path, takes what is behind a closed folder as missing
    there = next(p for p in (path, *path.absolute().parents) if os.path.exists(p))
    if there != path and not os.path.isdir(there):
        raise ValueError(f"{said} cannot be written, because {there} is a file; name a place in a folder")
    if not os.access(there, os.W_OK | os.X_OK if os.path.isdir(there) else os.W_OK):
        raise ValueError(f"{said} cannot be written, because {there} may not be changed here; name another place")
    if os.path.isdir(there):
        try:  # /proc lets the superuser change it and takes nothing
            TemporaryDirectory(dir=there).cleanup()
        except OSError as error:
            why = f"nothing can be made in {there} ({error.strerror})"
            raise ValueError(f"{said} cannot be written, because {why}; name another place") from None


_START = re.compile(rb'\{"schema": \d+, "kind": ')
"""Cases and findings have no kind."""


def _mend(path: Path) -> None:
    """Take off the half-written last line that a killed run leaves: the next line would be glued to it, and lost.

    Raises
    ------
    ValueError
        When the file holds something else than lines of verikda.
    """
    data = path.read_bytes()
    if data and not _START.match(data) and not b'{"schema": 1, "kind": '.startswith(data):
        raise ValueError(f"{path} holds {data[:20]!r}..., no JSON Lines of verikda; name another file")
    whole = data.rfind(b"\n") + 1
    if whole == len(data):
        return
    try:
        json.loads(data[whole:])
    except ValueError:
        os.truncate(path, whole)
    else:
        with path.open("ab") as file:
            file.write(b"\n")


class Record:
    """An append-only JSON Lines file, or nothing when `path` is None.

    Parameters
    ----------
    option : whose file it is, for what is said of it.

    Raises
    ------
    ValueError
        When the file holds something else.
    OSError
        When the file cannot be opened for appending.
    """

    def __init__(self, path: Path | None, option: str = "--json") -> None:
        self._file: TextIO | None = None
        self._said = f"{option} {path}"
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                _mend(path)
            self._file = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append one line and flush it.

        Raises
        ------
        OSError
            When it cannot be written, with option and path for its file name; nothing more is written then.
        """
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(plain({"schema": SCHEMA, **line}), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # it would say the same of what is left to be written
                self._file.close()
            self._file = None
            raise OSError(error.errno, error.strerror, self._said) from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
