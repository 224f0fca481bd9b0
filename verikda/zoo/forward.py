"""The chunked forward pass, by the formulas of equations.md, "Chunked forward".

Arrays of one chunk are head first, [HV,C,...], always padded to C rows with zeros: every product
then has the same shape for every length, so a row's bits do not depend on the tokens behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verikda.zoo.faults import Fault
from verikda.zoo.gates import Array

Span = tuple[int, int, int]
"""(batch row, first token, one past the last token) of a sequence."""

RESET = np.float32(-1e30)
"""Gates below this close the channel: exp is 0 and 64 of them still sum to a finite number."""


@dataclass(frozen=True)
class Settings:
    """What every chunk of one call needs to know."""

    C: int
    store: Callable[[Array], Array]
    fault: Fault


@dataclass(eq=False)
class Chunk:
    """One chunk of one sequence, all value heads; names as in equations.md.

    Shapes: Q (scaled), K, G, W, Kg, Qg [HV,C,K]; V, U, Vnew [HV,C,V]; beta [HV,C];
    Aqk, L, A [HV,C,C]; S [HV,K,V] (state before the chunk), decay = exp(gC) [HV,K].
    `resets` counts the closed gates up to each row: decay between rows of different count is 0.
    """

    start: int
    rows: int
    Q: Array
    K: Array
    V: Array
    beta: Array
    g: Array
    G: Array
    resets: npt.NDArray[np.int32]
    Aqk: Array
    L: Array
    A: Array
    U: Array
    W: Array
    Kg: Array
    Qg: Array
    decay: Array
    Vnew: Array
    S: Array


def triangle(C: int, below: int = 0) -> npt.NDArray[np.bool_]:
    """M (below = 0, diagonal included) or M1 (below = 1, strictly lower)."""
    return np.tri(C, k=-below, dtype=np.bool_)


def pair_decay(c: Chunk | tuple[Array, npt.NDArray[np.int32]], keep: npt.NDArray[np.bool_]) -> Array:
    """exp(Gamma_i - Gamma_j) [HV,C,C,K] where `keep` [C,C], else 0; masked before exp, so never above 1."""
    G, resets = (c.G, c.resets) if isinstance(c, Chunk) else c
    x = G[:, :, None] - G[:, None]
    x[:, ~keep] = -np.inf
    if resets.any():
        x[resets[:, :, None] != resets[:, None]] = -np.inf
    return np.asarray(np.exp(x), np.float32)


def inverse(N: Array) -> Array:
    """(I + N)^-1 of strictly lower N [HV,C,C] by forward substitution."""
    C = N.shape[-1]
    A = np.zeros_like(N)
    A[:, 0, 0] = 1
    for i in range(1, C):
        A[:, i] = -(N[:, i, None, :i] @ A[:, :i])[:, 0]
        A[:, i, i] = 1
    return A


def prepare(x: dict[str, Array], span: Span, start: int, s: Settings) -> Chunk:
    """Everything of a chunk that does not need the state."""
    C = s.C
    rows = min(C, span[2] - start)
    Q, K, V, beta, g = (_padded(x[name], span[0], start, rows, C) for name in ("q", "k", "v", "beta", "g"))
    closed = g < RESET
    resets = np.cumsum(closed, axis=1, dtype=np.int32)
    G = np.cumsum(np.where(closed, 0, g), axis=1, dtype=np.float32)

    KE = pair_decay((G, resets), triangle(C)) * K[:, None]
    products = KE @ np.stack([Q, K], axis=-1)
    Aqk = s.store(products[..., 0])
    L = products[..., 1] * triangle(C, 1)
    A = s.store(inverse(beta[..., None] * L))

    grown = np.where(resets > 0, 0, np.exp(G))
    gC = G[:, -1:]
    remaining = np.where(resets != resets[:, -1:], 0, np.exp(gC - G))
    U = s.store(A @ (beta[..., None] * V))
    W = s.store(A @ (beta[..., None] * grown * K))
    Kg = s.store(remaining * K)
    Qg = s.store(grown * Q)
    return Chunk(
        start, rows, Q, K, V, beta, g, G, resets, Aqk, L, A, U, W, Kg, Qg, grown[:, -1], Vnew=U, S=np.zeros(0, "f4")
    )


def advance(c: Chunk, S: Array, s: Settings) -> tuple[Array, Array]:
    """Output [HV,C,V] of a chunk and the state [HV,K,V] after it; keeps S and Vnew in the chunk."""
    c.S = S
    copy = s.store(S)
    c.Vnew = s.store(c.U - c.W @ copy)
    return c.Qg @ copy + c.Aqk @ c.Vnew, c.decay[..., None] * S + _t(c.Kg) @ c.Vnew


def forward(x: dict[str, Array], spans: list[Span], h0: Array, s: Settings) -> tuple[Array, Array, list[list[Chunk]]]:
    """Return o [B,T,HV,V] and ht [N,HV,K,V] in float32, and the chunks of every sequence."""
    o = np.zeros(x["v"].shape, np.float32)
    ht = np.empty_like(h0)
    chunks: list[list[Chunk]] = []
    for n, span in enumerate(spans):
        S = h0[n]
        chunks.append([])
        for start in range(span[1], span[2], s.C):
            c = prepare(x, span, start, s)
            out, S = advance(c, S, s)
            o[span[0], start : start + c.rows] = out[:, : c.rows].swapaxes(0, 1)
            chunks[n].append(c)
        ht[n] = S
    return o, ht, chunks


def _padded(a: Array, batch: int, start: int, rows: int, C: int) -> Array:
    """Rows start.. of a [B,T,HV,...] as [HV,C,...], zero behind the last one."""
    out = np.zeros((a.shape[2], C, *a.shape[3:]), np.float32)
    out[:, :rows] = a[batch, start : start + rows].swapaxes(0, 1)
    return out


def _t(a: Array) -> Array:
    return a.swapaxes(-1, -2)
