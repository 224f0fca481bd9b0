"""A bounded run of the pool's state machine, with what it found as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from verikda.checks import CHECKS, FREE, named
from verikda.finding import Finding
from verikda.permits import permits
from verikda.probes.pool import PoolError, pool_machine
from verikda.run_case import run_case
from verikda.targets.base import Target

EXAMPLES = 30
STEPS = 20


@dataclass(frozen=True)
class PoolReport:
    """What a run of the pool saw.

    Attributes
    ----------
    verdict : fail, pass, or inconclusive where no call could be judged.
    counts : pools, and calls by their verdict, up to the first failure.
    failure : the shortest history found that goes wrong.
    repeats : whether it goes wrong each time it is tried.
    finding : one call that shows the same fault alone, where there is one.
    """

    verdict: str
    counts: dict[str, int]
    failure: PoolError | None = None
    repeats: bool = True
    finding: Finding | None = None

    @property
    def message(self) -> str:
        """The steps and what is wrong, in words."""
        if self.failure is None:
            return ""
        again = "" if self.repeats else "\nnot each time: it depends on what earlier calls left behind"
        alone = "" if self.finding else "\nno single call tried shows it alone"
        return f"{self.failure}{again}{alone}"

    @property
    def line(self) -> dict[str, object]:
        """Its JSON line."""
        steps = [] if self.failure is None else list(self.failure.steps)
        wrong = [] if self.failure is None else [f"{f.output}: {f.message}" for f in self.failure.failures]
        case = {} if self.finding is None else {"case": self.finding.case.to_dict(), "check": self.finding.check}
        return {
            "kind": "pool", "verdict": self.verdict, "counts": self.counts, "steps": steps, "failures": wrong,
            "repeats": self.repeats, **case,
        }  # fmt: skip


def run_pool(
    target: Target, *, seed: int = 0, examples: int = EXAMPLES, steps: int = STEPS, shrink: bool = True
) -> PoolReport:
    """Run the state machine of `pool_machine`.

    Parameters
    ----------
    seed : of Hypothesis.
    examples, steps : pools, and steps in each.
    shrink : whether a failing history is made as short as it can be.

    Raises
    ------
    TargetError
        When the target takes no initial state.
    """
    machine = pool_machine(target)
    hypothesis.seed(seed)(machine)
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    failure, repeats = None, True
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except PoolError as error:
        failure = error
    except Flaky as error:
        failure, repeats = next(_pool_failures(error), None), False
        if failure is None:
            raise
    counts = dict(machine.tally)
    if failure is None:
        return PoolReport("pass" if counts.get("pass") else "inconclusive", counts)
    return PoolReport("fail", counts, failure, repeats, _alone(target, failure))


def _pool_failures(error: BaseException) -> Iterator[PoolError]:
    """Failures inside a group of exceptions, or in what led to one."""
    if isinstance(error, PoolError):
        yield error
    for inner in (*getattr(error, "exceptions", ()), error.__cause__, error.__context__):
        if inner is not None:
            yield from _pool_failures(inner)


def _alone(target: Target, failure: PoolError) -> Finding | None:
    """The first candidate in which one call shows a fault; checks that need no further call come first."""
    cases = [case for case in failure.candidates if permits(target.capabilities, case) is None]
    for checks in (named(FREE), CHECKS):
        for case in cases:
            report = run_case(target, case, checks)
            for o in report.outcomes:
                if o.verdict == "fail":
                    return Finding(target.name, o.check, case, False, o.failures, case, report.ran)
    return None
