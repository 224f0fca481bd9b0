"""Blocks of an output: what is judged together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from oracles.contract import Contract
from oracles.problem import Array, Problem

SMALLEST = 16
"""Numbers that a block must have: the noise of fewer is too uncertain, so they are pooled."""

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Blocks:
    """A partition of an output's elements.

    Attributes
    ----------
    labels : block of each element, over the leading axes of the output; trailing axes belong to one block.
    count : elements per block.
    """

    labels: Labels
    count: Labels

    def sum(self, x: Array) -> Array:
        """Sum of x over each block."""
        inner = x.sum(tuple(range(self.labels.ndim, x.ndim)))
        total: Array = np.bincount(self.labels.ravel(), inner.ravel(), minlength=len(self.count)).astype(np.float64)
        return total

    def of(self, at: tuple[np.intp, ...]) -> int:
        """Block of the element at an index of the output."""
        return int(self.labels[at[: self.labels.ndim]])

    def worst(self, block: int, error: Array) -> tuple[np.intp, ...]:
        """Index of the largest |error| inside a block."""
        inside = spread(self.labels == block, error.ndim)
        return np.unravel_index(int(np.argmax(np.where(inside, np.abs(error), -1.0))), error.shape)


def spread(x: npt.NDArray[Any], ndim: int) -> npt.NDArray[Any]:
    """X with trailing axes of length 1, so that it broadcasts against an array of `ndim` axes."""
    return x.reshape(*x.shape, *(1,) * (ndim - x.ndim))


def blocks_of(name: str, truth: Array, problem: Problem, contract: Contract) -> Blocks:
    """Partition of one output.

    Token outputs: (sequence, head, chunk of `contract.chunk` or 64 tokens), dq and dk by query head; rows in no
    sequence are one more block. States: (sequence, head). dA_log, ddt_bias: head.
    """
    if name in ("dA_log", "ddt_bias"):
        heads = truth.shape[0]
        keys = np.stack([np.zeros(heads, np.int64), np.arange(heads), np.zeros(heads, np.int64)], 1)
        return _partition(keys, np.arange(heads), truth)
    if name in ("ht", "dh0"):
        N, heads = truth.shape[:2]
        each = np.arange(N * heads)
        keys = np.stack([each // heads, each % heads, np.zeros_like(each)], 1)
        return _partition(keys, each.reshape(N, heads), truth)
    B, T, heads = truth.shape[:3]
    chunk = contract.chunk or 64
    sequence, piece = np.full((B, T), -1, np.int64), np.zeros((B, T), np.int64)
    for n, (b, first, last) in enumerate(problem.spans):
        sequence[b, first:last] = n
        piece[b, first:last] = np.arange(last - first) // chunk
    outside = len(problem.spans)
    sequence = np.where(sequence < 0, outside, sequence)
    tokens = np.stack([sequence, piece], -1)
    token_keys, place = np.unique(tokens.reshape(-1, 2), axis=0, return_inverse=True)
    place = place.reshape(B, T)
    m = len(token_keys)
    head_of = np.repeat(np.arange(heads), m)
    keys = np.stack([np.tile(token_keys[:, 0], heads), head_of, np.tile(token_keys[:, 1], heads)], 1)
    labels = place[:, :, None] + m * np.arange(heads)
    return _partition(keys, labels, truth, exact=outside)


def _partition(keys: Labels, labels: Labels, truth: Array, exact: int | None = None) -> Blocks:
    """Pool blocks given by (sequence, head, piece) until each has SMALLEST elements.

    Pieces of one head are pooled first, then heads of one sequence, then sequences. The sequence `exact`
    stands for rows outside all sequences and is pooled with nothing else.
    """
    width = truth.size // max(1, labels.size)
    count = np.bincount(labels.ravel(), minlength=len(keys)) * width
    order = np.lexsort((keys[:, 2], keys[:, 1], keys[:, 0]))
    groups = [[int(i)] for i in order]
    if exact is not None:
        rest = [int(i) for i in order if keys[i, 0] == exact]
        groups = [g for g in groups if keys[g[0], 0] != exact]
    sizes = [int(count[g[0]]) for g in groups]
    for shared in (2, 1, 0):
        if min(sizes, default=SMALLEST) >= SMALLEST:
            break
        groups, sizes = _merge(groups, sizes, [tuple(keys[g[0], :shared].tolist()) for g in groups])
    if exact is not None and rest:
        groups.append(rest)
    target = np.zeros(len(keys), np.int64)
    for i, group in enumerate(groups):
        target[group] = i
    return Blocks(target[labels], np.bincount(target, count, minlength=len(groups)).astype(np.int64))


def _merge(groups: list[list[int]], sizes: list[int], keys: list[tuple[int, ...]]) -> tuple[list[list[int]], list[int]]:
    """Merge neighbours with equal keys: a small group joins the one before it, or takes in the next."""
    out: list[list[int]] = []
    total: list[int] = []
    last: tuple[int, ...] | None = None
    for group, size, key in zip(groups, sizes, keys, strict=True):
        if out and key == last and (total[-1] < SMALLEST or size < SMALLEST):
            out[-1] = out[-1] + group
            total[-1] += size
        else:
            out.append(group)
            total.append(size)
        last = key
    return out, total
