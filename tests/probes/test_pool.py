"""Pools of states: each planted fault of decode is killed, and a healthy target passes.

What could go wrong here: rules that never run, states compared with copies of themselves, a fault that only shows in
the second call passed over because Hypothesis cannot repeat it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from planted import Planted

from verikda.call import Call, Crashed, Refused, Result
from verikda.case import Case
from verikda.probes.pool import ROOM, Pool, PoolError, pool_machine
from verikda.probes.pool_run import PoolReport, run_pool
from verikda.targets.base import Target, TargetError
from verikda.zoo.faults import Fault, forget
from verikda.zoo.target import ZooTarget

BASE = Case(K=3, V=2, heads=2, chunk_size=16)


@pytest.fixture(autouse=True)
def _a_fresh_process() -> None:
    forget()


def small(target: Target) -> PoolReport:
    """The same pools in every run."""
    return run_pool(target, seed=1, examples=12, steps=8, shrink=False)


def by_hand(target: Target, base: Case = BASE) -> Pool:
    machine = pool_machine(target)()
    machine.begin(base)
    return machine


def wrapped(change: Callable[[Call, Result], Result], fault: Fault = Fault.NONE, **capabilities: Any) -> Planted:
    """A target of the zoo with something done to each call or result."""
    return Planted(ZooTarget(fault), change, **capabilities)


def test_a_healthy_target_passes_and_every_rule_runs() -> None:
    done: list[str] = []

    def look(call: Call, result: Result) -> Result:
        p = call.problem
        lengths = () if p.cu_seqlens is None else np.diff(p.cu_seqlens)
        kinds = ["empty"] * (0 in lengths) + ["packed"] * (len(lengths) > 1) + ["batch"] * (p.q.shape[0] > 1)
        done.extend(kinds or ["state" if p.h0 is not None else "no state"])
        return result

    report = small(wrapped(look))
    assert report.verdict == "pass", report.message
    assert {"empty", "packed", "batch", "state", "no state"} <= set(done)
    assert report.counts["pools"] >= 12  # Hypothesis may begin some that it gives up
    assert "fail" not in report.counts
    assert report.message == ""


@pytest.mark.parametrize(
    "fault",
    [
        Fault.PACK_STATE_LEAKS,
        Fault.PACK_OFFSETS_CACHED,
        Fault.PACK_EMPTY_RESETS,
        Fault.PACK_EMPTY_SHIFTS_SLOTS,
        Fault.STATE_SLOT_ZERO,
        Fault.STATE_IN_PLACE,
        Fault.STATE_TRANSPOSED,
        Fault.STATE_H0_IGNORED,
        Fault.LATE_K_NOT_V,
        Fault.SECOND_CALL,
    ],
)
def test_a_fault_of_decode_is_killed(fault: Fault) -> None:
    report = small(ZooTarget(fault))
    assert report.verdict == "fail"
    assert report.failure is not None
    assert report.failure.steps[0].startswith("start: ")
    assert report.failure.failures
    assert report.line["steps"] == list(report.failure.steps)


def test_a_fault_of_single_tokens_is_killed() -> None:
    machine = by_hand(ZooTarget(Fault.SIGMOID_TWICE_IN_DECODE), replace(BASE, beta_sigmoid=True))
    machine.append(0, 5)
    with pytest.raises(PoolError, match=r"error is .* times the noise floor"):
        machine.append(0, 1)


def test_the_shortest_history_and_a_case_are_reported() -> None:
    few: dict[str, Any] = {  # knobs, so that shrinking is quick
        **{"dtypes": ("float32",), "chunk_sizes": (16,), "rules": ("kda",), "gates": ("log",), "max_k": 2, "max_v": 1},
        **dict.fromkeys(("grouped", "scale", "qk_l2norm", "beta_sigmoid", "safe_gate", "state_v_first"), False),
        **{"recompute": False, "g_dtypes": ("float32",), "beta_dtypes": ("float32",)},
    }
    faulty = wrapped(lambda call, result: result, Fault.PACK_STATE_LEAKS, **few)
    report = run_pool(faulty, seed=1, examples=20, steps=4)
    assert report.repeats
    assert report.failure is not None
    start, *steps = report.failure.steps
    assert "H=1 HV=1 K=1 V=1" in start
    assert "gate random x 1; k random" in start
    assert steps in (  # which of the two is smaller is Hypothesis's affair
        ["append in one pack 1 tokens to slot 0, 0 tokens to slot 1"],
        ["append in one batch 1 tokens to slot 0, 1 tokens to slot 1"],
    )
    assert all(step in report.message for step in steps)
    assert report.finding is not None
    assert report.finding.case.packed
    assert report.line["case"] == report.finding.case.to_dict()
    assert report.counts["fail"] == 1


def test_a_fault_that_needs_two_calls_says_that_none_alone_shows_it_or_which_check_does() -> None:
    report = small(ZooTarget(Fault.PACK_OFFSETS_CACHED))
    assert report.verdict == "fail"
    assert ("no single call tried shows it alone" in report.message) == (report.finding is None)


def test_a_fault_that_does_not_repeat_is_reported_with_its_steps() -> None:
    calls = 0

    def once(call: Call, result: Result) -> Result:
        nonlocal calls
        calls += 1
        return replace(result, outputs={**result.outputs, "o": result.outputs["o"] + (calls == 9)})

    report = small(wrapped(once))
    assert (report.verdict, report.repeats) == ("fail", False)
    assert "not each time: it depends on what earlier calls left behind" in report.message
    assert report.failure is not None
    assert len(report.failure.steps) > 1
    assert report.finding is None


def test_what_is_written_into_the_pool_is_seen() -> None:
    def scribble(call: Call, result: Result) -> Result:
        if call.problem.h0 is not None and call.problem.h0.base is not None:
            call.problem.h0.base[-1] += 1.0  # the last slot of the pool that the state is a view of
        return result

    machine = by_hand(wrapped(scribble))
    with pytest.raises(PoolError, match="wrote into the state of slot 3"):
        machine.append(0, 2)


def test_none_and_a_zero_state_must_agree() -> None:
    def nudge(call: Call, result: Result) -> Result:
        if call.problem.h0 is not None:
            return result
        return replace(result, outputs={**result.outputs, "o": np.nextafter(result.outputs["o"], 1.0)})

    with pytest.raises(PoolError, match="a zero state in place of none"):
        by_hand(wrapped(nudge)).append(1, 2)


def test_packed_and_separate_must_agree_where_it_is_promised() -> None:
    def nudge(call: Call, result: Result) -> Result:
        if call.problem.cu_seqlens is None:
            return result
        return replace(result, outputs={**result.outputs, "ht": np.nextafter(result.outputs["ht"], 1.0)})

    with pytest.raises(PoolError, match="slot 2 in the packed, against the same call alone"):
        by_hand(wrapped(nudge)).append_packed([(2, 3), (0, 0)])
    machine = by_hand(wrapped(nudge, shape_invariant=False))
    machine.append_packed([(2, 3), (0, 0)])
    assert machine.slots[2].at == 3


def test_errors_within_the_floor_of_each_step_that_add_up_are_seen_in_the_whole_history() -> None:
    def bias(call: Call, result: Result) -> Result:
        ht = result.outputs["ht"].astype(np.float32)
        away = np.nextafter(ht, np.copysign(np.float32(np.inf), ht)).astype(np.float64)
        return replace(result, outputs={**result.outputs, "ht": away})

    machine = by_hand(wrapped(bias), replace(BASE, gate_regime="zero", beta_regime="tiny"))
    for _ in range(40):
        machine.append(0, 1)
    with pytest.raises(PoolError, match="step by step: "):
        machine.recall(0)


def test_forks_resets_and_full_slots() -> None:
    machine = by_hand(ZooTarget())
    machine.append(0, 5)
    machine.fork(0, 2)
    before = machine.states.copy()
    machine.append(2, 3)
    assert np.array_equal(machine.states[0], before[0])
    assert not np.array_equal(machine.states[2], before[2])
    machine.recall(2)
    machine.recall(0)
    machine.reset(2)
    assert machine.slots[2].fresh
    assert not machine.states[2].any()
    for _ in range(7):
        machine.append(0, 20)
    assert machine.slots[0].at == ROOM
    assert machine.slots[2].seed != machine.slots[0].seed
    machine.untouched()


def test_a_refused_call_leaves_the_pool_as_it_was() -> None:
    def refuse(call: Call, result: Result) -> Result:
        raise Refused("no decode here")

    report = small(wrapped(refuse))
    assert report.verdict == "inconclusive"
    assert report.counts["refused"] > 0


def test_a_crash_is_a_failure() -> None:
    def crash(call: Call, result: Result) -> Result:
        raise Crashed("IndexError: 7")

    with pytest.raises(PoolError, match="call: IndexError: 7"):
        by_hand(wrapped(crash)).append(0, 1)


def test_packed_rules_are_off_for_a_target_without_packs() -> None:
    def forbid(call: Call, result: Result) -> Result:
        assert call.problem.cu_seqlens is None
        return result

    assert small(wrapped(forbid, packed=False, empty=False)).verdict == "pass"


def test_a_target_without_a_state_cannot_be_asked() -> None:
    with pytest.raises(TargetError, match="takes no initial state"):
        pool_machine(wrapped(lambda call, result: result, initial_state=False))


TestPool = pool_machine(ZooTarget()).TestCase
TestPool.settings = settings(max_examples=3, stateful_step_count=5)
