"""The chunked backward pass, by the formulas of oracles/EQUATIONS.md."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from verikda.zoo.decay import Gamma, bf16, tf32, triangle
from verikda.zoo.faults import Fault
from verikda.zoo.forward import Chunk, Settings, Span
from verikda.zoo.gates import Array


def backward(
    chunks: list[list[Chunk]], spans: list[Span], do: Array, dht: Array, x: dict[str, Array], s: Settings
) -> dict[str, Array]:
    """Gradients of q (scaled), k, v, g, beta per value head and token, and of h0 [N,HV,K,V].

    `do` is [B,T,HV,V], `dht` [N,HV,K,V]; `x` gives the shapes.
    """
    d = {name: np.zeros(x[name].shape, np.float32) for name in ("q", "k", "v", "g", "beta")}
    dh0 = np.empty_like(dht)
    for n, span in enumerate(spans):
        dS = np.zeros_like(dht[n]) if s.fault is Fault.STATE_DHT_IGNORED else dht[n]
        for number, c in reversed(list(enumerate(chunks[n]))):
            rows = slice(c.start, c.start + c.rows)
            dO = np.zeros_like(c.V)
            dO[:, : c.rows] = do[span[0], rows].swapaxes(0, 1)
            parts, before = chunk_gradients(c, dO, dS, s)
            if s.fault is Fault.DH0_LAST_DECAY_MISSING and number == 0:
                before += (1 - c.gamma.total[..., None]) * dS
            if s.fault is Fault.OUTPUT_TILE_UNWRITTEN and number == 4:
                del parts["v"]
            for name, part in parts.items():
                d[name][span[0], rows] = part[:, : c.rows].swapaxes(0, 1)
            dS = before
        dh0[n] = 0 if s.fault is Fault.PACK_EMPTY_DH0 and span[1] == span[2] else dS
    return d | {"h0": dh0}


def chunk_gradients(c: Chunk, dO: Array, dS: Array, s: Settings) -> tuple[dict[str, Array], Array]:
    """Gradients of one chunk [HV,C,...] and of the state before it; `dS` is that of the state after it."""
    fault = s.fault
    gamma = _head_0(c.gamma) if fault is Fault.HEADS_GATE_OF_HEAD_0 else c.gamma
    M, M1 = triangle(s.C), triangle(s.C, 1)
    beta, grown, remaining = c.beta[..., None], gamma.grown, gamma.remaining
    S_copy, dS_copy = s.store(c.S), s.store(dS)

    dU = _t(c.Aqk) @ dO
    if fault is not Fault.DU_STATE_MISSING:
        dU += c.Kg @ dS_copy
    dU = s.store(dU)
    dAqk = (dO @ _t(c.Vnew)) * (M1 if fault is Fault.DQ_DIAGONAL_MISSING else M)
    dQg = dO @ _t(S_copy)
    dKg = c.Vnew @ _t(dS_copy)
    dW = s.store((dU if fault is Fault.DW_SIGN else -dU) @ _t(S_copy))
    dS_prev = gamma.total[..., None] * dS + _t(c.Qg) @ dO
    if fault is not Fault.DS_W_MISSING:
        dS_prev -= _t(c.W) @ dU

    betaV, betaK = s.store(beta * c.V), s.store(beta * grown * c.K)
    dA = dU @ _t(betaV)
    if fault is not Fault.DA_W_MISSING:
        dA += dW @ _t(betaK)
    dA = s.store(dA * M1)
    AtdU = _t(c.A) @ dU
    P = _t(c.A) @ dW
    A_left, A_right = (c.A, c.A) if fault is Fault.DA_NOT_TRANSPOSED else (_t(c.A), _t(c.A))
    X = -(s.store((A_left @ dA) * M1) @ A_right) * M1
    dL = beta * X
    dbeta = _dbeta(c, AtdU, P * grown, X, s)

    # The diagonal of dAqk adds equal terms to dQ_intra * Q and right * K: only dq and dk take it.
    diagonal = np.diagonal(dAqk, axis1=1, axis2=2)[..., None]
    dAqk1 = dAqk * M1
    E = gamma.pairs(M1, backward=True)
    dQ_intra, left = np.moveaxis(np.stack([dAqk1, dL], axis=2) @ (E * c.K[:, None]), 2, 0)
    right = _right(c, dAqk1, dL, E, s)
    if fault is Fault.DK_LEFT_MISSING:
        left = np.zeros_like(left)

    dQ = grown * dQg + dQ_intra + diagonal * c.K
    dK = beta * grown * P + left + right + diagonal * c.Q
    if fault is not Fault.DK_STATE_MISSING:
        dK += remaining * dKg

    dG = dQg * grown * c.Q + P * beta * grown * c.K + dQ_intra * c.Q + (left - right) * c.K
    if fault is Fault.DG_EARLY_ROUNDING:
        dG += bf16(dQ * c.Q) - bf16(dK * c.K) - (dQ * c.Q - dK * c.K)
    if fault is Fault.DG_DIAGONAL_KEPT:
        dG += tf32(diagonal * c.K) * c.Q - tf32(diagonal * c.Q) * c.K
    # The last row of Kg is not decayed (exp(gC - gC)), so it has no part in the gradient of Gamma.
    last = c.rows - 1
    inner = (dKg * remaining * c.K)[:, :last]
    dG[:, :last] -= inner
    if fault is not Fault.DG_KG_MISSING:
        dG[:, last] += inner.sum(axis=1)
    if fault is not Fault.DG_STATE_MISSING:
        # The stored copies, as in dKg: their roundings cancel in the suffix sum, which those of S and dS would not.
        dG[:, last] += (S_copy * dS_copy).sum(-1) * gamma.total
    dV = beta * (c.A @ dU if fault is Fault.DV_A_NOT_TRANSPOSED else AtdU)
    return {"q": dQ, "k": dK, "v": dV, "g": _dg(dG, gamma, s), "beta": dbeta}, dS_prev


def _dbeta(c: Chunk, AtdU: Array, grown_P: Array, X: Array, s: Settings) -> Array:
    """rowsum(A^T dU * V) + rowsum(P * exp(Gamma) K) + rowsum(X * L), never divided by beta."""
    if s.fault is Fault.DBETA_BY_DIVISION:
        AtdU = c.beta[..., None] * AtdU / c.beta[..., None]
    dbeta: Array = (AtdU * c.V).sum(-1)
    if not (s.fault is Fault.DBETA_UNGATED_INCOMPLETE and not s.gated):
        dbeta += (grown_P * c.K).sum(-1)
    return dbeta if s.fault is Fault.DBETA_XL_MISSING else dbeta + (X * c.L).sum(-1)


def _right(c: Chunk, dAqk1: Array, dL: Array, E: Array, s: Settings) -> Array:
    """right_j = sum_i (dAqk_ij Q_i + dL_ij K_i) exp(Gamma_i - Gamma_j), without the diagonal."""
    if s.fault is Fault.DK_RIGHT_MISSING:
        dL = np.zeros_like(dL)
    terms: Array = (dAqk1[..., None] * c.Q[:, :, None] + dL[..., None] * c.K[:, :, None]) * E
    if s.fault is Fault.DK_CHUNK_64 and s.C == 64:
        terms = terms[:, :48]
    return np.asarray(terms.sum(axis=1))


def _dg(dG: Array, gamma: Gamma, s: Settings) -> Array:
    """Suffix sum of dGamma, summed from the end; 0 where a gate is closed."""
    if s.fault is Fault.DG_NOT_SUMMED:
        return dG
    if s.fault is Fault.CUMSUM_TOTAL_MINUS_PREFIX:
        prefix: Array = np.cumsum(dG, axis=1, dtype=np.float32) - dG
        # A block's total is summed in another order than a scan, so the difference is not 0 where it should be.
        return np.asarray(dG[:, ::-1].sum(axis=1, keepdims=True) - prefix)
    return np.where(gamma.closed, 0, np.cumsum(dG[:, ::-1], axis=1, dtype=np.float32)[:, ::-1])


def _head_0(c: Gamma) -> Gamma:
    """The gates of head 0 for every head."""

    def of_head_0(a: Array) -> Array:
        return np.broadcast_to(a[:1], a.shape)

    return replace(c, g=of_head_0(c.g), G=of_head_0(c.G), closed=of_head_0(c.closed), resets=of_head_0(c.resets))


def _t(a: Array) -> Array:
    return a.swapaxes(-1, -2)
