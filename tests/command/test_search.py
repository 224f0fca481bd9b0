"""The search finds planted faults, shrinks them to what is needed, keeps what it found, and passes a healthy target.

Planted faults: STATE_TRANSPOSED-like value faults and memory faults of the zoo. What could go wrong here: a failure
lost, a finding that does not fail again, a shrunk case with a knob that is not needed, a pass that judged nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from losing import LOST, Losing

from verikda.call import Call, Capabilities, Crashed, Malformed, Refused, Result
from verikda.case import Case
from verikda.checks import BY_NAME, CHECKS, FREE, Context, named
from verikda.finding import Finding
from verikda.inputs import make_call
from verikda.run_case import CaseReport, run_case
from verikda.search import Search, Settings
from verikda.shrink import candidates, shrink
from verikda.starts import brink_cases, coherent_cases, long_cases, stratified, wide_cases
from verikda.targets import resolve
from verikda.zoo.faults import Fault, forget
from verikda.zoo.target import ZooTarget


@pytest.fixture(autouse=True)
def _fresh() -> None:
    forget()


class Odd(ZooTarget):
    """The healthy zoo behind a hook that may raise or change the answer."""

    def __init__(self, hook: Any) -> None:
        super().__init__()
        self.hook = hook

    def run(self, call: Call) -> Result:
        return self.hook(call, super().run)


def search(target: Any, cases: int = 12, **more: Any) -> Any:
    return Search(target, Settings(cases=cases, stratified=min(cases, 10), turns=1, shrink_attempts=40, **more)).run()


def test_a_healthy_target_passes_and_every_output_is_judged() -> None:
    summary = search(ZooTarget(), 14)
    assert summary.verdict == "pass"
    assert set(summary.judged) >= {"o", "ht", "dq", "dk", "dv", "dg", "dbeta"}
    assert all(0 < ratio <= 4 for ratio, _ in summary.worst.values())
    assert sum(summary.verdicts.values()) == 14


@pytest.mark.parametrize("fault", [Fault.RULE_RESIDUAL_UNDECAYED, Fault.DH0_OFF, Fault.INPUT_OVERWRITTEN])
def test_a_fault_is_found_and_its_finding_fails_again(fault: Fault) -> None:
    summary = search(ZooTarget(fault), 8)
    assert summary.verdict == "fail"
    for finding in summary.findings:
        again = run_case(ZooTarget(fault), finding.case, (BY_NAME[finding.check],))
        assert again.verdict == "fail"
        assert run_case(ZooTarget(), finding.case, (BY_NAME[finding.check],)).verdict == "pass"


def test_failures_that_shrink_to_one_case_are_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = ZooTarget(Fault.RULE_RESIDUAL_UNDECAYED)
    told: list[Finding] = []
    smallest: dict[str, Finding] = {}
    times: Counter[str] = Counter()

    def shrunk(self: Search, finding: Finding) -> Finding:
        times[finding.check] += 1
        return smallest.setdefault(finding.check, finding)

    monkeypatch.setattr(Search, "_shrunk", shrunk)
    settings = Settings(cases=12, stratified=12, checks=named(("floor", "v_first", "recompute")))
    summary = Search(fault, settings, on_finding=told.append).run()
    assert max(times.values()) > 1, "no second failure of a kind"
    assert summary.findings == told == list(smallest.values())


def test_the_same_seed_finds_the_same() -> None:
    def found() -> list[tuple[str, Case]]:
        forget()
        checks = named(("floor", "repeat"))
        return [(f.check, f.case) for f in search(ZooTarget(Fault.DH0_OFF), 12, seed=5, checks=checks).findings]

    assert found() == found() != []


def started(seed: int) -> list[Case]:
    seen: list[Case] = []
    settings = Settings(cases=15, stratified=12, long=True, checks=(), seed=seed)
    Search(ZooTarget(), settings, on_report=lambda report: seen.append(report.case)).run()
    return seen


def test_long_cases_come_after_the_first_few_and_another_seed_is_another_start() -> None:
    first, second = started(0), started(1)
    capabilities = ZooTarget().capabilities
    for seed, seen in ((0, first), (1, second)):
        start = stratified(capabilities, 12, variant=seed)
        assert seen == [*start[:8], *long_cases(capabilities, variant=seed), *start[8:]]
    assert not set(first) & set(second)


def test_wide_cases_come_after_the_first_few_too() -> None:
    seen: list[Case] = []
    settings = Settings(cases=14, stratified=12, wide=2, checks=(), seed=1)
    Search(ZooTarget(), settings, on_report=lambda report: seen.append(report.case)).run()
    capabilities = ZooTarget().capabilities
    start = stratified(capabilities, 12, variant=1)
    assert seen == [*start[:8], *wide_cases(capabilities, 2, variant=1), *start[8:]]


def test_coherent_cases_come_after_twenty_as_every_third_and_those_on_the_brink_after_each_ten() -> None:
    seen: list[Case] = []
    settings = Settings(cases=46, stratified=34, coherent=8, brink=2, checks=(), seed=2)
    Search(ZooTarget(), settings, on_report=lambda report: seen.append(report.case)).run()
    capabilities = ZooTarget().capabilities
    start, few = stratified(capabilities, 34, variant=2), coherent_cases(capabilities, 8, variant=2)
    brink = brink_cases(capabilities, 2, variant=2)
    pairs = [case for i in range(7) for case in (*start[20 + 2 * i : 22 + 2 * i], few[i])]
    assert seen[:44] == [*start[:20], *pairs[:15], brink[0], *pairs[15:], few[7], brink[1]]
    assert len(seen) == 46


def test_a_split_that_hands_on_nan_fails_and_does_not_end_the_search() -> None:
    def broken(call: Call, run: Any) -> Result:
        result = run(call)
        return replace(result, outputs={n: x * np.nan if n in ("ht", "dh0") else x for n, x in result.outputs.items()})

    for check in ("split_anywhere", "split_aligned"):
        report = run_case(Odd(broken), Case(lengths=(40,), K=2, V=2, chunk_size=16), named((check,)))
        assert report.verdict == "fail"
        assert "is not finite and cannot be handed" in report.failures[0].message


def test_a_shrunk_case_needs_every_knob() -> None:
    """Fails only for K != V with an initial state: nothing else may be left in the case."""
    start = Case(lengths=(40, 40), heads=3, groups=2, K=12, V=9, h0="random", dht=True, dtype="float16", seed=77,
                 gate_regime="spike", beta_sigmoid=True, layout="sliced")  # fmt: skip
    case, minimal = shrink(start, lambda c: c.h0 != "none" and c.K > c.V)
    assert minimal
    assert case == Case(h0=case.h0, K=2)
    assert all(not (c.h0 != "none" and c.K > c.V) for c in candidates(case))


def test_shrinking_stops_at_its_budget_and_says_so() -> None:
    start = Case(lengths=(64,), K=64, V=64)
    case, minimal = shrink(start, lambda c: True, attempts=3)
    assert not minimal
    assert case != start


def test_candidates_are_valid_and_different() -> None:
    for case in stratified(Capabilities(), 40):
        steps = list(candidates(case))
        assert case not in steps
        assert steps or case == Case()


def test_a_refusal_is_no_failure_and_a_search_of_refusals_is_inconclusive() -> None:
    def refuse(call: Call, run: Any) -> Result:
        raise Refused("not today")

    summary = search(Odd(refuse), 6)
    assert summary.verdict == "inconclusive"
    assert summary.refusals["not today"] == 6
    assert not summary.findings


@pytest.mark.parametrize("error", [Crashed("CUDA error"), Malformed("o has no axes")])
def test_a_crash_or_a_malformed_answer_is_a_failure(error: Exception) -> None:
    def fail(call: Call, run: Any) -> Result:
        raise error

    summary = search(Odd(fail), 3)
    assert summary.verdict == "fail"
    assert str(error) in summary.findings[0].failures[0].message


@pytest.mark.parametrize("error", [Crashed("CUDA error"), Malformed("o has no axes"), Refused("not today")])
def test_every_check_says_how_a_call_that_fails_ended(error: Exception) -> None:
    """Also a check that must see the result to tell whether it applies."""

    def fail(call: Call, run: Any) -> Result:
        raise error

    for case in (Case(lengths=(5,), K=3, V=2), Case(lengths=(3, 0), K=2, V=2, packed=True, h0="random", dht=True)):
        for check in CHECKS:
            report = run_case(Odd(fail), case, (check,))
            if report.outcomes:
                assert report.verdict == ("refused" if isinstance(error, Refused) else "fail")
                assert str(error) in (report.outcomes[0].detail or report.failures[0].message)
        assert len(run_case(Odd(fail), case).outcomes) >= 1


def compiled(call: Call, run: Any) -> Result:
    """Does not compile for chunks of 32; the text has sizes in it, and lines of the source."""
    if call.chunk_size == 32:
        B, T = call.problem.q.shape[:2]
        raise Crashed(f"CompilationError: at {77 + B}:12:\n  b_g{T} = load(g)\n   ^\nK >= 16 is needed, got {T % 16}")
    return run(call)


def test_a_crash_that_many_checks_see_in_many_cases_is_one_finding() -> None:
    checks = named(("floor", "chunk_sizes", "prefix", "repeat", "views", "call_order"))
    summary = search(Odd(compiled), 30, checks=checks)
    assert summary.failed_cases > 1
    assert len([name for name, count in summary.checks.items() if count["fail"]]) > 1
    (finding,) = summary.findings
    assert "K >= 16 is needed" in finding.failures[0].message


def test_another_crash_and_a_wrong_value_are_findings_of_their_own() -> None:
    def several(call: Call, run: Any) -> Result:
        if call.state_v_first:
            raise Crashed("IndexError: list index out of range")
        result = compiled(call, run)
        return replace(result, outputs={n: 1.5 * x if n == "o" else x for n, x in result.outputs.items()})

    summary = search(Odd(several), 30, checks=named(("floor", "chunk_sizes")))
    found = [{f.kind for f in finding.failures} for finding in summary.findings]
    assert len(found) == 4
    assert sum(len(kinds) for kinds in found) == len(set().union(*found)), "one kind twice"
    assert {("floor", "o"), ("chunk_sizes", "o")} <= set().union(*found)
    for finding in summary.findings:
        again = run_case(Odd(several), finding.case, (BY_NAME[finding.check],))
        assert {f.kind for f in again.failures} == {f.kind for f in finding.failures}


def test_a_failure_does_not_shrink_to_one_of_another_kind() -> None:
    """With one key channel the call crashes: a wrong value must not become that, nor be lost to it."""

    def small(call: Call, run: Any) -> Result:
        if call.problem.q.shape[-1] == 1:
            raise Crashed("CompilationError: K >= 16")
        result = run(call)
        return replace(result, outputs={n: 1.5 * x if n == "o" else x for n, x in result.outputs.items()})

    summary = search(Odd(small), 10, checks=named(("floor",)))
    wrong = next(f for f in summary.findings if f.failures[0].output == "o")
    assert wrong.case.K == 2


def test_no_check_runs_after_a_call_that_fails_at_once() -> None:
    calls: list[Call] = []

    def fail(call: Call, run: Any) -> Result:
        calls.append(call)
        raise Crashed("no")

    assert len(run_case(Odd(fail), Case(lengths=(20,), K=2, V=2)).outcomes) == len(calls) == 1


@pytest.mark.parametrize("error", [Crashed("no"), Malformed("no"), Refused("no")])
def test_another_call_that_fails_first_keeps_no_check_from_running(error: Exception) -> None:
    """Some checks begin with a call of their own: how that ends says nothing of the others."""

    def variant(call: Call, run: Any) -> Result:
        if call.state_v_first:
            raise error
        return run(call)

    report = run_case(Odd(variant), Case(lengths=(20,), K=2, V=2, h0="random"), named(("v_first", "repeat")))
    assert [(o.check, o.verdict == "pass") for o in report.outcomes] == [("v_first", False), ("repeat", True)]


def test_a_call_that_ends_the_context_ends_the_search_with_its_case_as_it_was() -> None:
    """Shrinking could only go to a case that fails like every call after it."""
    seen: list[Any] = []
    target = Losing(lambda call, n: n > 20 and call.problem.q.shape[-1] > 2)
    settings = Settings(cases=60, stratified=40, seed=3)
    summary = Search(target, settings, on_report=seen.append).run()
    (finding,) = summary.findings
    assert finding.case == finding.found_in == seen[-1].case
    assert not finding.minimal
    assert finding.failures[0].message == f"the call ended the CUDA context: {LOST}"
    count = len(seen)
    assert sum(summary.verdicts.values()) == count < 60
    assert summary.lost == [f"share 1 of 1 ended after {count} of its 60 cases, because a call ended the CUDA context"]
    assert (summary.verdict, summary.interrupted) == ("fail", False)


def test_hypothesis_calls_nothing_after_the_context_has_ended() -> None:
    target = Losing(lambda call, n: n > 12)
    summary = Search(target, Settings(cases=40, stratified=4, checks=named(("floor",)))).run()
    assert len(summary.findings) == len(summary.lost) == 1
    assert sum(summary.verdicts.values()) == 13


def test_a_context_that_ends_while_another_failure_is_shrunk_is_a_finding_too() -> None:
    def wrong(call: Call, run: Any) -> Result:
        result = run(call)
        return replace(result, outputs={n: 1.5 * x if n == "o" else x for n, x in result.outputs.items()})

    target = Losing(lambda call, n: call.problem.q.shape[1] == 1, Odd(wrong))
    first = Case(lengths=(33,), K=4, V=4)
    summary = Search(target, Settings(cases=20, checks=named(("floor",))), first=(first,)).run()
    context, value = summary.findings
    assert (context.failures[0].output, context.case.T, context.minimal) == ("call", 1, False)
    assert (value.failures[0].output, value.found_in, value.minimal) == ("o", first, False)
    assert 1 < value.case.T <= 33
    assert len(summary.lost) == 1


def test_a_search_that_has_lost_cases_is_no_pass() -> None:
    summary = search(ZooTarget(), 3)
    assert summary.verdict == "pass"
    summary.lost.append("share 1 of 2 ended")
    assert summary.verdict == "inconclusive"


def test_an_output_that_is_promised_but_missing_is_a_failure() -> None:
    def forward_only(call: Call, run: Any) -> Result:
        result = run(call)
        return replace(result, outputs={n: x for n, x in result.outputs.items() if not n.startswith("d")})

    report = run_case(Odd(forward_only), Case(lengths=(3,), K=2, V=2), named(("floor",)))
    assert report.verdict == "fail"
    assert "dq is missing" in report.failures[0].message


def test_an_interrupt_keeps_what_was_found() -> None:
    seen = []

    def stop(report: Any) -> None:
        seen.append(report)
        if len(seen) == 5:
            raise KeyboardInterrupt

    run = Search(ZooTarget(), Settings(cases=50, stratified=50, turns=0), on_report=stop)
    summary = run.run()
    assert summary.interrupted
    assert sum(summary.verdicts.values()) == 5


def test_an_interrupt_while_shrinking_keeps_the_failure() -> None:
    calls = []

    def stop(call: Call, run: Any) -> Result:
        calls.append(call)
        if len(calls) > 12:
            raise KeyboardInterrupt
        result = run(call)
        return replace(result, outputs={**result.outputs, "o": 1.5 * result.outputs["o"]})

    seen: list[Any] = []
    run = Search(Odd(stop), Settings(cases=20, stratified=20, turns=0), on_finding=seen.append)
    summary = run.run()
    assert summary.interrupted
    assert summary.findings == seen != []
    assert not seen[-1].minimal


def test_the_time_limit_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by a second whenever it is looked at: before each case."""
    monkeypatch.setattr("verikda.search.time", SimpleNamespace(perf_counter=itertools.count().__next__))
    for seconds in (4.5, 14.5):  # within the start, and within what Hypothesis draws
        assert 3 <= sum(search(ZooTarget(), 40, seconds=seconds).verdicts.values()) <= seconds


def test_a_case_that_cannot_tell_is_inconclusive() -> None:
    zero = Case(lengths=(4,), K=2, V=2, value_regime="zero", do_regime="zero")
    report = run_case(resolve("emulator"), zero, named(("floor",)))
    assert report.verdict == "inconclusive"


def test_checks_are_documented() -> None:
    for check in CHECKS:
        assert check.proves
        assert Fault[check.kills].info.kills.count(check.name) == 1


def test_the_checks_that_have_run_least_come_first() -> None:
    target = ZooTarget()
    runs: Counter[str] = Counter()
    waited = []

    def seen(report: CaseReport) -> None:
        ctx = Context(target, make_call(report.case))
        assert report.outcomes[0].check == "floor", "what others see too is a failure of the floor"
        ran = {o.check for o in report.outcomes} - set(FREE)
        assert len(ran) == 2
        others = {c.name for c in CHECKS if c.name not in (*FREE, *ran) and c.applies(ctx) is None}
        assert max(runs[name] for name in ran) <= min(runs[name] for name in others)
        waited.extend(name for name in ran if runs[name] < max(runs.values(), default=0) - 1)
        runs.update(ran)

    Search(target, Settings(cases=50, stratified=50, turns=2), on_report=seen).run()
    assert waited, "every check applied as often"
