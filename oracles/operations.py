"""The operations of which the emulator consists: exact, in float32 rounded to nearest, and with stochastic rounding.

The algorithm is written once against `Operations`. Its arrays have three axes, or four with a
leading run axis [R, ...] once a stochastic operation has touched them; NumPy's broadcasting
lets both kinds meet, so whatever does not depend on the run is computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from oracles.contract import Contract
from oracles.rounding import Floats, Salt, round_rotated, round_stochastic, round_to
from oracles.substitution import substitute

Step = TypeVar("Step")

# glibc hands blocks above a threshold back to the system when they are freed, and every array of a few hundred
# kilobytes then costs a page fault per page. The threshold follows the largest block ever freed, up to 32 MiB.
np.empty(30 << 20, np.uint8)


class Operations:
    """Float64 without any rounding. The other two arithmetics change single methods.

    Attributes
    ----------
    real : dtype of the arrays.
    runs : length of the run axis, or None without one.
    """

    real: type[np.floating[Any]] = np.float64
    runs: int | None = None

    def __init__(self, contract: Contract) -> None:
        self.contract = contract

    def array(self, x: npt.ArrayLike) -> Floats:
        """An input as this arithmetic holds it, contiguous: NumPy's order of summation follows the strides."""
        return np.ascontiguousarray(x, self.real)

    def state(self, x: npt.ArrayLike) -> Floats:
        """A writable copy of x, with a run axis where there are runs."""
        y = self.array(x)
        return y.copy() if self.runs is None else np.repeat(y[None], self.runs, axis=0)

    def empty(self, *shape: int) -> Floats:
        """Uninitialised array, with a run axis where there are runs."""
        return np.empty(shape if self.runs is None else (self.runs, *shape), self.real)

    def blank(self, *shape: int) -> Floats:
        """Zeros, with a run axis where there are runs."""
        return np.zeros(shape if self.runs is None else (self.runs, *shape), self.real)

    def site(self, name: str, x: Floats) -> Floats:
        """Round to what the contract says of this site."""
        return x

    def wide(self, x: Floats) -> Floats:
        """One rounding to float32: an elementwise result that is kept."""
        return x

    def either(self, a: Floats, b: Floats) -> Floats:
        """One of two values that an honest implementation may use: a, and in every other stochastic run b."""
        return a

    def function(self, x: Floats) -> Floats:
        """A division, root or logarithm as float32 functions give it: exact to about 2 ulp."""
        return x

    def exp(self, x: Floats) -> Floats:
        """Exponential."""
        y: Floats = np.exp(x)
        return y

    def softplus(self, x: Floats) -> Floats:
        """log(1 + exp x)."""
        y: Floats = np.logaddexp(self.real(0), x)
        return y

    def dot(self, a: Floats, b: Floats) -> Floats:
        """Matrix product over the last two axes."""
        y: Floats = np.matmul(a, b)
        return y

    def product(self, a: Floats, b: Floats, axes: int = 3) -> Floats:
        """Matrix product whose noise is still to be added by `accumulated`; arrays have `axes` axes without runs."""
        y: Floats = np.matmul(a, b)
        return y

    def accumulated(
        self, s: Floats, squares: Floats, terms: Floats | float, exponentials: Floats | float = 0.0
    ) -> Floats:
        """S as the sum of `terms` products whose squares sum to `squares`, `exponentials` of it with an exponential."""
        return s

    def substituted(self, N: Floats) -> Floats:
        """(I + N)^-1 by forward substitution."""
        return substitute(N)

    def total(self, x: Floats, axis: int) -> Floats:
        """Sum over an axis, which is kept with length 1."""
        s: Floats = x.sum(axis, keepdims=True)
        return s

    def cumsum(self, x: Floats, *, exponent: bool = False) -> Floats:
        """Inclusive cumulative sum along the last axis but one; `exponent` if exp will be taken of it."""
        return np.cumsum(x, axis=-2)

    def suffix_cumsum(self, x: Floats) -> Floats:
        """Inclusive cumulative sum from the end along the last axis but one."""
        return self.cumsum(x[..., ::-1, :])[..., ::-1, :]

    def output(self, x: Floats, dtype: str) -> Floats:
        """A result as the caller receives it."""
        return x

    def steps(self, steps: Iterable[Step]) -> Iterator[Step]:
        """The steps of a loop over tokens or chunks that rounds alike at each."""
        return iter(steps)

    @property
    def noisy(self) -> bool:
        """Whether `accumulated` needs the sums of squares."""
        return False


class NearestOperations(Operations):
    """Real float32 arithmetic, each site rounded to nearest."""

    real: type[np.floating[Any]] = np.float32

    def site(self, name: str, x: Floats) -> Floats:
        return round_to(x, self.contract.dtype_of(name))

    def output(self, x: Floats, dtype: str) -> Floats:
        return round_to(x, dtype)


class StochasticOperations(Operations):
    """Real float32 arithmetic, each site rounded in its own way by each run.

    The first half of the runs (the larger one) rounds stochastically, with fresh dither for every step of a loop.
    The others round to nearest, each on a rotated grid of its own: a recurrence that has settled commits the same
    roundings at every step, so they add up as n, and only a rounding that is a fixed function of the value,
    on a grid on which stored values stay, settles too. It has half the variance: see `Stochastic.weights`.

    Outputs are not rounded: their half-ulp is added analytically where values are judged.
    """

    real: type[np.floating[Any]] = np.float32

    def __init__(self, contract: Contract, rng: np.random.Generator, runs: int) -> None:
        super().__init__(contract)
        self.rng = rng
        self.runs = runs
        self.fresh = runs - runs // 2
        self._changing: list[Salt] = []
        self._kept: list[Salt] = []
        self._position = 0
        self._factor = np.exp2(rng.uniform(-0.5, 0.5, (runs - self.fresh, 1, 1, 1)))

    def salt(self) -> tuple[Salt, Salt]:
        """One salt per run, broadcastable against [R, ., ., .]: of the stochastic runs, and of the others."""
        assert self.runs is not None
        if not self._changing:
            self._changing = self._draw(self.fresh)
        if self._position == len(self._kept):
            self._kept += self._draw(self.runs - self.fresh)
        self._position += 1
        return self._changing.pop(), self._kept[self._position - 1]

    def _draw(self, runs: int) -> list[Salt]:
        return list(self.rng.integers(0, 1 << 32, (64, runs, 1, 1, 1), np.uint32))

    def steps(self, steps: Iterable[Step]) -> Iterator[Step]:
        start = self._position
        for step in steps:
            self._position = start
            yield step

    def rounded(self, x: Floats, dtype: str) -> Floats:
        """Each run's rounding of x to dtype."""
        a, b = (x[: self.fresh], x[self.fresh :]) if x.ndim == 4 else (x, x)
        a = round_stochastic(a, dtype, self.salt()[0])
        return np.concatenate([a, round_rotated(b, dtype, self._factor)])

    def either(self, a: Floats, b: Floats) -> Floats:
        a, b = np.broadcast_arrays(a, b)
        if a.ndim == 3:
            return a
        mixed = a.copy()
        mixed[1::2] = b[1::2]
        return mixed

    def site(self, name: str, x: Floats) -> Floats:
        if name not in self.contract.sites:
            return self.wide(x)
        return self.rounded(x, self.contract.dtype_of(name))


def times(x: Floats, factor: Floats | None) -> Floats:
    """Return x * factor, where None stands for 1."""
    return x if factor is None else x * factor


def one_run(x: Floats, axes: int = 3) -> Floats:
    """X without its run axis: the first run stands for all where only the size of an error is wanted."""
    return x[0] if x.ndim > axes else x
