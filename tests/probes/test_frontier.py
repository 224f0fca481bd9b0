"""Where overflow starts: the planted anchors at their analytic frontier, a healthy target nowhere.

What could go wrong here: bisection that steps over a narrow band of bad gates, a refusal or a wrong finite number taken
for an overflow, a frontier reported for a target that has none.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from planted import Planted

from verikda.call import Call, Capabilities, Refused, Result
from verikda.case import Case
from verikda.probes import plain_case
from verikda.probes.frontier import KINDS, Frontier, analytic, frontier
from verikda.zoo.faults import Fault
from verikda.zoo.target import ZooTarget


def found(fault: Fault, kind: str, dtype: str = "float32", chunk: int = 16, target: Any = None) -> Frontier:
    result = frontier(target or ZooTarget(fault), kind, dtype, chunk)
    assert result is not None
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_healthy_target_has_no_frontier(kind: str, dtype: str) -> None:
    f = found(Fault.NONE, kind, dtype)
    assert (f.finite, f.within, f.verdict, f.report) == (None, None, "pass", None)
    assert f.top == KINDS[kind].rungs[-1]


@pytest.mark.parametrize(
    ("fault", "chunk", "like"),
    [
        (Fault.ANCHOR_CHUNK_START, 64, "start"),
        (Fault.ANCHOR_CHUNK_START, 16, "start"),
        (Fault.ANCHOR_MID, 64, "middle"),
        (Fault.MASK_AFTER_EXP, 32, "start"),
    ],
)
def test_an_anchor_overflows_at_its_analytic_frontier(fault: Fault, chunk: int, like: str) -> None:
    """C - 1 steps lie between the first and the last row, so the frontier is a little beyond ln(max) / C."""
    f = found(fault, "constant", chunk=chunk)
    assert f.verdict == "fail"
    assert f.like == like
    assert f.finite is not None
    assert f.within is not None
    least = math.log(3.4028234663852886e38) / chunk * (2 if like == "middle" else 1)
    assert 0.98 * least <= f.finite <= 1.09 * least
    assert f.within <= f.finite


def test_a_narrow_band_of_bad_spikes_is_found() -> None:
    """It overflows from 88.7 nats on, and from 104 on the implementation takes a gate as a hard reset."""
    f = found(Fault.ANCHOR_MID, "spike")
    assert f.finite == pytest.approx(88.7, rel=0.03)


def test_a_finite_but_wrong_result_is_a_frontier_of_precision_only() -> None:
    f = found(Fault.ANCHOR_CLAMPED, "constant", chunk=64)
    assert f.finite is None
    assert f.within == pytest.approx(60 / 64, rel=0.1)
    assert f.verdict == "fail"


def test_a_bounded_gate_and_a_reset_are_probed() -> None:
    assert found(Fault.ANCHOR_MID, "bounded", chunk=64).finite == pytest.approx(2.77, rel=0.03)
    reset = found(Fault.HARD_RESET_NAN, "reset")
    assert (reset.finite, reset.within, reset.verdict) == (0.0, 0.0, "fail")


def test_the_reported_case_shows_it_and_smaller_gates_do_not() -> None:
    f = found(Fault.ANCHOR_CHUNK_START, "constant", chunk=64)
    assert f.report is not None
    case = f.report.case
    assert case.gate_magnitude == pytest.approx(f.finite, rel=0.03)
    assert f.line["case"] == case.to_dict()
    assert f.line["gates"] == "constant"
    assert all(math.isnan(x.actual) or math.isinf(x.actual) for x in f.report.failures if x.actual is not None)


def bounded() -> Planted:
    """A target that declines gates below -5."""

    def decline(call: Call, result: Result) -> Result:
        if call.problem.g is not None and call.problem.gate == "log" and call.problem.g.min() < -5.0:
            raise Refused("gates below -5 are not supported")
        return result

    return Planted(ZooTarget(), decline, hard_reset=False, k_sizes=(8,), dht=False)


def test_refused_gates_end_the_climb_without_a_verdict() -> None:
    f = found(Fault.NONE, "constant", target=bounded())
    assert (f.top, f.finite, f.verdict) == (5.0, None, "pass")


def test_what_the_capabilities_rule_out_is_not_asked() -> None:
    assert frontier(bounded(), "reset", "float32", 16) is None
    case = plain_case(bounded().capabilities, {"lengths": (3,)}, {})
    assert (case.K, case.dht, case.h0) == (8, False, "random")
    assert plain_case(Capabilities(), {"lengths": (3,), "K": 5}, {}) == Case(
        lengths=(3,), K=5, V=4, h0="random", dht=True
    )


def test_analytic_frontiers() -> None:
    assert analytic("constant", "float16", 64) == pytest.approx(
        {"start": 1.386, "middle": 2.773, "16-row block": 5.545, "float16 start": 0.1733}, rel=1e-3
    )
    assert analytic("window", "float32", 64)["start"] == pytest.approx(5.545, rel=1e-3)
