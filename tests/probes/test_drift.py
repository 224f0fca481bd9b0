"""Drift along a long sequence: planted faults that start late or grow, and a healthy target that stays flat.

What could go wrong here: a floor that grows with the error and hides it, a window that hides a late fault, growth seen
where there is only scatter.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from planted import Planted

from oracles.contract import recurrent32
from oracles.problem import GRADIENTS, OUTPUTS
from verikda.call import Call, Malformed, Refused, Result
from verikda.probes.drift import GROWS, Drift, drift_case, drifts, growth
from verikda.targets import Target
from verikda.targets.emulator import Emulator
from verikda.zoo.faults import Fault
from verikda.zoo.target import ZooTarget


def one(inner: Target, dtype: str = "float32") -> Planted:
    """A target with one dtype, so that a test makes one call."""
    return Planted(inner, lambda call, result: result, dtypes=(dtype,))


def along(fault: Fault, tokens: int, dtype: str = "float32") -> dict[str, Drift]:
    return {d.output: d for d in drifts(one(ZooTarget(fault), dtype), tokens)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_healthy_target_is_flat(dtype: str) -> None:
    found = along(Fault.NONE, 1024, dtype)
    given = ("A_log", "dt_bias")
    assert set(found) == {n for n in (*OUTPUTS, *GRADIENTS) if n[1:] not in given}
    assert {d.verdict for d in found.values()} == {"pass"}
    assert {d.says for d in found.values()} <= {"", "flat"}
    assert len(found["o"].ratios) == 16
    assert found["ht"].growth is None


def test_a_healthy_recurrence_is_flat() -> None:
    found = {d.output: d for d in drifts(one(Emulator(recurrent32())), 512)}
    assert {d.verdict for d in found.values()} == {"pass"}
    assert {d.says for d in found.values()} <= {"", "flat"}


def test_a_state_that_loses_digits_grows_with_position() -> None:
    """In float16 the state rounded to bfloat16 at every chunk passes in the first window and fails in later ones."""
    found = along(Fault.STATE_IN_BF16, 1024, "float16")
    o = found["o"]
    assert o.ratios[0] < 1.5
    assert o.verdict == "fail"
    assert o.growth is not None
    assert o.growth > GROWS
    assert "grows" in o.says
    assert "towards the end" in o.says
    assert found["ht"].verdict == "fail"
    assert found["dv"].says == "flat"


def test_growth_is_seen_below_the_limit() -> None:
    """In bfloat16 the same fault stays below the limit at this length; its growth gives it away."""
    o = along(Fault.STATE_IN_BF16, 1024, "bfloat16")["dq"]
    assert o.verdict == "pass"
    assert "towards the end" in o.says


def test_a_fault_after_2048_tokens_is_seen_where_it_starts() -> None:
    found = along(Fault.LATE_2048, 2304)
    first_wrong = next(i for i, r in enumerate(found["o"].ratios) if r > 4.0)
    assert 2304 * first_wrong // 16 <= 2048 < 2304 * (first_wrong + 1) // 16
    assert found["o"].verdict == "fail"
    worst = int(np.argmax(found["o"].ratios))
    assert f"in tokens {144 * worst} to {144 * worst + 143}" in found["o"].detail


def test_a_window_that_restarts_is_seen_in_the_state() -> None:
    found = along(Fault.STATE_WINDOW_RESTARTS, 640)
    assert found["ht"].verdict == "fail"
    assert "in the state" in found["ht"].detail


def test_a_decay_that_loses_digits_grows_both_ways() -> None:
    """What a chunk passes on decays by a rounded factor: the state forward, its gradient back."""
    found = along(Fault.DECAY_BF16, 1024, "float16")
    assert "towards the end" in found["o"].says
    assert "towards the start" in found["dv"].says
    assert found["dv"].ratios[-1] < 1.5
    assert {found[name].verdict for name in ("o", "ht", "dv", "dh0")} == {"fail"}


def test_errors_that_grow_towards_the_start() -> None:
    assert growth((8.0, 4.0, 2.0, 1.0)) == pytest.approx(1 / 8)
    assert Drift("dk", "float32", drift_case(ZooTarget(), "float32", 64), (8.0, 1.0), 1 / 8, "fail", "").says == (
        "grows 8 times towards the start"
    )


def test_growth_of_a_step_is_no_more_than_the_step() -> None:
    assert growth((1.0, 1.0, 1.0, 100.0, 100.0, 100.0)) == pytest.approx(100.0)
    assert growth((1.0,)) is None
    assert growth((0.0, 1.0)) is None
    assert growth((1.0, math.inf)) is None


def broken(how: str) -> Planted:
    def change(call: Call, result: Result) -> Result:
        if how == "refused":
            raise Refused("too long")
        if how == "malformed":
            raise Malformed("returned nothing")
        o = result.outputs["o"].copy()
        o[0, -1, 0, 0] = np.nan
        return replace(result, outputs={**result.outputs, "o": o[:, 1:] if how == "shape" else o})

    return Planted(ZooTarget(), change, dtypes=("float32",))


def test_calls_that_go_wrong() -> None:
    (refused,) = drifts(broken("refused"), 64)
    assert (refused.verdict, refused.detail) == ("refused", "too long")
    (malformed,) = drifts(broken("malformed"), 64)
    assert malformed.verdict == "fail"
    shape = next(iter(drifts(broken("shape"), 64)))
    assert (shape.output, shape.verdict) == ("o", "fail")
    assert "it must have (1, 64, 1, 4)" in shape.detail
    nan = {d.output: d for d in drifts(broken("nan"), 64)}["o"]
    assert nan.ratios[-1] == math.inf
    assert max(nan.ratios[:-1]) < 4.0
    assert nan.verdict == "fail"
