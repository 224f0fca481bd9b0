"""The arithmetic in which the emulator runs: exact, rounded to nearest, or stochastic.

The algorithm is written once against `Operations`. Its arrays have three axes, or four with a
leading run axis [R, ...] once a stochastic operation has touched them; NumPy's broadcasting
lets both kinds meet, so whatever does not depend on the run is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from oracles.contract import Contract
from oracles.rounding import Floats, Salt, hashed_noise, round_rotated, round_stochastic, round_to, spacing
from oracles.substitution import substitute

Step = TypeVar("Step")

UNIT = 2.0**-24
"""Unit roundoff of float32."""

LARGEST = 2.0**128 - 2.0**104
"""Largest float32."""

LN2 = float(np.log(2.0))

FLUSH = 2.0**-126
"""Smallest normal float32: what is below may be flushed to zero on a GPU."""

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
        """Round to the contract's storage dtype if `name` is one of its sites, else to `wide`."""
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
        return round_to(x, self.contract.storage) if name in self.contract.sites else x

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
        return self.rounded(x, self.contract.storage)


class NoisyOperations(StochasticOperations):
    """Float64 arithmetic with the noise of float32 added where float32 would round.

    Needed where float32 is the contract: real float32 arithmetic commits the same errors in every
    run, so it says nothing about those of another order of summation. What follows is the noise of the
    stochastic runs. The others do their sums in real float32 arithmetic, on operands scaled onto the run's
    own grid: adding one small term again and again to a large sum rounds alike each time, which no independent
    noise would show.

    **Dot product.** A float32 accumulation of products p_1..p_n rounds each partial sum s_k with an
    error of variance about u^2 s_k^2 / 4 (u = 2^-24: one rounding to nearest has variance
    ulp^2/12 = u^2 2^(2e) / 3, which over mantissas is 0.18 u^2 s^2; stochastic rounding doubles it).
    Products of random sign give E s_k^2 = (k/n) sum p^2, so the errors sum to (n/2) sum p^2; products of one
    sign give s_k = (k/n) s, so they sum to (n/3) s^2. Both are added: variance u^2/4 (n/2 sum p^2 + n/3 s^2),
    with n the number of nonzero terms. A single product costs its own rounding.

    **Functions.** Divisions, roots and logarithms are exact to about 2 ulp on a GPU: relative deviation u. Rounding the
    exact result alone would not do: where it happens to lie beside a float32 number that costs nothing.

    **Exponential.** GPUs compute 2^(x log2 e) by an instruction exact to about 2 ulp: relative
    deviation u, plus u/2 |x| from rounding the argument; exp(0) is exact.

    Whatever is kept is flushed below 2^-126. Sums beyond the largest float32 become infinite or NaN.

    **Cumulative sum.** Sequential: each partial sum adds an error of deviation u/2 times itself, which later ones keep.
    """

    real: type[np.floating[Any]] = np.float64

    @property
    def noisy(self) -> bool:
        return True

    def wide(self, x: Floats) -> Floats:
        return self.rounded(x, "float32")

    def noise(self, x: Floats) -> Floats:
        """Mean 0, keyed by x, of variance 1 in stochastic runs and 1/2 in the others."""
        z = hashed_noise(x, np.concatenate(self.salt()))
        z[self.fresh :] *= np.float32(np.sqrt(0.5))
        return z

    def function(self, x: Floats) -> Floats:
        y: Floats = x * (1.0 + UNIT * self.noise(x))
        return y

    def exp(self, x: Floats) -> Floats:
        y = np.exp(x)
        sigma = UNIT * np.sqrt(np.minimum(1.0 + x * x / 4.0, 1e12))
        y = y * (1.0 + np.where(x == 0, 0.0, sigma) * self.noise(x))
        return self._flushed(y)

    def softplus(self, x: Floats) -> Floats:
        # 1 + exp x is rounded to float32, as in the formula log(1 + exp x) that kernels use
        small = np.minimum(x, 30.0)
        return np.where(x > 20.0, x, self.function(np.log(self.wide(1.0 + self.exp(small)))))

    def rounded(self, x: Floats, dtype: str) -> Floats:
        return self._flushed(super().rounded(x, dtype)) if dtype != "float16" else super().rounded(x, dtype)

    def _flushed(self, y: Floats) -> Floats:
        """Y, where stochastic runs take a number too small for float32's normal numbers to 0 or to the smallest one."""
        first = y[: self.fresh]
        tiny = np.abs(first) < FLUSH
        if tiny.any():
            tiny &= first != 0
        if tiny.any():
            dither = np.broadcast_to(self.rng.random((self.fresh, 1, 1, 1)), first.shape)
            first[tiny] = np.copysign(np.floor(np.abs(first[tiny]) / FLUSH + dither[tiny]) * FLUSH, first[tiny])
        return y

    def dot(self, a: Floats, b: Floats) -> Floats:
        s = self.product(a, b)
        a0, b0 = one_run(a), one_run(b)
        squares = np.matmul(a0 * a0, b0 * b0)
        used_a = np.count_nonzero(a0, axis=-1)[..., :, None]
        used_b = np.count_nonzero(b0, axis=-2)[..., None, :]
        return self.accumulated(s, squares, np.minimum(used_a, used_b))

    def product(self, a: Floats, b: Floats, axes: int = 3) -> Floats:
        (a0, a1), (b0, b1) = self._halves(a, axes), self._halves(b, axes)
        return self._joined(np.matmul(a0, b0), self._in_single(np.matmul, a1, b1, axes=axes), axes)

    def _halves(self, x: Floats, axes: int = 3) -> tuple[Floats, Floats]:
        """The stochastic runs, and the others; both are x where x has no run axis."""
        return (x[: self.fresh], x[self.fresh :]) if x.ndim > axes else (x, x)

    def _joined(self, first: Floats, second: Floats, axes: int = 3) -> Floats:
        """The stochastic runs (one stands for all where there is no run axis), then the others."""
        assert self.runs is not None
        y = np.empty((self.runs, *first.shape[-axes:]))
        y[: self.fresh], y[self.fresh :] = first, second
        return y

    def _in_single(self, function: Callable[..., Any], *operands: Floats, axes: int = 3) -> Floats:
        """A multilinear function in real float32 arithmetic, each run's operands scaled onto its own grid.

        What is stored on the rotated grid is a float32 number there, so only inputs are rounded by this.
        """
        factor = self._factor.reshape(-1, *(1,) * axes)
        y: Floats = function(*((x * factor).astype(np.float32) for x in operands)) / factor ** len(operands)
        return y

    def accumulated(
        self, s: Floats, squares: Floats, terms: Floats | float, exponentials: Floats | float = 0.0
    ) -> Floats:
        """As above; s [R, ...] is used up."""
        s0 = one_run(s)
        variance = s0 * s0
        # a partial sum may reach the root of the sum of squares even where products cancel
        beyond = np.maximum(squares, variance)
        if not beyond.max(initial=0.0) <= LARGEST**2:
            squares = np.where(beyond > LARGEST**2, np.inf, squares)
        variance /= 3.0
        variance += 0.5 * squares
        variance *= np.maximum(terms, 1.0) / 4.0
        variance += exponentials
        # Equal sums may be formed in different orders, as a diagonal often is, so stochastic runs set them apart.
        # The sums of the others were rounded in earnest.
        first, second = self._halves(s)
        changing, kept = self.salt()
        deviation = np.sqrt(variance, out=variance)
        deviation *= UNIT
        first += deviation * hashed_noise(first, changing, apart=True)
        if np.ndim(exponentials):
            second += UNIT * np.sqrt(0.5 * exponentials) * hashed_noise(second, kept)
        return self._flushed(s)

    def substituted(self, N: Floats) -> Floats:
        n0, n1 = self._halves(N)
        # an error E_i of the sum A_i = e_i - sum_{j<i} N_ij A_j reaches later rows through A itself: A + A E
        A = substitute(n0)
        first, a0 = one_run(N), one_run(A)
        C = A.shape[-1]
        terms = np.maximum(np.arange(C)[:, None] - np.arange(C), 1.0)
        below = a0 - np.eye(C)
        variance = terms / 4.0 * (0.5 * np.matmul(first * first, a0 * a0) + below * below / 3.0)
        E = UNIT * np.sqrt(variance) * hashed_noise(A - np.eye(C), self.salt()[0], apart=True)
        rounded = substitute(n1.astype(np.float32)).astype(np.float64)
        return self._joined(A + np.matmul(A, E), rounded)

    def total(self, x: Floats, axis: int) -> Floats:
        x0 = one_run(x)
        first, second = self._halves(x)

        def in_turn(y: Floats) -> Floats:
            return np.take(np.cumsum(y, axis=axis), [-1], axis=axis) if y.shape[axis] else y.sum(axis, keepdims=True)

        s = self._joined(first.sum(axis, keepdims=True), self._in_single(in_turn, second))
        return self.accumulated(s, (x0 * x0).sum(axis, keepdims=True), np.count_nonzero(x0, axis=axis, keepdims=True))

    def cumsum(self, x: Floats, *, exponent: bool = False) -> Floats:
        first, second = self._halves(x)
        s = np.cumsum(first, axis=-2)
        # GPUs keep exponents in units of log2, where spacings differ
        size = spacing(s / LN2, "float32") * (LN2 / np.sqrt(6.0)) if exponent else (0.5 * UNIT) * np.abs(s)
        size = np.where(first == 0, 0.0, size)  # adding 0 is exact
        noisy = s + np.cumsum(size * hashed_noise(s, self.salt()[0], apart=True), axis=-2)
        return self._joined(noisy, self._in_single(partial(np.cumsum, axis=-2), second))


def times(x: Floats, factor: Floats | None) -> Floats:
    """Return x * factor, where None stands for 1."""
    return x if factor is None else x * factor


def one_run(x: Floats, axes: int = 3) -> Floats:
    """X without its run axis: the first run stands for all where only the size of an error is wanted."""
    return x[0] if x.ndim > axes else x


@dataclass(frozen=True)
class Exact:
    """The algorithm in float64: to be compared with the recurrence."""

    def under(self, contract: Contract) -> Operations:
        """Operations for one contract."""
        return Operations(contract)


@dataclass(frozen=True)
class Nearest:
    """A healthy implementation of the contract: float32, sites rounded to nearest."""

    def under(self, contract: Contract) -> Operations:
        """Operations for one contract."""
        return NearestOperations(contract)


@dataclass(frozen=True)
class Stochastic:
    """Runs of Monte Carlo arithmetic, from which a noise floor is made.

    Attributes
    ----------
    rng : source of the salts.
    runs : R >= 1. The larger half rounds stochastically, the others to nearest on rotated grids.
    noisy : whether float32 noise is explicit (NoisyOperations). None: only where the contract stores float32;
        under 16-bit storage real float32 arithmetic stands in for it, which is faster.
    """

    rng: np.random.Generator
    runs: int
    noisy: bool | None = None

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """[R], by which squared deviations are multiplied to be alike: 2 where a run rounds to nearest."""
        return np.repeat([1.0, 2.0], [self.runs - self.runs // 2, self.runs // 2])

    def under(self, contract: Contract) -> Operations:
        """Operations for one contract."""
        noisy = contract.storage == "float32" if self.noisy is None else self.noisy
        return (NoisyOperations if noisy else StochasticOperations)(contract, self.rng, self.runs)


Arithmetic = Exact | Nearest | Stochastic
