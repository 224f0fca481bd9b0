"""Blocks of an output: what is judged together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
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
        return _states(truth.shape[:1], truth.size)
    if name in ("ht", "dh0"):
        return _states(truth.shape[:2], truth.size)
    return _tokens(truth.shape[:3], truth.size, tuple(problem.spans), contract.chunk or 64)


def _states(shape: tuple[int, ...], size: int) -> Blocks:
    each, heads = np.arange(math.prod(shape)), shape[-1]
    keys = np.stack([each // heads, each % heads, np.zeros_like(each)], 1)
    return _partition(keys, each.reshape(shape), size)


@lru_cache(maxsize=4)
def _tokens(shape: tuple[int, ...], size: int, spans: tuple[tuple[int, int, int], ...], chunk: int) -> Blocks:
    """The outputs of one problem share few partitions."""
    B, T, heads = shape
    place = np.full((B, T), -1, np.int64)
    rows: list[tuple[int, int]] = []  # (sequence, piece)
    for n, (b, first, last) in enumerate(spans):
        place[b, first:last] = len(rows) + np.arange(last - first) // chunk
        rows += [(n, i) for i in range(-(-(last - first) // chunk))]
    outside = len(spans)
    if (place < 0).any():
        place[place < 0] = len(rows)
        rows.append((outside, 0))
    m = len(rows)
    sequence, piece = np.array(rows, np.int64).reshape(-1, 2).T
    keys = np.stack([np.tile(sequence, heads), np.repeat(np.arange(heads), m), np.tile(piece, heads)], 1)
    labels = place[:, :, None] + m * np.arange(heads)
    return _partition(keys, labels, size, exact=outside)


def _partition(keys: Labels, labels: Labels, size: int, exact: int | None = None) -> Blocks:
    """Pool blocks given by (sequence, head, piece) of an output of `size` elements until each has SMALLEST.

    Pieces of one head are pooled first, then heads of one sequence, then sequences. The sequence `exact`
    stands for rows outside all sequences and is pooled with nothing else.
    """
    width = size // max(1, labels.size)
    count = np.bincount(labels.ravel(), minlength=len(keys)) * width
    order = np.lexsort((keys[:, 2], keys[:, 1], keys[:, 0]))
    inside = order if exact is None else order[keys[order, 0] != exact]
    groups, sizes = [[i] for i in inside.tolist()], count[inside].tolist()
    for shared in (2, 1, 0):
        if min(sizes, default=SMALLEST) >= SMALLEST:
            break
        groups, sizes = _merge(groups, sizes, [tuple(k) for k in keys[[g[0] for g in groups], :shared].tolist()])
    target = np.full(len(keys), len(groups), np.int64)  # the rest, if any, is one more block
    target[[i for group in groups for i in group]] = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
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
