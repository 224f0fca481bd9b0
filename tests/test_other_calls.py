"""What another call of a check does not give, or gives wrong, is a failure that says of which call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

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


class Partial(ZooTarget):
    """Healthy, but some calls give dk times a factor, or no dk."""

    def __init__(self, wrong: Callable[[Call], bool], factor: float | None) -> None:
        super().__init__()
        self.wrong, self.factor = wrong, factor

    def run(self, call: Call) -> Result:
        result = super().run(call)
        if "dk" not in result.outputs or not self.wrong(call):
            return result
        changed = {} if self.factor is None else {"dk": self.factor * result.outputs["dk"]}
        return replace(result, outputs={n: x for n, x in result.outputs.items() if n != "dk"} | changed)


@pytest.mark.parametrize("factor", [None, 2.0])
@pytest.mark.parametrize("check", OTHER)
def test_it_is_named(check: str, factor: float | None) -> None:
    case = replace(CASE, gate_regime="bound", gate_magnitude=6.0) if check == "safe_gate" else CASE
    (outcome,) = run_case(Partial(OTHER[check], factor), case, named((check,))).outcomes
    assert [f.output for f in outcome.failures] == ["dk"]
    which, _, what = outcome.failures[0].message.partition(": ")
    assert which
    assert "dk" not in which
    assert what.startswith("dk is missing" if factor is None else "dk[") or "elements differ" in what
    (outcome,) = run_case(ZooTarget(), case, named((check,))).outcomes
    assert outcome.verdict == "pass"


class Writes(ZooTarget):
    """Healthy, but some calls write into k."""

    def run(self, call: Call) -> Result:
        result = super().run(call)
        return replace(result, changed=("k",)) if self.wrong(call) else result


@pytest.mark.parametrize("check", OTHER)
def test_an_input_that_another_call_writes_is_seen(check: str) -> None:
    case = replace(CASE, gate_regime="bound", gate_magnitude=6.0) if check == "safe_gate" else CASE
    target = Writes()
    target.wrong = OTHER[check]  # type: ignore[attr-defined]
    (outcome,) = run_case(target, case, named((check,))).outcomes
    assert outcome.verdict == "fail"
    assert [f.output for f in outcome.failures] == ["k"]
    assert outcome.failures[0].message == "a call that this check makes changed k, or memory beside it"


def test_an_input_that_is_written_in_inference_only_is_seen() -> None:
    target = Writes()
    target.wrong = lambda call: not call.backward  # type: ignore[attr-defined]
    outcomes = {o.check: o for o in run_case(target, CASE, named(("inputs_unchanged", "split_anywhere"))).outcomes}
    assert (outcomes["inputs_unchanged"].verdict, outcomes["split_anywhere"].verdict) == ("pass", "fail")
