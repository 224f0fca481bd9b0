"""The chunked forward pass, by the formulas of oracles/EQUATIONS.md.

Arrays of one chunk are head first, [HV,C,...], always padded to C rows with zeros: every product
then has the same shape for every length, so a row's bits do not depend on the tokens behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from verikda.zoo.decay import Gamma, bf16, gamma, triangle
from verikda.zoo.faults import Fault
from verikda.zoo.gates import Array
from verikda.zoo.inverse import inverse

Span = tuple[int, int, int]
"""(batch row, first token, one past the last token) of a sequence."""


@dataclass(frozen=True)
class Settings:
    """What every chunk of one call needs to know.

    Attributes
    ----------
    C : rows of a chunk.
    store : rounds to the dtype of the stored intermediates.
    gated : whether g was given.
    saving : whether the chunks are kept for the backward (no recomputation).
    turn : earlier calls with this fault.
    """

    C: int
    store: Callable[[Array], Array]
    gated: bool
    saving: bool
    fault: Fault
    turn: int = 0


@dataclass(eq=False)
class Chunk:
    """One chunk of one sequence, all value heads; names as in oracles/EQUATIONS.md.

    Shapes: Q (scaled), K, W, Kg, Qg [HV,C,K]; V, U, Vnew [HV,C,V]; beta [HV,C]; Aqk, L, A [HV,C,C];
    S [HV,K,V] is the state before the chunk. `span` is the sequence, `start` the first token.
    """

    span: Span
    start: int
    rows: int
    Q: Array
    K: Array
    V: Array
    beta: Array
    gamma: Gamma
    Aqk: Array
    L: Array
    A: Array
    U: Array
    W: Array
    Kg: Array
    Qg: Array
    Vnew: Array
    S: Array


def prepare(x: dict[str, Array], span: Span, start: int, stop: int, s: Settings) -> Chunk:
    """Everything of a chunk that does not need the state."""
    fault = s.fault
    rows = stop - start
    Q, K, V, beta, g = (_padded(x[name], span[0], start, rows, s) for name in ("q", "k", "v", "beta", "g"))
    c = gamma(g, rows, fault)
    if fault is Fault.CUMSUM_ACROSS_CHUNKS:
        c.G += x["g"][span[0], span[1] : start].sum(axis=0)[:, None]
    if fault is Fault.LATE_2048 and start >= 2048:
        K = _padded(x["k"], span[0], start - 2048, rows, s)

    E = c.pairs(_mask_qk(s))
    KE = E * K[:, None]
    if fault in (Fault.RULE_RESIDUAL_UNDECAYED, Fault.RULE_DECAY_AFTER_UPDATE, Fault.RULE_OUTPUT_BEFORE_UPDATE):
        Aqk, L = _shifted_products(Q, K, c, s)
    else:
        Aqk, L = np.moveaxis(KE @ np.stack([Q, K], axis=-1), -1, 0)
    Aqk = s.store(Aqk)
    L = L * _mask_l(s)
    N = L * beta[:, None] if fault is Fault.RULE_BETA_ON_COLUMNS else L * beta[..., None]
    A = s.store(inverse(N, fault))

    b = beta[..., None] ** 2 if fault is Fault.RULE_BETA_TWICE else beta[..., None]
    grown = c.grown
    old = np.exp(c.G - c.g) if fault in (Fault.RULE_RESIDUAL_UNDECAYED, Fault.RULE_DECAY_AFTER_UPDATE) else grown
    U = s.store(A @ (b * V))
    W = s.store(A @ (old * K if fault is Fault.RULE_BETA_MISSING_IN_W else b * old * K))
    Kg = s.store(K if fault is Fault.RULE_WRITES_NOT_DECAYED else c.remaining * K)
    Qg = s.store((np.exp(c.G - c.g) if fault is Fault.RULE_OUTPUT_BEFORE_UPDATE else grown) * Q)
    if fault is Fault.RULE_UNGATED_LINEAR and not s.gated:
        U, W = s.store(b * V), np.zeros_like(W)
    if fault is Fault.LATE_BETA_ONE:
        W = W * (beta[..., None] != 1)
    return Chunk(span, start, rows, Q, K, V, beta, c, Aqk, L, A, U, W, Kg, Qg, Vnew=U, S=np.zeros(0, "f4"))


def advance(c: Chunk, S: Array, s: Settings) -> tuple[Array, Array]:
    """Output [HV,C,V] of a chunk and the state [HV,K,V] after it; keeps S and Vnew in the chunk."""
    fault = s.fault
    c.S = S
    copy = s.store(S)
    WS = bf16(c.W @ copy) if fault is Fault.RESIDUAL_BF16 else c.W @ copy
    Vnew = c.U - WS
    if fault is Fault.VALUE_EPSILON:
        Vnew += np.float32(1e-6) * (np.arange(s.C) < c.rows)[:, None]
    if fault is Fault.VALUE_CLAMPED:
        Vnew = np.clip(Vnew, -256, 256)
    c.Vnew = s.store(Vnew)
    out = _from_state(c, copy, s) + _from_chunk(c, s)
    decay = c.gamma.total[..., None]
    if fault is Fault.STATE_LAST_DECAY_MISSING and c.start + c.rows == c.span[2]:
        decay = np.ones_like(decay)
    if fault is Fault.STATE_CARRY_DROPPED:
        decay = np.zeros_like(decay)
    return out, decay * S + _t(c.Kg) @ c.Vnew


def forward(x: dict[str, Array], spans: list[Span], h0: Array, s: Settings) -> tuple[Array, Array, list[list[Chunk]]]:
    """Return o [B,T,HV,V] and ht [N,HV,K,V] in float32, and the chunks of every sequence."""
    o = np.zeros(x["v"].shape, np.float32)
    ht = np.zeros_like(h0)
    chunks: list[list[Chunk]] = []
    for n, span in enumerate(spans):
        slot = _slot(n, spans, s.fault)
        S = first = _first_state(n, slot, spans, h0, ht, s)
        chunks.append([])
        for start, stop in grid(span, s):
            if s.fault is Fault.STATE_WINDOW_RESTARTS and start > span[1] and (start - span[1]) % 512 == 0:
                S = np.zeros_like(S)
            if s.fault is Fault.STATE_IN_BF16 and start > span[1]:
                S = bf16(S)
            if s.fault is Fault.LATE_STATE_BF16 and start - span[1] >= 16 * s.C:
                S = bf16(S)
            c = prepare(x, span, start, stop, s)
            out, S = advance(c, S, s)
            o[span[0], start:stop] = out[:, : c.rows].swapaxes(0, 1)
            if s.fault is Fault.STATE_H0_FIRST_CHUNK_ONLY and start == span[1]:
                S = S - c.gamma.total[..., None] * first
            if s.fault is Fault.SAVED_STATE_AFTER_CHUNK and s.saving:
                c.S = S
            chunks[n].append(c)
        ht[slot] = S
        if span[1] == span[2] and s.fault in (Fault.PACK_EMPTY_RESETS, Fault.PACK_EMPTY_UNWRITTEN):
            ht[n] = 0 if s.fault is Fault.PACK_EMPTY_RESETS else 1e3
    return o, ht, chunks


def grid(span: Span, s: Settings) -> list[tuple[int, int]]:
    """First token and one past the last token of every chunk."""
    _, first, end = span
    starts = list(range(first, end, s.C))
    if s.fault is Fault.CHUNK_STEP_64:
        return [(a, min(a + s.C, end)) for a in range(first, end, 64)]
    if s.fault is Fault.PACK_GRID_NOT_RESTARTED:
        starts = [first, *(a for a in range(0, end, s.C) if a > first)][: end - first]
    chunks = list(zip(starts, [*starts[1:], end], strict=True)) if starts else []
    if s.fault is Fault.TAIL_SKIPPED and len(chunks) > 1 and (end - first) % s.C:
        chunks.pop()
    return chunks


def _mask_qk(s: Settings) -> Array:
    shift = {Fault.MASK_AQK_STRICT: 1, Fault.RULE_OUTPUT_BEFORE_UPDATE: 1, Fault.MASK_AQK_FUTURE: -1}
    return triangle(s.C, shift.get(s.fault, 0))


def _mask_l(s: Settings) -> Array:
    return triangle(s.C, {Fault.MASK_L_INCLUSIVE: 0, Fault.MASK_L_SKIPS_NEIGHBOUR: 2}.get(s.fault, 1))


def _shifted_products(Q: Array, K: Array, c: Gamma, s: Settings) -> tuple[Array, Array]:
    """Aqk and L of rules that read or write one decay too early."""
    early = replace(c, G=c.G - c.g)
    reads = early.G if s.fault is Fault.RULE_OUTPUT_BEFORE_UPDATE else c.G
    residual = c.G if s.fault is Fault.RULE_OUTPUT_BEFORE_UPDATE else early.G
    writes = early.G if s.fault is Fault.RULE_DECAY_AFTER_UPDATE else c.G

    def product(X: Array, G: Array, keep: Array) -> Array:
        x = np.where(keep[..., None], G[:, :, None] - writes[:, None], -np.inf)
        return np.asarray(np.einsum("hid,hjd,hijd->hij", X, K, np.exp(x)), np.float32)

    return product(Q, reads, _mask_qk(s)), product(K, residual, triangle(s.C, 1))


def _from_state(c: Chunk, copy: Array, s: Settings) -> Array:
    """Qg S."""
    fault = s.fault
    if fault is Fault.TAIL_SHORT_SEQUENCE and c.span[2] - c.span[1] < s.C:
        return np.zeros_like(c.V)
    if fault is Fault.LATE_K_NOT_V:
        least = min(copy.shape[1:])
        copy = copy * (np.arange(copy.shape[1])[:, None] < least) * (np.arange(copy.shape[2]) < least)
    if fault is Fault.LATE_WIDE_CHANNELS:
        copy = copy * (np.arange(copy.shape[1])[:, None] < 64)
    out = c.Qg @ copy
    if fault is Fault.TAIL_OF_63_ROW_REMAP and c.rows == 63:
        out[:, 4:12] *= np.float32(1 + 2.2e-3)
    return bf16(out) if fault is Fault.OUTPUT_PART_BF16 else out


def _from_chunk(c: Chunk, s: Settings) -> Array:
    """Aqk Vnew."""
    if s.fault is Fault.ORDER_OF_SUM_VARIES:
        order = np.roll(np.arange(s.C), 1 + s.turn)
        return np.asarray(c.Aqk[..., order] @ c.Vnew[:, order])
    out: Array = c.Aqk @ c.Vnew
    if s.fault is Fault.TAIL_OF_13_LAST_TOKEN and c.rows == 13:
        out[:, 12] = 0
    return out


def _slot(n: int, spans: list[Span], fault: Fault) -> int:
    """Where the states of sequence n lie."""
    if fault is Fault.PACK_EMPTY_SHIFTS_SLOTS:
        return sum(a < b for _, a, b in spans[:n])
    return n


def _first_state(n: int, slot: int, spans: list[Span], h0: Array, ht: Array, s: Settings) -> Array:
    """The state before the first token of sequence n."""
    fault = s.fault
    if fault is Fault.STATE_H0_IGNORED or (
        fault is Fault.PACK_AFTER_EMPTY and n and spans[n - 1][1] == spans[n - 1][2]
    ):
        return np.zeros_like(h0[n])
    source = {Fault.STATE_SLOT_ZERO: 0, Fault.PACK_MANY_SEQUENCES: n % 32}.get(fault, slot)
    S: Array = h0[source]
    if fault is Fault.PACK_STATE_LEAKS and n:
        S = S + ht[n - 1]
    return bf16(S) if fault is Fault.H0_BF16 else S


def _padded(a: Array, batch: int, start: int, rows: int, s: Settings) -> Array:
    """Rows start.. of a [B,T,HV,...] as [HV,C,...], zero behind the last one."""
    out = np.zeros((a.shape[2], s.C, *a.shape[3:]), np.float32)
    out[:, :rows] = a[batch, start : start + rows].swapaxes(0, 1)
    if s.fault is Fault.TAIL_ROWS_UNMASKED:
        out[:, rows:] = out[:, rows - 1, None]
    return out


def _t(a: Array) -> Array:
    return a.swapaxes(-1, -2)
