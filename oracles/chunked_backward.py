"""Backward of the chunked algorithm under a rounding contract.

With dS the gradient of the state after the chunk:

    dU = Aqk^T dO + Kg dS            dAqk = (dO Vnew^T) * M          dQg = dO S^T      dKg = Vnew dS^T      dW = -dU S^T
    dS_prev = diag(exp gC) dS + Qg^T dO - W^T dU
    dA = (dU (diag(beta) V)^T + dW (diag(beta) exp Gamma * K)^T) * M1
    dV = diag(beta) A^T dU           P = A^T dW         X = -((A^T dA * M1) A^T) * M1           dL = diag(beta) X
    dbeta = rowsum(A^T dU * V) + rowsum(P * exp Gamma * K) + rowsum(X * L)
    dQ = exp Gamma * dQg + dAqk (right K)
    dK = exp(gC - Gamma) * dKg + beta exp Gamma * P + left + right
    dGamma = dQg * Qg - dKg * Kg + P * beta exp Gamma * K + dQ_intra * Q + (left - right) * K
    dGamma[last] += rowsum(S * dS) * exp gC + sum_r (dKg * Kg)_r
    dg = suffix cumsum of dGamma

The (i = i) terms of dQ_intra * Q and right * K cancel exactly and are kept out of dGamma. Products with S and dS
read their stored copies; elementwise terms of dGamma use unrounded exp Gamma * Q and exp(gC - Gamma) * K.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oracles.chunked_forward import Blocks
from oracles.layout import Layout, flat_tokens
from oracles.operations import Operations, times
from oracles.problem import Problem
from oracles.rounding import Floats


@dataclass
class Gradients:
    """Gradients of the recurrence's arguments, per value head.

    Attributes
    ----------
    tokens : blocks [.., X, C, D] of "dq" (of the scaled q), "dk", "dv", "dbeta" (D = 1) and, with a gate, "dg".
    dh0 : [.., N*HV, K, V], sequences in the layout's order.
    intermediates : blocks by their names in the equations.
    """

    tokens: dict[str, Floats]
    dh0: Floats
    intermediates: dict[str, Floats]


def T(x: Floats) -> Floats:
    """Transpose of the last two axes."""
    return np.swapaxes(x, -1, -2)


def backward(problem: Problem, layout: Layout, b: Blocks, op: Operations) -> Gradients:
    """Gradients of <do, o> + <dht, ht> for all blocks."""
    heads = problem.v.shape[2]
    do = np.zeros_like(problem.v) if problem.do is None else problem.do
    dO = layout.blocks(op.array(flat_tokens(do, layout)), heads)
    C = b.K.shape[-2]
    M, M1 = np.tri(C, dtype=op.real), np.tri(C, k=-1, dtype=op.real)

    dAqk = op.site("dAqk", op.dot(dO, T(b.Vnew)) * M)
    dS, dU, dh0 = _states(problem, layout, b, dO, op)
    dQg, dKg = op.dot(dO, T(b.S)), op.dot(b.Vnew, T(dS))
    dW = op.site("dW", -op.dot(dU, T(b.S)))
    # M1: nothing else of dA and A^T dA reaches X, and an overflow elsewhere would be no overflow of the contract
    dA = op.site("dA", (op.dot(dU, T(b.betaV)) + op.dot(dW, T(b.betaK))) * M1)
    AtdA = op.site("AtdA", op.dot(T(b.A), dA) * M1)
    AtdU, P = op.dot(T(b.A), dU), op.dot(T(b.A), dW)
    X = -op.dot(AtdA, T(b.A)) * M1
    dL = op.wide(b.beta * X)

    KE = times(b.K, b.eGamma)
    dbeta = op.total(AtdU * b.V, -1) + op.total(P * KE, -1) + op.total(X * b.L, -1)
    dQ_intra, left, right = b.products.backward(dAqk, dL)
    diagonal = np.diagonal(dAqk, axis1=-2, axis2=-1)[..., None]
    dQ = times(dQg, b.eGamma) + dQ_intra + diagonal * b.K
    dK = times(dKg, b.eTail) + b.beta * times(P, b.eGamma) + left + right + diagonal * b.Q
    tokens = {"dq": op.wide(dQ), "dk": op.wide(dK), "dv": b.beta * AtdU, "dbeta": dbeta}
    if b.eGamma is not None and b.eTail is not None:
        dKgKg = dKg * (b.eTail * b.K)
        dGamma = dQg * (b.eGamma * b.Q) - dKgKg + b.beta * P * KE + dQ_intra * b.Q + (left - right) * b.K
        last = T(op.total(b.S * dS, -1)) * b.eGamma[..., -1:, :] + op.total(dKgKg, -2)
        dGamma = op.wide(dGamma)
        dGamma = dGamma + last * np.eye(C, 1, 1 - C, dtype=op.real)  # into the last row
        tokens["dg"] = op.suffix_cumsum(dGamma)
    inner = {"dAqk": dAqk, "dU": dU, "dW": dW, "dA": dA, "AtdA": AtdA, "dL": dL, "dQg": dQg, "dKg": dKg, "dS": dS}
    return Gradients(tokens, dh0, inner)


def _states(problem: Problem, layout: Layout, b: Blocks, dO: Floats, op: Operations) -> tuple[Floats, Floats, Floats]:
    """Reverse over chunks.

    Returns
    -------
    dS : [.., X, K, V], copies after each chunk that products read.    dU : [.., X, C, V].
    dh0 : [.., N*HV, K, V].
    """
    heads = problem.v.shape[2]
    Kd, Vd = b.K.shape[-1], b.V.shape[-1]
    dht = np.zeros((len(problem.spans), heads, Kd, Vd)) if problem.dht is None else problem.dht
    state = op.state(dht[layout.order].reshape(-1, Kd, Vd))
    dS, dU = op.empty(b.V.shape[0], Kd, Vd), op.empty(*b.V.shape)
    from_output, into_state = op.dot(T(b.Aqk), dO), op.dot(T(b.Qg), dO)
    for at, running in op.steps(reversed(layout.slices(heads))):
        copy = op.site("dS", state[..., :running, :, :])
        dS[..., at, :, :] = copy
        dU[..., at, :, :] = op.site("dU", from_output[..., at, :, :] + op.dot(b.Kg[..., at, :, :], copy))
        kept = times(state[..., :running, :, :], None if b.decay is None else b.decay[..., at, :, :])
        change = into_state[..., at, :, :] - op.dot(T(b.W[..., at, :, :]), dU[..., at, :, :])
        state[..., :running, :, :] = op.wide(kept + change)
    return dS, dU, state
