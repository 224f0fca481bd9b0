"""Claim: the local anchors of a safe gate are stable and lose nothing.

Three ways to the decays inside a chunk, each under its strongest allowed gates (-5 everywhere, and half of the channels
fast and half slow), all judged by the noise floor of the first:

    pairs          exp(Gamma_i - Gamma_j), one exponential for each pair
    local anchors  exp(Gamma_i - Gamma_a) exp(Gamma_a - Gamma_j) through a row a between j and i, operands rounded to
                   the dtype of q (`oracles.anchored`)
    one anchor     the same through the middle row of the whole chunk
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from oracles.contract import Dtype, operands16
from verikda.case import DTYPES, Case
from verikda.floor import judge
from verikda.report.measure import rounded, shared_call
from verikda.targets import resolve
from verikda.targets.base import Target
from verikda.targets.emulator import Emulator

GATES = (("bound", 5.0), ("mixed", 3.0))
CHUNK = 64


def paths(dtype: str) -> dict[str, Target]:
    """What takes each way, for inputs of a dtype."""
    return {
        "pairs": Emulator(),
        "local anchors": Emulator(operands16(cast(Dtype, dtype), CHUNK)),
        "one anchor": resolve("zoo:ANCHOR_MID"),
    }


def anchor_lines() -> list[dict[str, Any]]:
    """The "claim" line: for each dtype, gate and way the values that are not finite and the ratio of each output."""
    rows = []
    for dtype in DTYPES:
        for gate, size in GATES:
            case = Case(
                lengths=(130,), heads=2, K=32, V=32, dtype=dtype, gate_regime=gate, gate_magnitude=size,
                safe_gate=True, h0="random", dht=True,
            )  # fmt: skip
            call, truth = shared_call(case, True)
            for name, target in paths(dtype).items():
                result = target.run(call)
                judged = judge(
                    result.outputs, result.dtypes, call.problem, Emulator().contract(call), truth=truth, backward=True
                )
                rows.append({
                    "dtype": dtype, "gates": f"{gate} {size:g}", "path": name, "verdict": judged.verdict,
                    "nonfinite": sum(int(np.count_nonzero(~np.isfinite(x))) for x in result.outputs.values()),
                    "ratios": {n: rounded(j.ratio) for n, j in judged.outputs.items()}, "case": case.to_dict(),
                })  # fmt: skip
    return [{"kind": "claim", "claim": "anchors", "rows": rows}]
