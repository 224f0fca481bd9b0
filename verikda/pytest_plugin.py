"""pytest plugin: `pytest --verikda-target=NAME` runs the checks on a target, one test per check.

One more test, `verikda::pool`, uses the target as a decode engine does (`verikda.probes.pool`); leave it, or any other,
out with `--deselect=verikda::pool` or `-k "not pool"`.

Fixtures for users' own tests: `verikda_target` (the target of the option), `verikda_check` (judge one Case on a
target by named checks; fails the test with the finding's message).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from verikda.threads import torch_on_one_thread

if TYPE_CHECKING:
    from verikda.case import Case
    from verikda.search import Settings, Summary
    from verikda.targets.base import Target


_FOLDER = Path("verikda-findings")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --verikda-target, --verikda-profile, --verikda-cases and --verikda-seed."""
    group = parser.getgroup("verikda", "numerical checks of KDA and DeltaNet kernels")
    group.addoption("--verikda-target", metavar="NAME", help="run the checks on this target (see `verikda targets`)")
    group.addoption("--verikda-profile", default="ci", metavar="NAME", help="dev, ci, gpu, nightly or hunt (ci)")
    group.addoption("--verikda-cases", type=int, metavar="N", help="number of cases, instead of the profile's")
    group.addoption("--verikda-seed", type=int, default=0, metavar="N", help="seed of the search (0)")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse numbers that no search can take, before anything runs."""
    cases, seed = config.getoption("verikda_cases"), config.getoption("verikda_seed")
    if cases is not None and cases < 1:
        raise pytest.UsageError(f"--verikda-cases is {cases}; give at least 1, or leave it out for the profile's")
    if not 0 <= seed < 2**32:
        raise pytest.UsageError(f"--verikda-seed is {seed}; give a number from 0 to {2**32 - 1}")
    if config.getoption("verikda_target") == "":
        raise pytest.UsageError("--verikda-target is empty, so nothing would be checked; name a target")
    if cases is not None and not config.getoption("verikda_target"):
        raise pytest.UsageError(f"--verikda-cases is {cases}, but no target is named: give --verikda-target=NAME too")


class CheckItem(pytest.Item):
    """One check on one target; all items of a run share one search."""

    def __init__(self, *, check: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check = check

    def runtest(self) -> None:
        """Fail when the search found a failure of this check; skip when the check never ran."""
        from verikda.checks import CALL

        summary = _summary(self.config)
        findings = [f for f in summary.findings if f.check == self.check]
        counts = summary.checks.get(self.check, Counter())
        if findings or counts["fail"]:
            # calls without a result are one finding, of the check that saw one first
            raise CheckError(findings or [f for f in summary.findings if f.failures[0].output == CALL])
        if not counts["pass"]:
            doubts = [text for text in summary.doubts if text.startswith(self.check + ":")]
            reasons = doubts + list(summary.refusals)
            pytest.skip(f"no case could tell: {reasons[0] if reasons else 'the check applies to no drawn case'}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The finding's own message instead of a traceback."""
        if isinstance(excinfo.value, CheckError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[str, None, str]:
        """Shown as verikda::target::check."""
        return "verikda", None, f"verikda::{self.config.getoption('verikda_target')}::{self.check}"


class PoolItem(pytest.Item):
    """The pool of carried states of one target."""

    def runtest(self) -> None:
        """Fail when a pool goes wrong; skip when the target carries no state or no call could be judged."""
        from verikda.probes.pool_run import run_pool

        target, settings = _plan(self.config)
        if not target.capabilities.initial_state:
            pytest.skip("the target takes no initial state")
        with torch_on_one_thread():
            report = run_pool(target, seed=settings.seed, examples=max(1, settings.cases // _CASES_PER_POOL))
        if report.verdict == "fail":
            raise CheckError([] if report.finding is None else [report.finding], report.message)
        if report.verdict != "pass":
            pytest.skip(f"no call could be judged: {report.counts}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The steps instead of a traceback."""
        return str(excinfo.value) if isinstance(excinfo.value, CheckError) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[str, None, str]:
        """Shown as verikda::target::pool."""
        return "verikda", None, f"verikda::{self.config.getoption('verikda_target')}::pool"


_CASES_PER_POOL = 8
"""A pool makes some tens of small calls and costs about as much as this many cases."""


class CheckError(Exception):
    """Findings of one check, after a text of its own."""

    def __init__(self, findings: list[Any], text: str = "") -> None:
        from verikda.finding import message

        texts = [text] if text else []
        for finding in findings:
            path = finding.write(_FOLDER)
            texts.append(
                message(
                    finding.target, finding.failures, finding.case, f"verikda replay {path}", minimal=finding.minimal
                )
            )
        super().__init__("\n".join(texts))


_SUMMARY: pytest.StashKey[Summary] = pytest.StashKey()


def _summary(config: pytest.Config) -> Summary:
    """The one search of this run, made when the first check asks for it."""
    if _SUMMARY not in config.stash:
        from verikda.search import Search

        search = Search(*_plan(config))
        with torch_on_one_thread():
            config.stash[_SUMMARY] = search.run()
    return config.stash[_SUMMARY]


def _plan(config: pytest.Config) -> tuple[Target, Settings]:
    """The target and the budget that the options name."""
    from verikda.choose import choose_one
    from verikda.profiles import PROFILES
    from verikda.search import Settings
    from verikda.targets import resolve

    profile = choose_one("profile", PROFILES, config.getoption("verikda_profile"))
    cases, seed = config.getoption("verikda_cases"), config.getoption("verikda_seed")
    settings = Settings.of(profile, cases=cases, seed=seed)
    return resolve(config.getoption("verikda_target")), settings


class CheckCollector(pytest.Collector):
    """Collects one item per check, and the pool."""

    def collect(self) -> Iterator[pytest.Item]:
        """One item per check, in their order, then the pool."""
        from verikda.checks import CHECKS

        for check in CHECKS:
            yield CheckItem.from_parent(self, name=check.name, check=check.name)
        yield PoolItem.from_parent(self, name="pool")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Append the check items when a target was named, before pytest leaves out what -k and --deselect say."""
    if not config.getoption("verikda_target"):
        return
    from verikda.targets.base import TargetError

    try:
        _plan(config)
    except (TargetError, ValueError) as error:
        raise pytest.UsageError(str(error)) from None
    if _FOLDER.exists() and not _FOLDER.is_dir():
        raise pytest.UsageError(f"{_FOLDER} is a file; findings go into a folder of this name: move the file")
    collector = CheckCollector.from_parent(session, name="verikda", nodeid="verikda")
    items.extend(collector.collect())


@pytest.fixture(scope="session")
def verikda_target(request: pytest.FixtureRequest) -> Target:
    """The target named by --verikda-target; the test is skipped without it."""
    name = request.config.getoption("verikda_target")
    if not name:
        pytest.skip("give --verikda-target=NAME")
    from verikda.targets import resolve

    return resolve(name)


@pytest.fixture(scope="session")
def verikda_check() -> Callable[..., None]:
    """`verikda_check(target, case, checks=None)`: run a case through checks; a failure fails the test.

    `target` is a name, a Target or a function, `checks` a name or a sequence of names (all of them when None). An
    inconclusive or refused case fails too: a test that cannot tell is no test. Within Hypothesis' `given` such a case
    is rejected instead, so it counts for nothing, and Hypothesis fails the test when it finds no others; its
    statistics say why.
    """

    def run(target: Target | Callable[..., Any] | str, case: Case, checks: str | Sequence[str] | None = None) -> None:
        import hypothesis

        from verikda.checks import CHECKS, named
        from verikda.finding import message
        from verikda.run_case import run_case
        from verikda.targets import as_target, resolve

        name = getattr(target, "__qualname__", type(target).__name__)
        chosen = resolve(target) if isinstance(target, str) else as_target(target, name)
        if checks is not None:
            checks = (checks,) if isinstance(checks, str) else tuple(checks)
        with torch_on_one_thread():
            report = run_case(chosen, case, CHECKS if checks is None else named(checks))
        if report.verdict == "fail":
            again = f"from verikda.case import Case; case = Case.from_json({case.to_json()!r})"
            pytest.fail(message(chosen.name, report.failures, case, again), pytrace=False)
        if report.verdict != "pass":
            doubts = {o.check: o.detail for o in report.outcomes if o.verdict != "pass"} or report.skipped
            details = "; ".join(f"{check}: {why}" for check, why in doubts.items())
            if hypothesis.currently_in_test_context():
                hypothesis.event(f"{report.verdict}: {details}")
                hypothesis.reject()
            pytest.fail(f"{chosen.name}: {report.verdict}: {details}", pytrace=False)

    return run
