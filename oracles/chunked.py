"""The emulator: the chunked algorithm of KDA and DeltaNet under a rounding contract.

    Gamma = inclusive cumsum of g inside the chunk;  gC = its last row;  Q = scale q
    A = (I + diag(beta) L)^-1        U = A diag(beta) V        W = A diag(beta) (exp Gamma * K)
    Kg = exp(gC - Gamma) * K         Qg = exp Gamma * Q        Vnew = U - W S
    O = Qg S + Aqk Vnew              S <- diag(exp gC) S + Kg^T Vnew

Aqk and L are in `oracles.gated`, the backward in `oracles.chunked_backward`, what is in front of the
recurrence in `oracles.preactivation`. Sites round where `Operations.site` is called with their name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from oracles import chunked_backward
from oracles.arithmetic import Arithmetic, Operations
from oracles.contract import Contract
from oracles.gated import GatedProducts
from oracles.layout import Layout, make_layout, public_tokens
from oracles.preactivation import Activated, Preactivation
from oracles.problem import Problem
from oracles.rounding import Floats
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


NOTES = {
    "g": "Gamma", "Aqk": "Aqk", "Akk": "A", "w": "W", "u": "U", "qg": "Qg", "kg": "Kg", "v_new": "Vnew", "h": "S",
    "dAqk": "dAqk", "dAkk": "dA", "dw": "dW", "du": "dU", "dh": "dS",
}  # fmt: skip
"""Names in the reading notes and in public code: names in the equations."""


@dataclass
class Blocks:
    """Operands and intermediates of the forward, one block per chunk, sequence and value head.

    Attributes
    ----------
    Q, K, V, beta : [.., X, C, K], [.., X, C, K], [X, C, V], [.., X, C, 1].
    Gamma, eGamma, eTail : [.., X, C, K] or None without a gate; exp Gamma and exp(gC - Gamma).
    decay : [.., X, K, 1] or None; exp gC.
    products : Aqk, L and their reverse.
    Aqk, L, A : [.., X, C, C].    betaV, betaK, U, W, Kg, Qg, Vnew : [.., X, C, .].
    S : [.., X, K, V], the copy of the state before each chunk that products read.
    ht : [.., N*HV, K, V], sequences in the layout's order.
    """

    Q: Floats
    K: Floats
    V: Floats
    beta: Floats
    Gamma: Floats | None
    eGamma: Floats | None
    eTail: Floats | None
    decay: Floats | None
    products: GatedProducts
    Aqk: Floats
    L: Floats
    A: Floats
    betaV: Floats
    betaK: Floats
    U: Floats
    W: Floats
    Kg: Floats
    Qg: Floats
    Vnew: Floats
    S: Floats
    ht: Floats


def times(x: Floats, factor: Floats | None) -> Floats:
    """Return x * factor, where None stands for 1."""
    return x if factor is None else x * factor


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
        from oracles.tokenwise import emulate_tokens

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
        blocks, O = forward(problem, layout, x, op)
        tokens = {"o": layout.rows(O, heads)}
        other = {"ht": blocks.ht}
        back = None
        if backward:
            back = chunked_backward.backward(problem, layout, blocks, op)
            rows = {name: layout.rows(y, heads) for name, y in back.tokens.items()}
            tokens["dv"] = rows["dv"]
            tokens |= front.reverse(rows["dq"], rows["dk"], rows["dbeta"], rows.get("dg"), x)
            other |= {"dh0": back.dh0} if problem.h0 is not None else {}
            other |= {name: tokens.pop(name) for name in ("dA_log", "ddt_bias") if name in tokens}
        outputs = finish(problem, layout, op, tokens, other, output_dtypes)
    inner = _intermediates(layout, heads, blocks, back) if intermediates else {}
    return Trace(outputs, inner)


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
    ranks = {"o": 4, "dq": 4, "dk": 4, "dv": 4, "dg": 4, "dbeta": 3, "ht": 4, "dh0": 4, "dA_log": 1, "ddt_bias": 2}
    for name, y in out.items():
        y = op.output(y, dtypes.get(name, "float32")).astype(np.float64, copy=False)
        if op.runs is not None and y.ndim == ranks[name]:
            y = np.broadcast_to(y, (op.runs, *y.shape))
        out[name] = y
    return out


def forward(problem: Problem, layout: Layout, x: Activated, op: Operations) -> tuple[Blocks, Floats]:
    """Forward of all blocks.

    Returns
    -------
    Blocks, and O [.., X, C, V].
    """
    heads = problem.v.shape[2]
    Q, K, V, beta = (layout.blocks(y, heads) for y in (x.q, x.k, x.v, x.beta))
    Gamma = eGamma = eTail = decay = None
    if x.g is not None:
        Gamma = op.cumsum(layout.blocks(x.g, heads))
        eGamma, eTail = op.exp(Gamma), op.exp(Gamma[..., -1:, :] - Gamma)
        decay = np.swapaxes(eGamma[..., -1:, :], -1, -2)
    products = GatedProducts(op, Q, K, Gamma)
    Aqk, L = products.forward()
    A = op.site("A", inverse(beta * L, op))
    Aqk = op.site("Aqk", Aqk)
    betaV = op.site("betaV", beta * V)
    betaK = op.site("betaK", beta * times(K, eGamma))
    U, W = op.site("U", op.dot(A, betaV)), op.site("W", op.dot(A, betaK))
    Kg, Qg = op.site("Kg", times(K, eTail)), op.site("Qg", times(Q, eGamma))

    N, dk, dv = len(problem.spans), K.shape[-1], V.shape[-1]
    h0 = np.zeros((N, heads, dk, dv)) if problem.h0 is None else problem.h0
    state = op.state(h0[layout.order].reshape(-1, dk, dv))
    S, Vnew = op.empty(V.shape[0], dk, dv), op.empty(*V.shape)
    for at, running in slices(layout, heads):
        copy = op.site("S", state[..., :running, :, :])
        S[..., at, :, :] = copy
        Vnew[..., at, :, :] = op.site("Vnew", U[..., at, :, :] - op.dot(W[..., at, :, :], copy))
        added = op.dot(np.swapaxes(Kg[..., at, :, :], -1, -2), Vnew[..., at, :, :])
        kept = times(state[..., :running, :, :], None if decay is None else decay[..., at, :, :])
        state[..., :running, :, :] = op.wide(kept + added)
    O = op.dot(Qg, S) + op.dot(Aqk, Vnew)
    return (
        Blocks(
            Q, K, V, beta, Gamma, eGamma, eTail, decay, products, Aqk, L, A, betaV, betaK, U, W, Kg, Qg, Vnew, S, state
        ),
        O,
    )


def slices(layout: Layout, heads: int) -> list[tuple[slice, int]]:
    """(blocks of a chunk, states that take part) for each chunk number."""
    ends = np.cumsum([0, *layout.active]) * heads
    return [(slice(int(a), int(b)), int(b - a)) for a, b in zip(ends, ends[1:], strict=False)]


def inverse(N: Floats, op: Operations) -> Floats:
    """(I + N)^-1 for strictly lower N [.., X, C, C], by the contract's method.

    substitution : row by row inside 16 x 16 blocks, A_i = e_i - sum_{j<i} N_ij A_j, then blocks are merged,
        A_21 = -A_22 N_21 A_11, doubling their size.
    neumann : (I - N)(I + N^2)(I + N^4)..., exact because N^C = 0; loses digits when powers of N grow.
    """
    C = N.shape[-1]
    eye = np.eye(C, dtype=op.real)
    if op.contract.inverse == "neumann":
        A, power, reach = eye - N, N, 2
        while reach < C:
            power = op.dot(power, power)
            A, reach = op.wide(A + op.dot(A, power)), 2 * reach
        return A
    size = 1 << (C - 1).bit_length()
    if size != C:
        pad = [(0, 0)] * (N.ndim - 2) + [(0, size - C)] * 2
        return inverse(np.pad(N, pad), op)[..., :C, :C]
    if C <= 16:
        A = np.zeros_like(op.dot(N[..., :1, :], N))
        A = np.zeros((*A.shape[:-2], C, C), op.real)
        A[...] = eye
        for i in range(1, C):
            A[..., i : i + 1, :i] = -op.dot(N[..., i : i + 1, :i], A[..., :i, :i])
        return A
    h = C // 2
    first, last = inverse(N[..., :h, :h], op), inverse(N[..., h:, h:], op)
    A = np.zeros((*first.shape[:-2], C, C), op.real)
    A[..., :h, :h], A[..., h:, h:] = first, last
    A[..., h:, :h] = -op.dot(last, op.dot(N[..., h:, :h], first))
    return A


def _intermediates(
    layout: Layout, heads: int, blocks: Blocks, back: chunked_backward.Gradients | None
) -> dict[str, Floats]:
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
