"""An output that another call of a check does not give is a failure, not one output less to judge."""

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
WITHOUT_DK: dict[str, Callable[[Call], bool]] = {
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
    """Healthy, but some calls give no dk."""

    def __init__(self, lacks: Callable[[Call], bool]) -> None:
        super().__init__()
        self.lacks = lacks

    def run(self, call: Call) -> Result:
        result = super().run(call)
        kept = {n: x for n, x in result.outputs.items() if n != "dk" or not self.lacks(call)}
        return replace(result, outputs=kept)


@pytest.mark.parametrize("check", WITHOUT_DK)
def test_it_is_named(check: str) -> None:
    case = replace(CASE, gate_regime="bound", gate_magnitude=6.0) if check == "safe_gate" else CASE
    (outcome,) = run_case(Partial(WITHOUT_DK[check]), case, named((check,))).outcomes
    assert [f.output for f in outcome.failures] == ["dk"]
    assert "dk is missing" in outcome.failures[0].message
    (outcome,) = run_case(ZooTarget(), case, named((check,))).outcomes
    assert outcome.verdict == "pass"
