"""From the emulator's arrays to the outputs of the public layout."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from oracles.layout import Layout, public_tokens
from oracles.operations import Operations
from oracles.problem import Problem
from oracles.rounding import Floats

_RANK = {"o": 4, "dq": 4, "dk": 4, "dv": 4, "dg": 4, "dbeta": 3, "ht": 4, "dh0": 4, "dA_log": 1, "ddt_bias": 2}


def finish(
    problem: Problem,
    layout: Layout,
    op: Operations,
    tokens: dict[str, Floats],
    other: dict[str, Floats],
    output_dtypes: Mapping[str, str] | None,
) -> dict[str, Floats]:
    """Bring outputs into the public layout and round them as the arithmetic says.

    Parameters
    ----------
    tokens : [.., n, heads, D] by output name.
    other : ht, dh0 [.., N*HV, K, V] in the layout's order, dA_log [.., HV, 1], ddt_bias [.., HV, K].
    """
    B, T = problem.q.shape[:2]
    N, HV, K, V = len(problem.spans), problem.v.shape[2], problem.q.shape[3], problem.v.shape[3]
    out: dict[str, Floats] = {}
    for name, y in tokens.items():
        out[name] = public_tokens(y, layout, B, T, scalar=name == "dbeta")
    for name, y in other.items():
        if name in ("ht", "dh0"):
            state = y.reshape(*y.shape[:-3], N, HV, K, V)
            out[name] = np.empty_like(state)
            out[name][..., layout.order, :, :, :] = state
        else:
            out[name] = y[..., 0] if name == "dA_log" else y
    storage = op.contract.storage
    default = dict.fromkeys(("o", "dq", "dk", "dv"), storage)
    dtypes = default | dict(output_dtypes or {})
    for name, y in out.items():
        y = op.output(y, dtypes.get(name, "float32")).astype(np.float64, copy=False)
        if op.runs is not None and y.ndim == _RANK[name]:
            y = np.broadcast_to(y, (op.runs, *y.shape))
        out[name] = y
    return out
