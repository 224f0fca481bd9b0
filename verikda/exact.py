"""Arithmetic that gives the same bits on every platform and NumPy version.

log, exp and cos differ in the last bit between C libraries, and NumPy adds in an order that depends on the
vector unit. So everything that makes inputs uses integers, and of floating point only + - * / sqrt, rint,
frexp and ldexp on float64 arrays, element by element: IEEE 754 fixes each of these to the bit. What is built
from them here is as good as bit-equal, though not correctly rounded.
"""

from __future__ import annotations

import math

import numpy as np

from oracles.problem import Array

LN2 = 0.6931471805599453


def tree_sum(x: Array) -> Array:
    """Sum over the last axis, keeping it, in a fixed order: halves added element by element."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        rest = x.shape[-1] - half
        x = np.concatenate([x[..., :rest] + x[..., half:], x[..., rest:half]], axis=-1)
    return x


def ln(x: Array) -> Array:
    """Natural logarithm of x > 0, relative error under 1e-14: e ln 2 + 2 atanh((m-1)/(m+1)) with m near 1."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < 0.7071067811865476
    mantissa = np.where(low, 2 * mantissa, mantissa)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = np.full_like(s, 1.0 / 17)
    for n in range(15, 0, -2):
        series *= square
        series += 1.0 / n
    y: Array = 2 * s * series + (exponent - low) * LN2
    return y


def exp(x: Array) -> Array:
    """e**x for |x| <= 700, relative error under 1e-13: 2**n times a Taylor polynomial on |r| <= ln(2) / 2."""
    n = np.rint(x / LN2)
    r = x - n * LN2
    series = np.full_like(r, 1.0 / math.factorial(14))
    for i in range(13, -1, -1):
        series *= r
        series += 1.0 / math.factorial(i)
    y: Array = np.ldexp(series, n.astype(np.int32))
    return y


def softplus(x: Array) -> Array:
    """ln(1 + e**x) for |x| <= 700."""
    y: Array = np.maximum(x, 0.0) + ln(1.0 + exp(-np.abs(x)))
    return y


def softplus_inverse(s: Array) -> Array:
    """Solve softplus(x) = s > 0 for x; close, not exact, below 2**-20, where softplus(x) is about e**x."""
    middle = np.clip(s, 2.0**-20, 40.0)
    return np.where(s > 40, s, ln(np.where(s < 2.0**-20, s, exp(middle) - 1.0)))


def logit(p: Array) -> Array:
    """ln(p / (1 - p)) for p in (0, 1); -1000 at 0 and below, 1000 at 1 and above.

    A sigmoid at -1000 or 1000 is exactly 0 or 1 in every dtype.
    """
    inner = np.clip(p, 2.0**-60, 1.0 - 2.0**-50)
    return np.where(p <= 0, -1000.0, np.where(p >= 1, 1000.0, ln(inner / (1.0 - inner))))
