"""Rounding to a storage dtype: to nearest, and stochastically.

Stochastic rounding replaces x by a neighbour of spacing q, `floor(x/q + U) q` with U in [0, 1)
(Monte Carlo arithmetic; Parker, 1997). Its error is f q or (1-f) q, never smaller than the error
min(f, 1-f) q of rounding to nearest, and its variance averages twice that of rounding to nearest.

U is not drawn per element: it is a hash of the mantissa of x and of a salt that each run and site
draws once. Rounding to nearest commits *equal* errors on equal values (repeated keys, equal gates, a
constant beta), which then add up as n and not as sqrt n. With U keyed by the value a stochastic run
does the same, and different values still get independent errors. Sign and exponent stay out of the
key because the relative error of rounding to nearest does not depend on them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]
"""float32 or float64 array."""

Salt = npt.NDArray[np.uint32]
"""One number per run."""

FORMATS = {
    "float16": (10, -14, 65504.0),
    "bfloat16": (7, -126, 2.0**128 - 2.0**120),
    "float32": (23, -126, 2.0**128 - 2.0**104),
}
"""dtype: (stored mantissa bits, exponent of the smallest normal, largest finite value)."""

_GUARD_BITS = 5
"""Mantissa bits beyond the target's that enter the key: values closer than 1/32 ulp share their U."""


def spacing(x: npt.ArrayLike, dtype: str) -> npt.NDArray[np.float64]:
    """Distance between neighbours of `dtype` at |x| (subnormals included).

    Parameters
    ----------
    x : array_like, any shape
    dtype : "float16" | "bfloat16" | "float32"

    Returns
    -------
    float64 array of x's shape; at 0 the spacing of subnormals.
    """
    bits, least, _ = FORMATS[dtype]
    x = np.asarray(x, np.float64)
    exponent = np.where(x == 0, least, np.frexp(x)[1] - 1)
    q: npt.NDArray[np.float64] = np.ldexp(1.0, np.maximum(exponent, least) - bits)
    return q


def round_to(x: Floats, dtype: str) -> Floats:
    """Round to nearest, ties to even; overflow becomes inf. Keeps the array's own dtype.

    Parameters
    ----------
    x : float32 or float64 array
    dtype : "float16" | "bfloat16" | "float32"
    """
    if dtype == "float32" and x.dtype == np.float32:
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "bfloat16" and x.dtype == np.float32:
            bits = x.view(np.uint32)
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
            return np.where(np.isnan(x), x, rounded.view(np.float32))
        if dtype == "bfloat16":  # a cast through float32 would round twice
            return _bfloat16_of_double(x)
        return x.astype(dtype).astype(x.dtype)


def _bfloat16_of_double(x: npt.NDArray[np.float64]) -> Floats:
    """On the bits: 52 - 7 = 45 fraction bits go; adding half of them (and the last kept bit, for ties) carries."""
    largest = FORMATS["bfloat16"][2]
    bits = np.ascontiguousarray(x).view(np.uint64)
    odd = (bits >> np.uint64(45)) & np.uint64(1)
    bits = (bits + (odd + np.uint64(2**44 - 1))) & np.uint64(2**64 - 2**45)
    y = bits.view(np.float64).reshape(x.shape)
    size = np.abs(x)
    small = size < 2.0**-126  # subnormal: fixed spacing 2**-133, every scaling here is exact
    if small.any():
        y = np.where(small, np.copysign(np.rint(x * 2.0**133) * 2.0**-133, x), y)
    if not (size < largest).all():
        y = np.where(np.abs(y) > largest, np.copysign(np.inf, x), y)
        y = np.where(np.isnan(x), x, y)
    return y


def round_stochastic(x: Floats, dtype: str, salt: Salt) -> Floats:
    """Stochastic rounding with one independent run per salt.

    Parameters
    ----------
    x : float32 or float64 array [...] or, with a run axis already, [R, ...]
    dtype : "float16" | "bfloat16" | "float32"; "float32" needs a float64 array to round.
    salt : uint32 [R, 1, ...] of one more dimension than an array without runs.

    Returns
    -------
    array [R, ...] of x's dtype (float32 to float32 comes back as it is, without runs). Representable values are
    unchanged; overflow becomes inf.
    """
    bits, least, _ = FORMATS[dtype]
    if dtype == "float32":
        if x.dtype == np.float32:
            return x
        drop = 52 - bits
        word = x.view(np.uint64)
        dither = hashed((word >> np.uint64(drop - _GUARD_BITS)).astype(np.uint32) & np.uint32(0xFFFFFFF), salt)
        low = (dither >> np.uint32(32 - drop)).astype(np.uint64)
        y = ((word + low) & ~np.uint64((1 << drop) - 1)).view(np.float64)
    else:
        single = x.astype(np.float32, copy=False)
        drop = 23 - bits
        word32 = np.ascontiguousarray(single).view(np.uint32)
        key = (word32 & np.uint32(0x7FFFFF)) >> np.uint32(drop - _GUARD_BITS)
        dither = hashed(key, salt)
        low32 = dither >> np.uint32(32 - drop)
        y = ((word32 + low32) & ~np.uint32((1 << drop) - 1)).view(np.float32)
    if dtype != "bfloat16":  # bfloat16 has float32's exponents, so its subnormals come right by themselves
        small = np.abs(x) < 2.0**least
        if small.any():
            small = np.broadcast_to(small, y.shape)
            q = 2.0 ** (least - bits)
            u = dither[small] * 2.0**-32
            exact = np.broadcast_to(x, y.shape)[small]
            # on the magnitude, so that x and -x are rounded alike, as the bit patterns above are
            y[small] = np.copysign(np.floor(np.abs(exact) / q + u) * q, exact)
        y = _overflow(y, dtype)
    return y.astype(x.dtype, copy=False)


def round_rotated(x: Floats, dtype: str, factor: npt.NDArray[np.float64]) -> Floats:
    """Round to nearest on the grid of `dtype` divided by a factor between 0.7 and 1.4, one per run.

    Another sample of what rounding to nearest does to data like these: a fixed odd function of the value,
    unbiased, of half the variance of stochastic rounding. Representable values are unchanged.

    Parameters
    ----------
    x, dtype : as for `round_stochastic`.
    factor : [R, 1, ...] of one more dimension than an array without runs.

    Returns
    -------
    array [R, ...] of x's dtype; inf where rounding to nearest overflows.
    """
    if dtype == "float32" and x.dtype == np.float32:
        return x
    c = factor.astype(x.dtype)
    plain = round_to(x, dtype)
    turned = round_to(x * c, dtype) / c
    return np.where((plain == x) | ~np.isfinite(plain) | ~np.isfinite(turned), plain, turned)


def hashed(key: npt.NDArray[np.uint32], salt: Salt) -> npt.NDArray[np.uint32]:
    """32 well mixed bits per (key, salt)."""
    h = key ^ salt
    h *= np.uint32(0x7FEB352D)
    h ^= h >> np.uint32(15)
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    return h


def hashed_noise(x: npt.NDArray[np.float64], salt: Salt, *, apart: bool = False) -> npt.NDArray[np.float32]:
    """Noise of mean 0 and variance 1 keyed by the mantissa of x, odd in x; if `apart`, by its place too.

    Triangular: the sum of two uniforms taken from the halves of the hash.
    The key stops at 2^-32 so that sums equal but for float64 rounding share their noise.
    """
    key = (x.view(np.uint64) >> np.uint64(20)).astype(np.uint32)
    if apart:
        shape = x.shape[-3:]
        key += (np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B9)).reshape(shape)
    h = hashed(key, salt)
    total = h >> np.uint32(16)
    h &= np.uint32(0xFFFF)
    total += h
    noise = total.astype(np.float32)
    noise -= np.float32(65535.0)
    noise *= np.float32(np.sqrt(6.0) / 65536.0)
    return np.where(np.signbit(x), -noise, noise)


def _overflow(y: Floats, dtype: str) -> Floats:
    largest = FORMATS[dtype][2]
    over = np.abs(y) > largest
    return np.where(over, np.copysign(np.inf, y), y) if over.any() else y
