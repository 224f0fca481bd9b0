"""Tokens in chunks: every sequence padded to whole chunks, all of them on one axis.

A *block* is one chunk of one sequence and value head. Blocks are numbered by chunk, then by
sequence, then by head, with sequences sorted from long to short: the blocks of chunk c are one
slice, and its sequences are the first ones, so that the state recurrence loops over c alone.
Rows of padding hold zeros: k = beta = g = 0 leaves the state as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from oracles.problem import Problem
from oracles.rounding import Floats

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Where tokens lie.

    Attributes
    ----------
    chunk : rows per block.
    order : [N] sequences from long to short.
    tokens : [n] rows of the arrays flattened to [B*T, ...] that belong to a sequence, in order of sequence.
    slot : [chunks, C] position in `tokens` of each row of each chunk, n for padding.
    active : sequences that have a chunk c, per c.
    chunk_of, rank_of : [chunks] chunk number and position in `order` of each chunk.
    """

    chunk: int
    order: Index
    tokens: Index
    slot: Index
    active: list[int]
    chunk_of: Index
    rank_of: Index

    def used(self, heads: int) -> Index:
        """[X], rows of each block that are tokens."""
        used: Index = np.repeat((self.slot < len(self.tokens)).sum(1), heads)
        return used

    def slices(self, heads: int) -> list[tuple[slice, int]]:
        """(blocks of a chunk, states that take part) for each chunk number."""
        ends = [0, *accumulate(n * heads for n in self.active)]
        return [(slice(a, b), b - a) for a, b in pairwise(ends)]

    def blocks(self, x: Floats, heads: int) -> Floats:
        """Gather [.., n, h, D] into blocks [.., X, C, D]; heads repeated up to `heads`."""
        padded = np.concatenate([x, np.zeros_like(x[..., :1, :, :])], axis=-3)
        y = np.swapaxes(padded[..., self.slot, :, :], -2, -3)  # [.., chunks, h, C, D]
        if y.shape[-3] != heads:
            y = np.repeat(y, heads // y.shape[-3], axis=-3)
        return np.ascontiguousarray(y).reshape(*y.shape[:-4], -1, *y.shape[-2:])

    def rows(self, x: Floats, heads: int) -> Floats:
        """Scatter blocks [.., X, C, D] back to [.., n, heads, D]."""
        y = x.reshape(*x.shape[:-3], -1, heads, *x.shape[-2:])
        out = np.empty((*x.shape[:-3], len(self.tokens) + 1, heads, x.shape[-1]), x.dtype)
        out[..., self.slot, :, :] = np.swapaxes(y, -3, -2)
        return out[..., :-1, :, :]


def make_layout(problem: Problem, chunk: int) -> Layout:
    """Lay a problem's tokens out in chunks of `chunk` rows."""
    spans = np.array(problem.spans, np.int64).reshape(-1, 3)
    T = problem.q.shape[1]
    lengths = spans[:, 2] - spans[:, 1]
    order = np.argsort(-lengths, kind="stable")
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(lengths) else lengths
    n = int(lengths.sum())
    tokens = (
        np.concatenate([np.arange(b * T + s, b * T + e) for b, s, e in problem.spans]) if n else np.zeros(0, np.int64)
    )
    chunks = -(-lengths[order] // chunk)
    active = [int((chunks > c).sum()) for c in range(int(chunks.max(initial=0)))]
    chunk_of = np.repeat(np.arange(len(active)), active)
    rank_of = np.concatenate([np.arange(a) for a in active]) if active else np.zeros(0, np.int64)
    row = chunk_of[:, None] * chunk + np.arange(chunk)
    sequence = order[rank_of]
    slot = np.where(row < lengths[sequence][:, None], first[sequence][:, None] + row, n)
    return Layout(chunk, order, tokens, slot, active, chunk_of, rank_of)


def flat_tokens(x: Floats, layout: Layout) -> Floats:
    """[B,T,h,D] or [B,T,h] -> [n,h,D], rows that belong to a sequence."""
    y = x.reshape(-1, x.shape[2], x.shape[3] if x.ndim == 4 else 1)
    return y[layout.tokens]


def public_tokens(x: Floats, layout: Layout, B: int, T: int, *, scalar: bool = False) -> Floats:
    """[.., n,h,D] -> [.., B,T,h,D] (or [.., B,T,h] if scalar), 0 where no sequence has a row."""
    out = np.zeros((*x.shape[:-3], B * T, *x.shape[-2:]), x.dtype)
    out[..., layout.tokens, :, :] = x
    out = out.reshape(*x.shape[:-3], B, T, *x.shape[-2:])
    return out[..., 0] if scalar else out
