"""What another call of a check does not give, or gives wrong, is a failure that says of which call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from planted import Planted

from verikda.call import Call, Result
from verikda.case import Case
from verikda.checks import named
from verikda.run_case import run_case
from verikda.zoo.target import ZooTarget

CASE = Case(lengths=(21,), K=4, V=3, h0="random", dht=True)
OTHER: dict[str, Callable[[Call], bool]] = {
    "chunk_sizes": lambda call: call.chunk_size == 32,
    "recompute": lambda call: not call.recompute,
    "v_first": lambda call: call.state_v_first,
    "safe_gate": lambda call: call.safe_gate,
    "split_anywhere": lambda call: call.problem.q.shape[1] == 20,
    "call_order": lambda call: call.dtypes["q"] != "float32",
    "state_loss": lambda call: call.problem.do is None,
    "frozen": lambda call: bool(call.frozen),
    "second_backward": lambda call: call.backwards > 1,
}


def in_some(calls: Callable[[Call], bool], change: Callable[[Result], Result]) -> Planted:
    """A healthy target with the results of some calls changed."""
    return Planted(ZooTarget(), lambda call, result: change(result) if calls(call) else result)


def with_dk_times(factor: float | None) -> Callable[[Result], Result]:
    """Dk times a factor, or left out."""

    def change(result: Result) -> Result:
        dk = {n: factor * x for n, x in result.outputs.items() if n == "dk" and factor is not None}
        return replace(result, outputs={n: x for n, x in result.outputs.items() if n != "dk"} | dk)

    return change


def writes_k(result: Result) -> Result:
    return replace(result, changed=("k",))


@pytest.mark.parametrize("factor", [None, 2.0])
@pytest.mark.parametrize("check", OTHER)
def test_it_is_named(check: str, factor: float | None) -> None:
    case = replace(CASE, gate_regime="bound", gate_magnitude=6.0) if check == "safe_gate" else CASE
    (outcome,) = run_case(in_some(OTHER[check], with_dk_times(factor)), case, named((check,))).outcomes
    assert [f.output for f in outcome.failures] == ["dk"]
    which, _, what = outcome.failures[0].message.partition(": ")
    assert which
    assert "dk" not in which
    assert what.startswith("dk is missing" if factor is None else "dk[") or "elements differ" in what
    (outcome,) = run_case(ZooTarget(), case, named((check,))).outcomes
    assert outcome.verdict == "pass"


@pytest.mark.parametrize("check", OTHER)
def test_an_input_that_another_call_writes_is_seen(check: str) -> None:
    case = replace(CASE, gate_regime="bound", gate_magnitude=6.0) if check == "safe_gate" else CASE
    (outcome,) = run_case(in_some(OTHER[check], writes_k), case, named((check,))).outcomes
    assert outcome.verdict == "fail"
    assert [f.output for f in outcome.failures] == ["k"]
    assert outcome.failures[0].message == "a call that this check makes changed k, or memory beside it"


def test_an_input_that_is_written_in_inference_only_is_seen() -> None:
    target = in_some(lambda call: not call.backward, writes_k)
    outcomes = {o.check: o for o in run_case(target, CASE, named(("inputs_unchanged", "split_anywhere"))).outcomes}
    assert (outcomes["inputs_unchanged"].verdict, outcomes["split_anywhere"].verdict) == ("pass", "fail")
