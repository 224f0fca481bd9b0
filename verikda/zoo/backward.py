"""The chunked backward pass, by the formulas of equations.md, "Chunked backward"."""

from __future__ import annotations

import numpy as np

from verikda.zoo.forward import RESET, Chunk, Settings, Span, pair_decay, triangle
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
        dS = dht[n]
        for c in reversed(chunks[n]):
            rows = slice(c.start, c.start + c.rows)
            dO = np.zeros_like(c.V)
            dO[:, : c.rows] = do[span[0], rows].swapaxes(0, 1)
            parts, dS = chunk_gradients(c, dO, dS, s)
            for name, part in parts.items():
                d[name][span[0], rows] = part[:, : c.rows].swapaxes(0, 1)
        dh0[n] = dS
    return d | {"h0": dh0}


def chunk_gradients(c: Chunk, dO: Array, dS: Array, s: Settings) -> tuple[dict[str, Array], Array]:
    """Gradients of one chunk [HV,C,...] and of the state before it; `dS` is that of the state after it."""
    C = s.C
    M, M1 = triangle(C), triangle(C, 1)
    beta = c.beta[..., None]
    grown = np.where(c.resets > 0, 0, np.exp(c.G))
    remaining = np.where(c.resets != c.resets[:, -1:], 0, np.exp(c.G[:, -1:] - c.G))
    S_copy, dS_copy = s.store(c.S), s.store(dS)

    dU = s.store(_t(c.Aqk) @ dO + c.Kg @ dS_copy)
    dAqk = (dO @ _t(c.Vnew)) * M
    dQg = dO @ _t(S_copy)
    dKg = c.Vnew @ _t(dS_copy)
    dW = s.store(-dU @ _t(S_copy))
    dS_prev = c.decay[..., None] * dS + _t(c.Qg) @ dO - _t(c.W) @ dU

    betaV, betaK = s.store(beta * c.V), s.store(beta * grown * c.K)
    dA = s.store((dU @ _t(betaV) + dW @ _t(betaK)) * M1)
    AtdU = _t(c.A) @ dU
    P = _t(c.A) @ dW
    X = -(s.store(_t(c.A) @ dA) @ _t(c.A)) * M1
    dL = beta * X
    dbeta = (AtdU * c.V).sum(-1) + (P * grown * c.K).sum(-1) + (X * c.L).sum(-1)

    # The diagonal of dAqk adds equal terms to dQ_intra * Q and right * K: only dq and dk take it.
    diagonal = np.diagonal(dAqk, axis1=1, axis2=2)[..., None]
    dAqk1 = dAqk * M1
    E = pair_decay(c, M1)
    rows = np.stack([dAqk1, dL], axis=2) @ (E * c.K[:, None])
    dQ_intra, left = rows[:, :, 0], rows[:, :, 1]
    right = ((dAqk1[..., None] * c.Q[:, :, None] + dL[..., None] * c.K[:, :, None]) * E).sum(axis=1)

    dQ = grown * dQg + dQ_intra
    dK = remaining * dKg + beta * grown * P + left + right
    # The last row of Kg is not decayed (exp(gC - gC)), so it has no part in the gradient of Gamma.
    last = c.rows - 1
    inner = (dKg * remaining * c.K)[:, :last]
    dG = dQg * grown * c.Q + P * beta * grown * c.K + dQ_intra * c.Q + (left - right) * c.K
    dG[:, :last] -= inner
    dG[:, last] += (c.S * dS).sum(-1) * c.decay + inner.sum(axis=1)
    dg = np.where(c.g < RESET, 0, np.cumsum(dG[:, ::-1], axis=1, dtype=np.float32)[:, ::-1])
    return {
        "q": dQ + diagonal * c.K,
        "k": dK + diagonal * c.Q,
        "v": beta * AtdU,
        "g": dg,
        "beta": dbeta,
    }, dS_prev


def _t(a: Array) -> Array:
    return a.swapaxes(-1, -2)
