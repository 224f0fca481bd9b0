"""Permuted heads and sequences: every bit of a target that promises it, the noise floor of one that does not."""

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

CASE = Case(lengths=(9, 9), heads=2, K=4, V=4)


def first_is_other(factor: float, invariant: bool) -> Planted:
    """A healthy target whose first head and first sequence differ by `factor`, whatever lies there."""

    def change(call: Call, result: Result) -> Result:
        o = result.outputs["o"].copy()
        o[0, :, 0] = (o[0, :, 0] * factor).astype(np.float32)
        return replace(result, outputs={**result.outputs, "o": o})

    return Planted(resolve("emulator"), change, shape_invariant=invariant)


@pytest.mark.parametrize("check", ["permute_heads", "permute_batch"])
@pytest.mark.parametrize(
    ("factor", "invariant", "verdict"),
    [(1.0, True, "pass"), (1 + 2**-23, True, "fail"), (1 + 2**-23, False, "pass"), (1.01, False, "fail")],
)
def test_by_bits_or_by_value(check: str, factor: float, invariant: bool, verdict: str) -> None:
    outcomes, _, _ = run_call(first_is_other(factor, invariant), make_call(CASE), named((check,)))
    assert [o.verdict for o in outcomes] == [verdict]
