"""Cumulative gates of a chunk and the decays made from them."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from verikda.zoo.faults import Fault
from verikda.zoo.gates import Array

Mask = npt.NDArray[np.bool_]

RESET = np.float32(-104)
"""Gates below this close the channel: exp is 0 in float32, and Gamma keeps its digits for the decays that follow."""


def bf16(x: Array) -> Array:
    """Round to bfloat16."""
    y: Array = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    return y


def tf32(x: Array) -> Array:
    """Round to 10 bits behind the point, as TF32 operands are."""
    m, e = np.frexp(x)
    y: Array = np.ldexp(np.round(m * 2048) / 2048, e).astype(np.float32)
    return y


def triangle(C: int, below: int = 0) -> Mask:
    """M (below = 0, diagonal included) or M1 (below = 1, strictly lower)."""
    return np.tri(C, k=-below, dtype=np.bool_)


@dataclass(eq=False)
class Gamma:
    """Cumulative log decay of one chunk, inclusive.

    Attributes
    ----------
    rows : tokens of the chunk; later rows are padding.
    g, G : [HV,C,K], gate and its cumulative sum without closed gates.
    closed : [HV,C,K], whether a gate is below RESET.
    resets : [HV,C,K], closed gates up to each row: rows of different count share nothing.
    """

    rows: int
    g: Array
    G: Array
    closed: Mask
    resets: npt.NDArray[np.int32]
    fault: Fault

    @property
    def grown(self) -> Array:
        """What is left of the state before the chunk, exp Gamma."""
        return np.where(self.resets > 0, 0, np.exp(self.G))

    @property
    def remaining(self) -> Array:
        """What is left of a write at the end of the chunk, exp(gC - Gamma)."""
        G = self.G - self.g if self.fault is Fault.RULE_DECAY_AFTER_UPDATE else self.G
        return np.where(self.resets != self.resets[:, -1:], 0, np.exp(self._end - G))

    @property
    def total(self) -> Array:
        """What is left of the state after the chunk, exp gC [HV,K]."""
        decay: Array = np.where(self.resets[:, -1] > 0, 0, np.exp(self._end[:, 0]))
        return bf16(decay) if self.fault is Fault.DECAY_BF16 else decay

    @property
    def _end(self) -> Array:
        if self.fault is Fault.TAIL_OF_17 and self.rows == 17:
            return self.G[:, 15:16]
        return self.G[:, -1:]

    def pairs(self, keep: Mask, *, backward: bool = False) -> Array:
        """Decays exp(Gamma_i - Gamma_j) [HV,C,C,K] where `keep` [C,C], else 0; masked before exp, so never above 1."""
        after = Fault.MASK_AFTER_EXP_BACKWARD if backward else Fault.MASK_AFTER_EXP
        x = self.G[:, :, None] - self.G[:, None]
        if self.fault is after:
            return np.asarray(np.exp(x) * keep[..., None], np.float32)
        if self.fault is Fault.ZERO_GATE_DROPPED:
            x[(x >= 0) & ~np.eye(len(keep), dtype=np.bool_)[..., None]] = -np.inf
        x[:, ~keep] = -np.inf
        if self.resets.any():
            x[self.resets[:, :, None] != self.resets[:, None]] = -np.inf
        E = np.exp(x)
        return _anchored(E, self, keep) if self.fault in ANCHORS else E


def gamma(g: Array, rows: int, fault: Fault) -> Gamma:
    """Gamma of gates [HV,C,K], of which the first `rows` rows are tokens."""
    closed = g < RESET
    if fault is Fault.HARD_RESET_NAN:
        closed = np.zeros_like(closed)
    resets = np.cumsum(closed, axis=1, dtype=np.int32)
    g = np.where(closed, 0, g)
    G = np.cumsum(g, axis=1, dtype=np.float32)
    if fault is Fault.CUMSUM_EXCLUSIVE:
        G -= g
    if fault is Fault.CUMSUM_PER_16:
        blocks = g.reshape(g.shape[0], -1, 16, g.shape[2])
        G = np.cumsum(blocks, axis=2, dtype=np.float32).reshape(g.shape)
    if fault is Fault.TAIL_GLAST_FROM_PADDING:
        G[:, rows:] = 0
    if fault is Fault.GAMMA_BF16:
        G = bf16(G)
    return Gamma(rows, g, G, closed, resets, fault)


ANCHORS = (
    Fault.ANCHOR_CHUNK_START,
    Fault.ANCHOR_MID,
    Fault.ANCHOR_CLAMPED,
    Fault.ANCHOR_FUTURE,
    Fault.ANCHOR_OF_HEAD_0,
)


def _anchored(E: Array, c: Gamma, keep: Mask) -> Array:
    """The same decays as products through an anchor row a, exp(Gamma_i - Gamma_a) exp(Gamma_a - Gamma_j)."""
    C = len(keep)
    if c.fault is Fault.ANCHOR_FUTURE:
        for first in range(0, c.rows, 16):
            block = slice(first, first + 16)
            a = first + min(8, c.rows - first - 1)
            left, right = np.exp(c.G[:, block] - c.G[:, a, None]), np.exp(c.G[:, a, None] - c.G[:, block])
            E[:, block, block] = np.where(E[:, block, block] > 0, left[:, :, None] * right[:, None], 0)
        return E
    a = C // 2 if c.fault in (Fault.ANCHOR_MID, Fault.ANCHOR_OF_HEAD_0) else 0
    row = c.G[:, a, None]
    other = row[:1] if c.fault is Fault.ANCHOR_OF_HEAD_0 else row
    exponent = other - c.G
    if c.fault is Fault.ANCHOR_CLAMPED:
        exponent = np.minimum(exponent, 60)
    through = np.exp(c.G - row)[:, :, None] * np.exp(exponent)[:, None]
    return np.where(keep[..., None] & (c.resets[:, :, None] == c.resets[:, None]), through, 0)
