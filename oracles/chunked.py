"""The emulator: KDA and DeltaNet as a rounding contract says they are computed.

The algorithm is in `oracles.chunked_forward`, `oracles.chunked_backward` and `oracles.tokenwise`, what is in front of
it in `oracles.preactivation`, and the arithmetic in which it runs in `oracles.operations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from oracles.arithmetic import Arithmetic
from oracles.chunked_backward import Gradients
from oracles.chunked_backward import backward as reverse
from oracles.chunked_forward import Blocks, forward
from oracles.contract import Contract
from oracles.layout import Layout, make_layout
from oracles.outputs import finish
from oracles.preactivation import Preactivation
from oracles.problem import Problem
from oracles.rounding import Floats
from oracles.tokenwise import emulate_tokens
from oracles.validate import check_problem


@dataclass
class Trace:
    """What an emulated call gives.

    Attributes
    ----------
    outputs : as the float64 recurrence's, keyed by oracles.problem.OUTPUTS and GRADIENTS, float64. With
        stochastic arithmetic every array has a leading run axis [R, ...] and is not rounded to its dtype.
    intermediates : empty unless asked for; [.., N, HV, chunks, C, D] by their names in the equations:
        Gamma, Aqk, A, L, U, W, Qg, Kg, Vnew; S [.., N, HV, chunks, K, V] before each chunk; from the backward
        dAqk, dU, dW, dA, dL, dQg, dKg, and dS [.., N, HV, chunks, K, V] after each chunk.
        Zero past the end of a sequence. Arrays without a run axis are the same in every run.
    """

    outputs: dict[str, Floats]
    intermediates: dict[str, Floats] = field(default_factory=dict)


def emulate(
    problem: Problem,
    contract: Contract,
    arithmetic: Arithmetic,
    *,
    backward: bool = True,
    intermediates: bool = False,
    output_dtypes: Mapping[str, str] | None = None,
) -> Trace:
    """Run the contract's algorithm in the given arithmetic.

    Parameters
    ----------
    problem : a call, see `oracles.validate.check_problem`.
    contract : chunk size, sites and storage dtype. `chunk` None is the token recurrence.
    arithmetic : Exact() | Nearest() | Stochastic(rng, runs).
    backward : whether gradients are computed; a missing do or dht is 0.
    intermediates : whether `Trace.intermediates` is filled (chunked contracts only).
    output_dtypes : dtype of outputs that `Nearest` rounds to; by default o, dq, dk, dv have the
        storage dtype and everything else is float32.

    Returns
    -------
    Trace

    Raises
    ------
    ValueError
        When the problem has no meaning, or intermediates are asked of the token recurrence.
    """
    check_problem(problem)
    if contract.chunk is None:
        if intermediates:
            raise ValueError(f"{contract.name} has no chunks and so no intermediates; use a chunked contract.")
        return Trace(emulate_tokens(problem, contract, arithmetic, backward=backward, output_dtypes=output_dtypes))
    op = arithmetic.under(contract)
    longest = max((b - a for _, a, b in problem.spans), default=0)
    # rows of padding change nothing, so a chunk need not be longer than the longest sequence
    chunk = contract.chunk if intermediates else max(1, min(contract.chunk, longest))
    layout = make_layout(problem, chunk)
    front = Preactivation(problem, layout, op)
    heads = problem.v.shape[2]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        x = front.forward()
        blocks = forward(problem, layout, x, op)
        tokens = {"o": layout.rows(blocks.o, heads)}
        other = {"ht": blocks.ht}
        back = None
        if backward:
            back = reverse(problem, layout, blocks, op)
            rows = {name: layout.rows(y, heads) for name, y in back.tokens.items()}
            tokens["dv"] = rows["dv"]
            tokens |= front.reverse(rows["dq"], rows["dk"], rows["dbeta"], rows.get("dg"), x)
            other |= {"dh0": back.dh0} if problem.h0 is not None else {}
            other |= {name: tokens.pop(name) for name in ("dA_log", "ddt_bias") if name in tokens}
        outputs = finish(problem, layout, op, tokens, other, output_dtypes)
    inner = _intermediates(layout, heads, blocks, back) if intermediates else {}
    return Trace(outputs, inner)


def _intermediates(layout: Layout, heads: int, blocks: Blocks, back: Gradients | None) -> dict[str, Floats]:
    names = ("Gamma", "Aqk", "A", "L", "U", "W", "Qg", "Kg", "Vnew", "S")
    flat = {name: getattr(blocks, name) for name in names if getattr(blocks, name) is not None}
    if back is not None:
        flat |= back.intermediates
    out = {}
    for name, y in flat.items():
        runs = y.shape[:-3]
        y = y.reshape(*runs, -1, heads, *y.shape[-2:])
        full = np.zeros((*runs, len(layout.order), heads, len(layout.active), *y.shape[-2:]))
        sequence = layout.order[layout.rank_of]
        full[..., sequence[:, None], np.arange(heads), layout.chunk_of[:, None], :, :] = y
        out[name] = full
    return out
