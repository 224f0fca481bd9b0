"""A finding: the smallest case that shows one failure, as a small JSON file and as a message.

A finding file is data. Loading one parses JSON and checks every field; it never imports or runs
anything. `verikda replay FILE` then makes the call again on the target named in it, or on another.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verikda.case import Case, parse_json
from verikda.checks import BY_NAME, Failure
from verikda.dtypes import is_representable, round_to, to_hex
from verikda.environment import environment

SCHEMA = 1
_FIELDS = {"schema", "target", "check", "case", "minimal", "failures", "found_in", "environment", "ran"}


@dataclass(frozen=True)
class Finding:
    """One failure of one target.

    Attributes
    ----------
    target, check : names.
    case : the smallest case found that shows it.
    minimal : no single simpler case shows it (False when shrinking did not come to its end: the budget ran out, it was
        interrupted, or nothing could be run any more).
    failures : what is wrong on that case.
    found_in : the case in which it was first seen.
    ran : what the target said it ran.
    environment : versions, platform, command.
    """

    target: str
    check: str
    case: Case
    minimal: bool
    failures: tuple[Failure, ...]
    found_in: Case
    ran: str = ""
    environment: Mapping[str, object] = field(default_factory=environment)

    @property
    def file_name(self) -> str:
        """Name of its file: target, check and a hash of the case, so that the same finding has one file."""
        digest = hashlib.sha256(self.case.to_json().encode()).hexdigest()[:10]
        slug = re.sub(r"[^A-Za-z0-9]+", "-", self.target).strip("-")
        return f"{slug}-{self.check}-{digest}.json"

    def to_json(self) -> str:
        """One JSON object, indented; non-finite numbers as strings."""
        data = {
            "schema": SCHEMA,
            "target": self.target,
            "check": self.check,
            "case": self.case.to_dict(),
            "minimal": self.minimal,
            "failures": [_failure_dict(f) for f in self.failures],
            "found_in": self.found_in.to_dict(),
            "ran": self.ran,
            "environment": dict(self.environment),
        }
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    def write(self, folder: Path) -> Path:
        """Write the file into `folder` (made if missing) and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file_name
        path.write_text(self.to_json(), encoding="utf-8")
        return path


def _failure_dict(f: Failure) -> dict[str, Any]:
    data = asdict(f)
    for name in ("expected", "actual"):
        value = data[name]
        if value is not None:
            data[name] = {"value": repr(float(value)), "hex": hex_of(value, f.dtype)}
    if f.ratio is not None:
        data["ratio"] = repr(float(f.ratio))
    return data


def hex_of(value: float, dtype: str) -> str:
    """Bits of the number in `dtype`, or those of the nearest number of it, marked with ~."""
    if is_representable(value, dtype):
        return to_hex(float(value), dtype)
    return "~" + to_hex(float(round_to(value, dtype)), dtype)


def load_case(path: Path) -> tuple[Case, str | None, str | None]:
    """Case, target name and check name of a finding file, or of a file that holds a bare case.

    Raises
    ------
    ValueError
        When the file is not JSON of one of the two forms; one sentence that names the fault.
    OSError
        When it cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}); give a JSON file that verikda wrote"
        ) from None
    try:
        data = parse_json(text)
        if not isinstance(data, dict):
            raise ValueError(f"the file holds {type(data).__name__}, not a JSON object")
        if "case" not in data:
            return Case.from_dict(data), None, None
        unknown = sorted(set(data) - _FIELDS - {"ratio", "output"})
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}; the fields are {', '.join(sorted(_FIELDS))}")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema is {data.get('schema')!r}; this version reads {SCHEMA}")
        target, check = data.get("target"), data.get("check")
        if target is not None and not isinstance(target, str):
            raise ValueError(f"target is {target!r}; it must be a name in quotes")
        if check is not None and not (isinstance(check, str) and check in BY_NAME):
            raise ValueError(f"check is {check!r}; the checks are {', '.join(BY_NAME)}")
        return Case.from_dict(data["case"]), target, check
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def message(target: str, failures: tuple[Failure, ...], case: Case, replay: str, *, minimal: bool | None = None) -> str:
    """The finding in words: verdict, worst coordinate, values in decimal and hex, ratio, regime, replay line.

    Parameters
    ----------
    minimal : whether shrinking came to its end; None where nothing was shrunk here.
    """
    from verikda.strategies import describe

    lines = failure_lines(target, failures)
    words = {True: "smallest case", False: "case (not shrunk to the end)", None: "case"}
    lines.append(f"  {words[minimal]}: {describe(case)}")
    lines.append(f"  replay: {replay}")
    return "\n".join(lines)


def failure_lines(target: str, failures: tuple[Failure, ...]) -> list[str]:
    """The failures of one call in words, the first six of them."""
    lines = [f"FAIL  {target}"]
    for f in failures[:6]:
        lines.append(f"  {f.check} / {f.output}: {f.message}")
        if f.coordinate is not None and f.expected is not None and f.actual is not None:
            where = ", ".join(str(i) for i in f.coordinate)
            lines.append(
                f"    at [{where}] expected {f.expected:.9g} ({f.dtype} {hex_of(f.expected, f.dtype)})"
                f", got {f.actual:.9g} ({hex_of(f.actual, f.dtype)})"
            )
        if f.ratio is not None:
            lines.append(f"    error / noise floor = {f.ratio:.3g}")
    if len(failures) > 6:
        lines.append(f"  and {len(failures) - 6} more")
    return lines
