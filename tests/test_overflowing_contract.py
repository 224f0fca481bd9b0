"""Where the contract itself overflows, NaN behind a token that counts for nothing is no finding of a relation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planted import Planted

from verikda.call import Call, Result
from verikda.case import Case
from verikda.checks import named
from verikda.inputs import make_call
from verikda.run_case import run_call
from verikda.targets import resolve

# found by a search on a GPU: dU is beyond float16 in the last token, and infinity times its weight of 0 is NaN
CASE = Case(
    lengths=(7,), V=13, dtype="float16", gate_magnitude=0.0625, v_exponent=4, do_exponent=3, h0="large", seed=12000108
)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("target", ["emulator", "zoo"])
@pytest.mark.parametrize("check", ["prefix", "length"])
def test_no_alarm_on_a_healthy_target(target: str, check: str) -> None:
    call = make_call(CASE)
    assert not all(np.isfinite(x).all() for x in resolve(target).run(call).outputs.values())
    outcomes, _, _ = run_call(resolve(target), call, named((check,)))
    assert [o.verdict for o in outcomes] == ["inconclusive" if check == "prefix" else outcomes[0].verdict]
    assert not any(o.failures for o in outcomes)


def last_row_not_written(call: Call, result: Result) -> Result:
    """The result with NaN in the last row of dk."""
    dk = result.outputs["dk"].copy()
    dk[:, -1] = np.nan
    return replace(result, outputs={**result.outputs, "dk": dk})


def test_nan_is_a_finding_where_the_contract_is_finite() -> None:
    target = Planted(resolve("emulator"), last_row_not_written)
    outcomes, _, _ = run_call(target, make_call(Case(lengths=(20,), K=4, V=4)), named(("prefix",)))
    assert [(f.check, f.output) for o in outcomes for f in o.failures] == [("prefix", "dk")]
