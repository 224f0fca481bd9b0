"""The kill matrix: for each planted fault and seed, the first case of the search that shows it.

The search is that of `verikda check` with the ci profile's budget, ended at the first failing case. Time is processor
time of the search up to there, references and noise floors included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from typing import Any

from verikda.case import Case
from verikda.interrupts import processes
from verikda.profiles import PROFILES
from verikda.run_case import CaseReport, run_case
from verikda.search import Search, Settings
from verikda.zoo.specimens import HEALTHY, SPECIMENS, Specimen

BUDGET = PROFILES["ci"]
ORDINARY = 500
"""Tokens up to which all checks run on a failing case; on thousands of tokens they take a minute."""


@dataclass(frozen=True)
class Kill:
    """What one search said of one specimen.

    Attributes
    ----------
    specimen, seed : which search.
    killed : whether a case failed. Of the healthy implementation none must.
    cases : cases run, the failing one included.
    seconds : processor time up to there.
    check, output : first failure of the failing case, "" where none failed.
    fails : every check that fails on that case: of all checks for seed 0 and a case of at most `ORDINARY` tokens, of
        those that the search ran otherwise.
    case : the case, in its JSON form.
    """

    specimen: str
    seed: int
    killed: bool
    cases: int
    seconds: float
    check: str = ""
    output: str = ""
    fails: tuple[str, ...] = ()
    case: dict[str, Any] | None = None

    def to_line(self) -> dict[str, Any]:
        """A line of the record."""
        return {"kind": "kill", **asdict(self)}

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> Kill:
        """The kill that `to_line` wrote."""
        known = {name: line[name] for name in cls.__dataclass_fields__}
        return cls(**{**known, "fails": tuple(known["fails"])})


class _Found(KeyboardInterrupt):
    """Ends a search as Ctrl-C does."""


def settings(seed: int) -> Settings:
    """The search of the ci profile."""
    return Settings.of(BUDGET, seed=seed)


def budget() -> dict[str, object]:
    """What a record of kills depends on; records with another one are not continued."""
    s = settings(0)
    return {
        name: getattr(s, name)
        for name in ("cases", "stratified", "long", "wide", "coherent", "brink", "turns", "limit")
    }


def hunt(subject: Specimen, seed: int) -> Kill:
    """Search one specimen until the first case that fails.

    Raises
    ------
    KeyboardInterrupt
        When the user asks for it.
    """
    found: list[tuple[CaseReport, float]] = []
    target = subject.make()

    def on_report(report: CaseReport) -> None:
        if report.verdict == "fail":
            found.append((report, time.process_time() - started))
            raise _Found

    search = Search(target, settings(seed), on_report=on_report)
    started = time.process_time()
    summary = search.run()
    cases = sum(summary.verdicts.values())
    if not found:
        if summary.interrupted:
            raise KeyboardInterrupt
        return Kill(subject.name, seed, False, cases, round(time.process_time() - started, 3))
    report, seconds = found[0]
    first = report.failures[0]
    fails = {f.check for f in report.failures}
    if seed == 0 and sum(report.case.lengths) <= ORDINARY:
        fails |= {f.check for f in run_case(subject.make(), report.case).failures}
    return Kill(
        subject.name, seed, True, cases, round(seconds, 3), first.check, first.output, tuple(sorted(fails)),
        report.case.to_dict(),
    )  # fmt: skip


def _hunt_by_name(name: str, seed: int) -> Kill:
    return hunt(HEALTHY if name == HEALTHY.name else SPECIMENS[name], seed)


def warm_up() -> None:
    """Imports and first uses, which are no part of a search's time."""
    run_case(HEALTHY.make(), Case(lengths=(3,), K=2, V=2))


def hunt_all(wanted: list[tuple[str, int]], jobs: int) -> Iterator[Kill]:
    """Hunt every (specimen, seed), `jobs` at a time, and give the results as they come."""
    if jobs == 1:
        warm_up()
        for name, seed in wanted:
            yield _hunt_by_name(name, seed)
        return
    with processes(jobs, warm_up) as pool:
        for done in as_completed([pool.submit(_hunt_by_name, name, seed) for name, seed in wanted]):
            yield done.result()
