"""Rows and totals of the kill matrix, from its record alone."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from verikda.case import Case
from verikda.zoo.kills import Kill, budget
from verikda.zoo.specimens import HEALTHY, SPECIMENS, Specimen


@dataclass(frozen=True)
class Row:
    """One specimen over all seeds.

    Attributes
    ----------
    subject : the specimen.
    seeds, killed : searches, and those that found it.
    cases, seconds : medians up to the first failing case, over the searches that found it.
    slowest : most seconds of those.
    first : (check, output) that failed first, the most frequent one.
    fails : per check, in how many searches it fails on the failing case.
    shown : the failing case of the lowest seed.
    """

    subject: Specimen
    seeds: int
    killed: int
    cases: float
    seconds: float
    slowest: float
    first: tuple[str, str]
    fails: Counter[str]
    shown: Case | None


@dataclass(frozen=True)
class Totals:
    """Over the zoo.

    Attributes
    ----------
    specimens, searches : how many were run.
    killed : searches that found their fault.
    always : specimens found with every seed.
    never : names of those found with no seed.    sometimes : found with some seeds only.
    cases, seconds : medians of the rows' medians.    slowest : row with the largest time.
    healthy, alarms : searches of the healthy implementation, and those of them that failed.
    healthy_cases : cases of those searches.
    """

    specimens: int
    searches: int
    killed: int
    always: int
    never: tuple[str, ...]
    sometimes: tuple[str, ...]
    cases: float
    seconds: float
    slowest: Row | None
    healthy: int
    alarms: int
    healthy_cases: int


_FIELDS: dict[str, set[str]] = {
    "zoo": {"budget", "environment"},
    "kill": {f.name for f in fields(Kill)},
    "rival": {"specimen", "outputs", "complaints"},
}
"""What a line of each kind has at least."""


def read(path: Path) -> list[dict[str, Any]]:
    """Lines of a record; the last one may be cut short by an interrupt.

    Raises
    ------
    ValueError
        When the file is no record of the zoo, or one of another search.
    """
    if not path.exists():
        return []
    lines = []
    try:
        rows = path.read_bytes().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); name another file") from None
    for number, text in enumerate(rows, 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if not isinstance(line, dict) or not _FIELDS.get(str(line.get("kind")), {"kind"}) <= line.keys():
            raise ValueError(f"{path}, line {number}, is no record of the zoo; name another file")
        if line["kind"] == "zoo" and line["budget"] != budget():
            raise ValueError(f"{path} is of the search {line['budget']}, this one is {budget()}; name a new file")
        lines.append(line)
    return lines


def kills(lines: list[dict[str, Any]]) -> list[Kill]:
    """The kills of a record; of a search that was run twice, the last."""
    found = {(line["specimen"], line["seed"]): Kill.from_line(line) for line in lines if line["kind"] == "kill"}
    return list(found.values())


def rows(results: list[Kill]) -> list[Row]:
    """One row per specimen, in the order of the zoo."""
    made = []
    for name, subject in SPECIMENS.items():
        own = sorted((k for k in results if k.specimen == name), key=lambda k: k.seed)
        hits = [k for k in own if k.killed]
        if not own:
            continue
        first = Counter((k.check, k.output) for k in hits).most_common(1)
        made.append(
            Row(
                subject,
                len(own),
                len(hits),
                median([k.cases for k in hits] or [0]),
                median([k.seconds for k in hits] or [0]),
                max([k.seconds for k in hits], default=0.0),
                first[0][0] if first else ("", ""),
                Counter(check for k in hits for check in k.fails),
                Case.from_dict(hits[0].case) if hits else None,
            )
        )
    return made


def totals(results: list[Kill]) -> Totals:
    """Sums over a record."""
    table = rows(results)
    found = [r for r in table if r.killed]
    healthy = [k for k in results if k.specimen == HEALTHY.name]
    return Totals(
        len(table),
        sum(r.seeds for r in table),
        sum(r.killed for r in table),
        sum(r.killed == r.seeds for r in table),
        tuple(r.subject.name for r in table if not r.killed),
        tuple(r.subject.name for r in table if 0 < r.killed < r.seeds),
        median([r.cases for r in found] or [0]),
        median([r.seconds for r in found] or [0]),
        max(found, key=lambda r: r.slowest, default=None),
        len(healthy),
        sum(k.killed for k in healthy),
        sum(k.cases for k in healthy),
    )
