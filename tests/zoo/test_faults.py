"""No fault of the zoo is inert: each changes what it says it changes, on the calls of its recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from test_chunked import limit
from zoo_calls import Array, make_call

from oracles.recurrence import forward_reverse
from verikda import inputs
from verikda.call import Call, Result
from verikda.checks import BY_NAME, named
from verikda.run_case import run_call
from verikda.targets.base import TargetError
from verikda.zoo.faults import Fault, forget
from verikda.zoo.recipes import RECIPES, case_of
from verikda.zoo.target import ZooTarget, zoo_target

BETWEEN_CALLS = (Fault.SECOND_CALL, Fault.ORDER_OF_SUM_VARIES, Fault.PACK_OFFSETS_CACHED, Fault.DTYPE_CACHED)
ONE_CALL = [f for f in Fault if f not in (Fault.NONE, *BETWEEN_CALLS)]


def shown_by(fault: Fault) -> list[Call]:
    """Calls that show a fault to the checks that it names."""
    return [inputs.make_call(case_of(knobs)) for knobs in RECIPES[fault]]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget()
    yield
    forget()


def differs(a: Result, b: Result) -> list[str]:
    assert a.outputs.keys() == b.outputs.keys()
    return [n for n in a.outputs if not np.array_equal(a.outputs[n], b.outputs[n], equal_nan=True)]


def excess(call: Call, result: Result) -> float:
    """Largest relative error over all results, in units of what rounding explains."""
    truth = {n: x for n, x in forward_reverse(call.problem).items() if n in result.outputs}
    norms = {n: float(np.linalg.norm(t)) or 1.0 for n, t in truth.items()}
    relative = [float(np.linalg.norm(result.outputs[n] - t)) / norms[n] for n, t in truth.items()]
    return float(np.max(relative)) / limit(call)  # NaN stays NaN


SHOWN_IN: dict[tuple[str, ...], dict[str, object]] = {
    ("poison",): {"poison": np.nan},
    ("safe_gate",): {"safe_gate": True},
    ("split_anywhere",): {"backward": False},
    ("frozen",): {"frozen": ("beta",)},
    ("second_backward",): {"backwards": 2},
}
"""What a check changes of a call, for faults that show only then."""


@pytest.mark.parametrize("fault", ONE_CALL, ids=lambda f: f.name)
def test_fault_shows(fault: Fault) -> None:
    call = replace(shown_by(fault)[0], **SHOWN_IN.get(fault.info.kills, {}))
    if fault is Fault.STATE_LOSS_ALONE:
        call = replace(call, problem=replace(call.problem, do=None))
    healthy, faulty = ZooTarget().run(call), ZooTarget(fault).run(call)
    assert healthy.changed == ()
    assert all(np.isfinite(v).all() for v in healthy.outputs.values())
    if fault.info.kills == ("inputs_unchanged",):
        assert faulty.changed
        return
    assert differs(healthy, faulty)
    if "floor" in fault.info.kills:
        assert not excess(call, faulty) < 2


def test_repeats_differ() -> None:
    call = make_call()
    for fault in (Fault.SECOND_CALL, Fault.ORDER_OF_SUM_VARIES):
        target = ZooTarget(fault)
        assert differs(target.run(call), target.run(call))
    assert not differs(ZooTarget().run(call), ZooTarget().run(call))


def test_offsets_of_the_first_call_stay() -> None:
    first, then = make_call((20, 5, 10)), make_call((5, 20, 10))
    target = ZooTarget(Fault.PACK_OFFSETS_CACHED)
    assert not differs(target.run(first), ZooTarget().run(first))
    assert differs(target.run(then), ZooTarget().run(then))


def test_dtype_of_the_first_call_stays() -> None:
    first, then = make_call(dtype="bfloat16", g_dtype="bfloat16"), make_call()
    target = ZooTarget(Fault.DTYPE_CACHED)
    assert not differs(target.run(first), ZooTarget().run(first))
    assert differs(target.run(then), ZooTarget().run(then))


def test_future_anchor_leaks_below_rounding() -> None:
    # Only the bits of earlier rows tell: the values stay right.
    call = make_call((22,), packed=False)
    p = call.problem
    assert p.g is not None
    later = p.g.copy()
    later[:, 21] *= 3
    changed = replace(call, problem=replace(p, g=later.astype(np.float32).astype(np.float64)))
    short = {n: getattr(p, n)[:, :21] for n in ("q", "k", "v", "g", "beta", "do")}
    prefix = replace(call, problem=replace(p, **short))
    target = ZooTarget(Fault.ANCHOR_FUTURE)
    assert excess(call, target.run(call)) < 1
    for other in (changed, prefix):
        assert np.array_equal(*(ZooTarget().run(c).outputs["o"][:, :21] for c in (call, other)))
        assert not np.array_equal(*(target.run(c).outputs["o"][:, :21] for c in (call, other)))


def early_and_late(a: dict[str, Array]) -> None:
    a["do"][:, :8] *= 1e4
    a["do"][:, 8:] *= 1e-4


def test_total_minus_prefix_ruins_only_late_gate_gradients() -> None:
    call = make_call((130,), packed=False, chunk=64, edit=early_and_late)
    late = forward_reverse(call.problem)["dg"][:, 8:64]

    def error(fault: Fault) -> float:
        return float(np.linalg.norm(ZooTarget(fault).run(call).outputs["dg"][:, 8:64] - late) / np.linalg.norm(late))

    assert error(Fault.NONE) < 1e-5
    assert error(Fault.CUMSUM_TOTAL_MINUS_PREFIX) > 1e-3


@pytest.mark.parametrize("fault", [f for f in Fault if f is not Fault.NONE], ids=lambda f: f.name)
def test_every_check_that_a_fault_names_sees_it(fault: Fault) -> None:
    seen: set[str] = set()
    for call in shown_by(fault):
        forget()
        left = tuple(name for name in fault.info.kills if name not in seen)
        outcomes, _, _ = run_call(ZooTarget(fault), call, named(left))
        seen |= {o.check for o in outcomes if o.verdict == "fail"}
    assert set(fault.info.kills) <= seen


@pytest.mark.parametrize("name", BY_NAME)
def test_every_check_is_named_by_a_fault(name: str) -> None:
    assert any(name in f.info.kills for f in Fault)


def test_faults_are_told_apart() -> None:
    infos = [f.info for f in Fault]
    assert len(Fault.__members__) == len(Fault) == len({i.what for i in infos})
    assert [f for f in Fault if not f.info.kills] == [Fault.NONE]


def test_targets_by_name() -> None:
    assert zoo_target("zoo").fault is Fault.NONE
    assert zoo_target("zoo:dq_off").name == "zoo:DQ_OFF"
    with pytest.raises(TargetError, match="did you mean DQ_OFF"):
        zoo_target("zoo:DQ_OF")
