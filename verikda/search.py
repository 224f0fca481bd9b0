"""The search: the corpus of worst cases first, then every regime once, then Hypothesis.

Nothing stops at the first failure: each new kind of failure (`Failure.kind`) is shrunk and kept, and the search goes on
with the budget that is left.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from verikda.case import Case
from verikda.checks import BY_NAME, CALL, CHECKS, FREE, Check, Failure
from verikda.finding import Finding
from verikda.floor import LIMIT
from verikda.interrupts import held
from verikda.permits import permits
from verikda.run_case import CaseReport, run_case
from verikda.shrink import shrink
from verikda.starts import brink_cases, coherent_cases, long_cases, stratified, wide_cases
from verikda.strategies import cases, labels
from verikda.targets.base import Target

if TYPE_CHECKING:
    from verikda.profiles import Profile

_BEFORE_LONG = 8
"""Cases of the start that are tried before the long and the wide ones: whatever shows at all mostly shows in these."""

_BEFORE_COHERENT = 20
"""And before the coherent ones, which show little else than one rounding too many, and those on the brink."""


@dataclass(frozen=True)
class Settings:
    """Budget and rules of one search.

    Attributes
    ----------
    cases : how many cases, corpus and stratified start included.
    stratified : how many of them are the start in which every regime appears, the same for the same seed.
    long : whether cases of thousands of tokens follow on the first few.
    wide : how many more with the channels of real models follow on those.
    coherent : how many more cases of few terms, where one rounding is the whole error, the start has later on.
    brink : how many more in float16 just below its largest number.
    turns : further checks per case beside those that cost no call.
    seconds : wall-clock limit, None for none; shrinking may run past it by `shrink_seconds` per finding.
    limit : largest ratio that passes.
    shrink_attempts, shrink_seconds : budget of shrinking one finding.
    part : (i, n) runs the i-th of n shares: every n-th case of the fixed start and an n-th of the budget.
    seed : of the start and of Hypothesis; the same seed and versions give the same cases.
    """

    cases: int = 100
    stratified: int = 60
    long: bool = False
    wide: int = 0
    coherent: int = 0
    brink: int = 0
    turns: int = 2
    seconds: float | None = None
    limit: float = LIMIT
    seed: int = 0
    checks: tuple[Check, ...] = CHECKS
    shrink_attempts: int = 250
    part: tuple[int, int] = (0, 1)
    shrink_seconds: float = 60.0

    @classmethod
    def of(cls, profile: Profile, *, cases: int | None = None, **more: Any) -> Settings:
        """The budget of a profile.

        Parameters
        ----------
        cases : in place of the profile's.
        more : the other fields.
        """
        return cls(
            cases=profile.cases if cases is None else cases,
            stratified=profile.stratified,
            long=profile.long,
            wide=profile.wide,
            coherent=profile.coherent,
            brink=profile.brink,
            turns=profile.turns,
            **more,
        )


@dataclass
class Summary:
    """What a search saw, kept up to date while it runs.

    Attributes
    ----------
    worst : per output, the largest ratio that any check saw and its case.
    judged : per output, in how many cases a check by value judged it.
    checks : per check, counts of its verdicts.
    verdicts : counts of case verdicts.
    findings : one per new kind of failure.
    refusals : texts with which the target declined, with counts.
    ran : what the target said it ran, with counts.
    contracts : what cases were judged under, with counts, for each text of `ran`.
    lost : shares that ended before their cases did, in words: how.
    """

    target: str
    worst: dict[str, tuple[float, Case]] = field(default_factory=dict)
    judged: Counter[str] = field(default_factory=Counter)
    checks: dict[str, Counter[str]] = field(default_factory=dict)
    verdicts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    failed_cases: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    doubts: Counter[str] = field(default_factory=Counter)
    ran: Counter[str] = field(default_factory=Counter)
    contracts: dict[str, Counter[str]] = field(default_factory=dict)
    calls: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    lost: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """fail, pass, or inconclusive when no case could tell right from wrong, or those of a lost share might have."""
        if self.findings or self.failed_cases:
            return "fail"
        return "pass" if self.verdicts["pass"] and not self.lost else "inconclusive"

    def failing_outputs(self) -> set[str]:
        """Outputs named by a finding of a check of value."""
        return {f.output for finding in self.findings for f in finding.failures}

    def add(self, report: CaseReport) -> None:
        """Count one case."""
        self.verdicts[report.verdict] += 1
        self.calls += report.calls
        if report.ran:
            self.ran[report.ran] += 1
            self.contracts.setdefault(report.ran, Counter())[report.contract] += 1
        for o in report.outcomes:
            self.checks.setdefault(o.check, Counter())[o.verdict] += 1
            if o.verdict == "refused":
                self.refusals[o.detail] += 1
            elif o.verdict == "inconclusive":
                self.doubts[f"{o.check}: {o.detail}"] += 1
            for output, ratio in o.ratios.items():
                self._worse(output, ratio, report.case)
        self.judged.update({output for o in report.outcomes for output in o.ratios})
        if not report.outcomes:  # of the checks that were asked for, none applies
            self.doubts.update(f"{check}: {reason}" for check, reason in report.skipped.items())
        self.failed_cases += report.verdict == "fail"

    def _worse(self, output: str, ratio: float, case: Case) -> None:
        if output not in self.worst or ratio > self.worst[output][0]:
            self.worst[output] = (ratio, case)


OnReport = Callable[[CaseReport], None]
OnFinding = Callable[[Finding], None]


class Search:
    """One search of one target.

    Parameters
    ----------
    on_report, on_finding : called as results come; a KeyboardInterrupt raised anywhere ends the search and
        leaves `summary` with everything found so far.
    """

    def __init__(
        self,
        target: Target,
        settings: Settings,
        *,
        first: Iterable[Case] = (),
        on_report: OnReport | None = None,
        on_finding: OnFinding | None = None,
    ) -> None:
        self.target = target
        self.settings = settings
        self.first = tuple(first)
        self.summary = Summary(target.name)
        self._on_report = on_report or (lambda report: None)
        self._on_finding = on_finding or (lambda finding: None)
        self._seen: set[tuple[str, str]] = set()
        self._count = 0
        self._runs: Counter[str] = Counter()
        self._started = 0.0

    def run(self) -> Summary:
        """Run to the end of the budget."""
        self._started = time.perf_counter()
        try:
            capabilities = self.target.capabilities
            for case in self.first:
                if self._left() and permits(capabilities, case) is None:
                    self._try(case, everything=True)
            part, parts = self.settings.part
            for case in islice(self._start(), part, None, parts):
                if not self._left():
                    break
                self._try(case)
            if self._left():
                self._generate(self._left())
        except KeyboardInterrupt:
            self.summary.interrupted = True
        self.summary.seconds = time.perf_counter() - self._started
        return self.summary

    def _start(self) -> Iterator[Case]:
        """The fixed start: the stratified cases, after the first few the long and the wide ones.

        Later on a coherent one after each two, and one on the brink after each ten.
        """
        settings, capabilities = self.settings, self.target.capabilities
        start = stratified(capabilities, min(settings.stratified, settings.cases), variant=settings.seed)
        yield from start[:_BEFORE_LONG]
        if settings.long:
            yield from long_cases(capabilities, variant=settings.seed)
        yield from wide_cases(capabilities, settings.wide, variant=settings.seed)
        yield from start[_BEFORE_LONG:_BEFORE_COHERENT]
        coherent = iter(coherent_cases(capabilities, settings.coherent, variant=settings.seed))
        brink = iter(brink_cases(capabilities, settings.brink, variant=settings.seed))
        for i, case in enumerate(start[_BEFORE_COHERENT:], 1):
            yield case
            if i % 2 == 0:
                yield from islice(coherent, 1)
            if i % 10 == 0:
                yield from islice(brink, 1)
        yield from coherent
        yield from brink

    @property
    def _share(self) -> int:
        part, parts = self.settings.part
        return len(range(part, self.settings.cases, parts))

    def _left(self) -> int:
        over = self.settings.seconds is not None and time.perf_counter() - self._started > self.settings.seconds
        return 0 if over or self.summary.lost else max(0, self._share - self._count)

    def _generate(self, count: int) -> None:
        import math

        import hypothesis
        from hypothesis import HealthCheck, Phase, given, target
        from hypothesis import settings as hypothesis_settings

        @hypothesis.seed(self.settings.seed * self.settings.part[1] + self.settings.part[0])
        @hypothesis_settings(
            max_examples=count,
            phases=[Phase.generate, Phase.target],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(cases(self.target.capabilities))
        def explore(case: Case) -> None:
            if not self._left():
                return
            report = self._try(case)
            for label in labels(case):
                hypothesis.event(label)
            for output, ratio in sorted(self._ratios(report).items()):
                target(math.log10(min(max(ratio, 1e-3), 1e12)), label=output)

        explore()

    @staticmethod
    def _ratios(report: CaseReport) -> dict[str, float]:
        return {k: v for o in report.outcomes if o.check == "floor" for k, v in o.ratios.items()}

    def _try(self, case: Case, *, everything: bool = False) -> CaseReport:
        settings = self.settings
        # Those of the others that have run least come first, so that one that seldom applies runs wherever it does.
        checks = tuple(sorted(settings.checks, key=lambda check: self._runs[check.name]))
        turns = None if everything else settings.turns
        report = run_case(self.target, case, checks, limit=settings.limit, turns=turns)
        self._runs.update(outcome.check for outcome in report.outcomes if outcome.check not in FREE)
        with held():  # what is counted is told
            self._count += 1
            self.summary.add(report)
            self._on_report(report)
        self._find(report)
        return report

    def _find(self, report: CaseReport) -> None:
        """Keep the new kinds of failure in a report, shrunk unless nothing can be run any more."""
        if report.lost:
            part, parts = self.settings.part
            name = f"share {part + 1} of {parts}"
            self.summary.lost.append(
                f"{name} ended after {self._count} of its {self._share} cases, because a call ended the CUDA context"
            )
        for o in report.outcomes:
            kinds = {f.kind for f in o.failures}
            if o.verdict == "fail" and not kinds <= self._seen:
                self._seen |= kinds
                name, first = self.target.name, report.case
                finding = Finding(name, o.check, first, False, o.failures, first, report.ran)
                try:
                    if not self.summary.lost:
                        finding = self._shrunk(finding)
                finally:  # an interrupt while shrinking keeps the failure as it was first seen
                    self._seen |= {f.kind for f in finding.failures}
                    # another failure may have shrunk to the same case
                    if all((f.check, f.case) != (finding.check, finding.case) for f in self.summary.findings):
                        self.summary.findings.append(finding)
                        self._on_finding(finding)

    def _shrunk(self, finding: Finding) -> Finding:
        one, settings = (BY_NAME[finding.check],), self.settings
        smallest = finding

        def still_fails(case: Case) -> bool:
            nonlocal smallest
            if self.summary.lost or permits(self.target.capabilities, case) is not None:
                return False
            again = run_case(self.target, case, one, limit=settings.limit)
            if again.lost:
                self._find(again)
                return False
            # a crash that became a wrong value, or the other way round, would be kept in place of what was found
            if again.verdict != "fail" or _ended(again.failures) != _ended(finding.failures):
                return False
            smallest = replace(finding, case=case, failures=again.failures, ran=again.ran)
            return True

        _, minimal = shrink(
            finding.case, still_fails, seconds=settings.shrink_seconds, attempts=settings.shrink_attempts
        )
        return replace(smallest, minimal=minimal and not self.summary.lost)


def _ended(failures: tuple[Failure, ...]) -> set[tuple[str, str]]:
    """How calls without a result ended."""
    return {f.kind for f in failures if f.output == CALL}
