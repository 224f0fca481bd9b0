"""Stochastic operations that make the noise of float32 explicit: for contracts whose storage is float32, and for
every other before a failure is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from oracles.operations import StochasticOperations, one_run
from oracles.rounding import Floats, hashed_noise, spacing
from oracles.substitution import substitute

UNIT = 2.0**-24
"""Unit roundoff of float32."""

LARGEST = 2.0**128 - 2.0**104
"""Largest float32."""

LN2 = float(np.log(2.0))

FLUSH = 2.0**-126
"""Smallest normal float32: what is below may be flushed to zero on a GPU."""


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
