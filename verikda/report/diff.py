"""Two files of lines compared: verdicts, ratios and errors, and times that got worse or better.

Works on what `report`, `check --json` and `bench --json` write. Measurements are the same where target, case and what
is judged are the same; of several the last one counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape

from verikda import show
from verikda.case import Case
from verikda.report.lines import Line, number, read_lines
from verikda.status import FAIL, PASS
from verikda.strategies import describe

RANK = {"pass": 0, "not run": 1, "refused": 1, "inconclusive": 1, "fail": 2}
Key = tuple[str, str, str]
"""(target, what is measured, where): the last two in words."""


@dataclass(frozen=True)
class Measured:
    """One number or verdict of a file.

    Attributes
    ----------
    kind : "verdict", "ratio" (error over noise floor), "error" (relative) or "time".
    value : number, or rank of a verdict.    text : as shown.
    low, high : spread of a time.
    """

    kind: Literal["verdict", "ratio", "error", "time"]
    value: float
    text: str
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Change:
    """One difference that counts."""

    key: Key
    before: str
    after: str
    worse: bool


def measured(lines: Sequence[Line]) -> dict[Key, Measured]:
    """Everything that can be compared, by key.

    Raises
    ------
    ValueError
        When a line holds something else than what verikda writes.
    """
    found: dict[Key, Measured] = {}
    target = ""
    for x in lines:
        if x["kind"] == "run":
            target = str(x.get("target", ""))
        try:
            found.update(_of(x, target))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"a line of kind {x['kind']!r} is not as verikda writes it "
                f"({type(error).__name__}: {error}); measure again"
            ) from None
    return found


def _measured_in(path: Path, lines: Sequence[Line]) -> dict[Key, Measured]:
    try:
        return measured(lines)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _of(x: Line, target: str) -> Iterator[tuple[Key, Measured]]:
    if x["kind"] == "point":
        where = f"{x['series']}: {_case(x['case'])}"
        yield (x["target"], "verdict", where), _verdict(x["verdict"])
        for name, o in x.get("outputs", {}).items():
            yield (x["target"], f"{name} verdict", where), _verdict(o["verdict"])
            yield from _numbers(x["target"], name, where, ratio=o.get("ratio"), error=o.get("error"))
    elif x["kind"] == "stages":
        for name, e in x["errors"].items():
            yield from _numbers(x["target"], f"intermediate {name}", _case(x["case"]), error=e)
    elif x["kind"] == "case":
        for check, verdict in x["checks"].items():
            yield (target, f"{check} verdict", _case(x["case"])), _verdict(verdict)
        for check, ratios in x.get("ratios", {}).items():
            for name, r in ratios.items():
                yield from _numbers(target, f"{check}, {name}", _case(x["case"]), ratio=r)
    elif x["kind"] == "timing":
        where = json.dumps(x["workload"], sort_keys=True)
        yield (x["target"], "verdict", where), _verdict(_bench_verdict(str(x.get("reason") or "")))
        yield from _numbers(x["target"], "worst", where, ratio=x.get("floor_ratio"))
        for name, e in x.get("errors", {}).items():
            yield from _numbers(x["target"], name, where, error=e)
        for mode, t in x.get("times", {}).items():
            median = number(t["median"])
            value = Measured("time", median, f"{median:.4g} us", number(t["low"]), number(t["high"]))
            yield (x["target"], f"time of {mode}, {t['method']}", where), value


def _case(data: Any) -> str:
    """A case in words; its whole JSON, so that two cases never share a key."""
    text = json.dumps(data, sort_keys=True)
    try:
        return f"{describe(Case.from_dict(data))} {text}"
    except ValueError:
        return text


def _verdict(text: str) -> Measured:
    return Measured("verdict", float(RANK.get(text, 1)), text)


def _bench_verdict(reason: str) -> str:
    """Of a line of bench: the reason why nothing was timed says what was wrong."""
    if not reason:
        return "pass"
    return "fail" if reason.startswith(("wrong", "crashed")) else "not run"


def _numbers(target: str, what: str, where: str, **values: Any) -> Iterator[tuple[Key, Measured]]:
    for kind, value in values.items():
        if value is not None:
            m = Measured("ratio" if kind == "ratio" else "error", number(value), f"{number(value):.3g}")
            yield (target, f"{what} {kind}", where), m


def compare(a: Mapping[Key, Measured], b: Mapping[Key, Measured], factor: float, times: bool) -> list[Change]:
    """Differences between two files, the worse ones first.

    Parameters
    ----------
    factor : by which a ratio or an error must change to count. A ratio below 1 counts as 1: nothing can be better than
        a perfect implementation of a contract.
    times : whether times are compared; one counts when the spreads do not overlap.
    """
    changes = []
    for key, old in a.items():
        new = b.get(key)
        if new is None or (old.kind == "time" and not times):
            continue
        direction = _direction(old, new, factor)
        if direction:
            changes.append(Change(key, old.text, new.text, direction > 0))
    return sorted(changes, key=lambda c: not c.worse)


def _direction(old: Measured, new: Measured, factor: float) -> int:
    """1 for worse, -1 for better, 0 for neither."""
    if old.kind == "verdict":
        return (new.value > old.value) - (new.value < old.value)
    if old.kind == "time":
        return (new.low > old.high) - (new.high < old.low)
    before, after = (max(x.value, 1.0) if old.kind == "ratio" else x.value for x in (old, new))
    if math.isnan(before) or math.isnan(after):
        return math.isnan(after) - math.isnan(before)
    if before == after:
        return 0
    return (after > factor * before) - (before > factor * after)


def devices(lines: Sequence[Line]) -> set[str]:
    """Devices on which lines of bench were timed."""
    return {str(x["device"]) for x in lines if x["kind"] == "bench" and "device" in x}


def diff_command(before: Path, after: Path, factor: float) -> int:
    """Print what changed from one file to the other; 1 if something got worse, 2 if they share nothing.

    Raises
    ------
    ValueError
        For files that verikda did not write, or a factor that is not above 1.
    """
    if not factor > 1:
        raise ValueError(f"--factor is {factor:g}, it must be above 1; 1.5 lets a number grow by half")
    out = show.console()
    lines = [read_lines(path) for path in (before, after)]
    a, b = (_measured_in(path, x) for path, x in zip((before, after), lines, strict=True))
    common = a.keys() & b.keys()
    if not common:
        raise ValueError(
            f"{before} and {after} have no measurement in common ({len(a)} and {len(b)} numbers); compare --json files "
            "of the same targets on the same grid or cases"
        )
    first, second = (devices(x) for x in lines)
    changes = compare(a, b, factor, first == second)
    worse = [c for c in changes if c.worse]
    rows = show.table("target", "what", "before", "after", "says", "where")
    for c in changes[:40]:
        target, what, where = c.key
        says = "[bold red]worse[/]" if c.worse else "better"
        rows.add_row(target, what, c.before, c.after, says, escape(where.split(" {")[0]))
    if changes:
        out.print(rows)
    if len(changes) > 40:
        out.print(f"and {len(changes) - 40} more")
    if first != second:
        names = [", ".join(sorted(x)) or "no device" for x in (first, second)]
        out.print(f"times are not compared: they are of {names[0]} and of {names[1]}", markup=False)
    for n, path in ((len(a) - len(common), before), (len(b) - len(common), after)):
        if n:
            out.print(f"{n} numbers are only in {path}", markup=False)
    better = len(changes) - len(worse)
    out.print(f"{len(common)} numbers compared: {len(worse)} worse, {better} better (factor {factor:g})")
    return FAIL if worse else PASS
