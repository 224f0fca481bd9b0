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
    "tf32": (10, -126, 2.0**128 - 2.0**117),
    "float32": (23, -126, 2.0**128 - 2.0**104),
}
"""dtype: (stored mantissa bits, exponent of the smallest normal, largest finite value).

tf32 is what tensor cores read of a float32; nothing is stored in it."""

_GUARD_BITS = 5
"""Mantissa bits beyond the target's that enter the key: values closer than 1/32 ulp share their U."""


def spacing(x: npt.ArrayLike, dtype: str) -> npt.NDArray[np.float64]:
    """Distance between neighbours of `dtype` at |x| (subnormals included).

    Parameters
    ----------
    x : array_like, any shape
    dtype : one of `FORMATS`

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
    dtype : one of `FORMATS`
    """
    if dtype == "float32":
        if x.dtype == np.float32:
            return x
        with np.errstate(over="ignore"):
            return x.astype(np.float32).astype(x.dtype)
    return _round_bits(np.ascontiguousarray(x), dtype).reshape(x.shape)  # NumPy gives a number without axes one


def _round_bits(x: Floats, dtype: str) -> Floats:
    """On the bits: adding half of the fraction bits that go (less the last kept bit, for ties) carries into the rest.

    A cast of float64 to bfloat16 would go through float32 and so round twice; casts to float16 are slow.
    """
    bits, least, largest = FORMATS[dtype]
    word, total, fraction = (np.uint32, 32, 23) if x.dtype == np.float32 else (np.uint64, 64, 52)
    drop = fraction - bits
    pattern: npt.NDArray[Any] = x.view(word)
    last: npt.NDArray[Any] = np.right_shift(pattern, drop, dtype=word)
    last &= word(1)
    last += word((1 << (drop - 1)) - 1)
    last += pattern
    last &= word((1 << total) - (1 << drop))
    y: Floats = last.view(x.dtype)
    size = np.abs(x)
    if x.dtype == np.float64 or dtype == "float16":  # float32, bfloat16 and tf32 have the same exponents
        tiny = size < 2.0**least
        if tiny.any():  # subnormal: fixed spacing, every scaling here is exact
            q = x.dtype.type(2.0 ** (least - bits))
            with np.errstate(over="ignore", invalid="ignore"):  # of elements that are not tiny: not taken
                np.copyto(y, np.copysign(np.rint(x / q) * q, x), where=tiny)
    if not size.max(initial=0.0) < largest:
        with np.errstate(invalid="ignore"):
            np.copyto(y, np.copysign(x.dtype.type(np.inf), x), where=np.abs(y) > largest)
        np.copyto(y, x, where=np.isnan(x))
    return y


def round_stochastic(x: Floats, dtype: str, salt: Salt) -> Floats:
    """Stochastic rounding with one independent run per salt.

    Parameters
    ----------
    x : float32 or float64 array [...] or, with a run axis already, [R, ...]
    dtype : one of `FORMATS`; "float32" needs a float64 array to round.
    salt : uint32 [R, 1, ...] of one more dimension than an array without runs.

    Returns
    -------
    array [R, ...] of x's dtype (float32 to float32 comes back as it is, without runs). Representable values are
    unchanged; overflow becomes inf.
    """
    bits, least, largest = FORMATS[dtype]
    if dtype == "float32":
        if x.dtype == np.float32:
            return x
        drop = 52 - bits
        word = x.view(np.uint64)
        key = (word >> np.uint64(drop - _GUARD_BITS)).astype(np.uint32)
        key &= np.uint32(0xFFFFFFF)
        dither = hashed(key, salt)
        pattern = (dither >> np.uint32(32 - drop)).astype(np.uint64)
        pattern += word
        pattern &= ~np.uint64((1 << drop) - 1)
        y: Floats = pattern.view(np.float64)
    else:
        single = np.ascontiguousarray(x.astype(np.float32, copy=False))
        drop = 23 - bits
        word32 = single.view(np.uint32)
        key = word32 & np.uint32(0x7FFFFF)
        key >>= np.uint32(drop - _GUARD_BITS)
        dither = hashed(key, salt)
        pattern32 = dither >> np.uint32(32 - drop)
        pattern32 += word32
        pattern32 &= ~np.uint32((1 << drop) - 1)
        y = pattern32.view(np.float32)
    size = np.abs(x)
    if dtype not in ("bfloat16", "tf32"):  # with float32's exponents subnormals come right by themselves
        small = size < 2.0**least
        if small.any():
            small = np.broadcast_to(small, y.shape)
            q = 2.0 ** (least - bits)
            u = dither[small] * 2.0**-32
            exact = np.broadcast_to(x, y.shape)[small]
            # on the magnitude, so that x and -x are rounded alike, as the bit patterns above are
            y[small] = np.copysign(np.floor(np.abs(exact) / q + u) * q, exact)
        if not size.max(initial=0.0) < largest / 2:
            np.copyto(y, np.copysign(y.dtype.type(np.inf), y), where=np.abs(y) > largest)
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
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "float32":
            plain = x.astype(np.float32)
            turned: Floats = (x * c).astype(np.float32) / c
        else:
            plain, turned = round_to(x, dtype), round_to(x * c, dtype)
            turned /= c
        finite = np.isfinite(plain.sum() + turned.sum())
    fixed = plain == x
    if not finite:
        fixed = fixed | ~np.isfinite(plain) | ~np.isfinite(turned)
    np.copyto(turned, plain, where=fixed)
    return turned


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
    h ^= (x.view(np.int64) >> np.int64(63)).astype(np.uint32)  # the complement, 65535 - u of both halves: odd in x
    total = h >> np.uint32(16)
    h &= np.uint32(0xFFFF)
    total += h
    noise = total.astype(np.float32)
    noise -= np.float32(65535.0)
    noise *= np.float32(np.sqrt(6.0) / 65536.0)
    return noise
