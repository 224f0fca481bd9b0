"""What a regime may read while it draws one tensor: positions in the sequences, and streams of numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oracles.problem import Array
from verikda import counter


@dataclass(frozen=True, eq=False)
class Draw:
    """Rows, heads and channels of one tensor; rows run over batch and tokens.

    All arrays broadcast to (rows, heads, channels). Methods that draw take the name of a part (draws of the same
    part are equal) and the axes along which numbers differ, out of "rhc".

    Attributes
    ----------
    seed, name : of the streams; `name` is the tensor's.
    shape : (rows, heads, channels).
    t, length : [rows,1,1], position of a row in its sequence and the length of that sequence.
    magnitude : for gates, nats per token.
    key : [rows,heads,K], the keys that go with the rows (queries and values only).
    """

    seed: int
    name: str
    shape: tuple[int, int, int]
    t: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    magnitude: float = 1.0
    key: Array | None = None

    def uniform(self, part: str, axes: str = "rhc") -> Array:
        """Uniform on (0, 1)."""
        return counter.uniform(self.seed, f"{self.name}.{part}", self._sizes(axes))

    def normal(self, part: str, axes: str = "rhc") -> Array:
        """Mean 0, variance 1, |x| < 3.47."""
        return counter.normal(self.seed, f"{self.name}.{part}", self._sizes(axes))

    def integers(self, part: str, low: int, high: int, axes: str = "rhc") -> npt.NDArray[np.int64]:
        """Integers in [low, high]."""
        return counter.integers(self.seed, f"{self.name}.{part}", self._sizes(axes), low, high)

    def one_row(self, part: str) -> npt.NDArray[np.bool_]:
        """True at one row of every sequence, [rows,1,1]."""
        where: npt.NDArray[np.bool_] = self.t == np.floor(self.uniform(part, "") * self.length)
        return where

    def some_rows(self, part: str) -> npt.NDArray[np.bool_]:
        """True at one row of every sequence and at a quarter of the others, [rows,1,1]."""
        return self.one_row(part) | (self.uniform(f"{part} else", "r") < 0.25)

    @property
    def last(self) -> npt.NDArray[np.bool_]:
        """True at the last row of every sequence, [rows,1,1]."""
        return np.asarray(self.t == self.length - 1)

    @property
    def channel(self) -> npt.NDArray[np.int64]:
        """Index of each channel, [1,1,channels]."""
        return np.arange(self.shape[2]).reshape(1, 1, -1)

    @property
    def head(self) -> npt.NDArray[np.int64]:
        """Index of each head, [1,heads,1]."""
        return np.arange(self.shape[1]).reshape(1, -1, 1)

    def full(self, x: Array | npt.NDArray[np.bool_] | float) -> Array:
        """`x` as an array of `shape`."""
        return np.broadcast_to(np.asarray(x, dtype=np.float64), self.shape).copy()

    def _sizes(self, axes: str) -> tuple[int, ...]:
        return tuple(size if axis in axes else 1 for axis, size in zip("rhc", self.shape, strict=True))
