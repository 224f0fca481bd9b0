"""Random numbers that are equal bit for bit on every platform and NumPy version.

The number at an index is a pure function of (seed, name, index): SplitMix64 (Steele, Lea and
Flood 2014), used as a counter-based generator. NumPy's own generators promise a stable bit stream
but not stable distributions, and log, exp and cos differ in the last bit between C libraries. So
everything that makes inputs uses integers, and of floating point only + - * / sqrt, rint, frexp and
ldexp on float64, each of which IEEE 754 fixes to the bit. Sums run in a fixed order (`tree_sum`),
because NumPy's own order depends on the vector unit.

An index is built from the coordinates (row, head, channel), not from the flat position: a smaller
shape is a corner of the larger one with the same numbers, so a case keeps its values while it shrinks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from oracles.problem import Array

Bits = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_AXIS_BITS = 12
LN2 = 0.6931471805599453


def mix(z: int) -> int:
    """Output function of SplitMix64 on one 64-bit integer."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def stream_key(seed: int, name: str) -> int:
    """Start of the stream called `name`: another name or seed starts somewhere unrelated."""
    key = mix((seed + GOLDEN) & _MASK)
    for byte in name.encode():
        key = mix((key ^ byte) + GOLDEN & _MASK)
    return key


def sequence(key: int, index: Bits) -> Bits:
    """Element index+1 of the SplitMix64 sequence seeded with `key`, for every index."""
    z = (index + np.uint64(1)) * np.uint64(GOLDEN) + np.uint64(key)  # modulo 2**64, as it should be
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def bits(seed: int, name: str, shape: tuple[int, ...]) -> Bits:
    """64 random bits for every coordinate of `shape`.

    Raises
    ------
    ValueError
        If an axis after the first is longer than 4096: its index has 12 bits.
    """
    index = np.zeros((1,) * len(shape), dtype=np.uint64)
    for axis, size in enumerate(shape):
        if axis and size > 2**_AXIS_BITS:
            raise ValueError(
                f"axis {axis} of shape {shape} has {size} elements; at most {2**_AXIS_BITS} can be indexed"
            )
        steps = np.arange(size, dtype=np.uint64) << np.uint64(_AXIS_BITS * (len(shape) - 1 - axis))
        index = index + steps.reshape((-1,) + (1,) * (len(shape) - 1 - axis))
    return sequence(stream_key(seed, name), index)


def uniform(seed: int, name: str, shape: tuple[int, ...]) -> Array:
    """Uniform on the open interval (0, 1): odd multiples of 2**-53."""
    return ((bits(seed, name, shape) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def normal(seed: int, name: str, shape: tuple[int, ...]) -> Array:
    """Mean 0, variance 1, bell-shaped, |x| < 3.47: the sum of four 16-bit uniforms (Irwin-Hall), kurtosis 2.7.

    Extreme values are the business of regimes, not of a tail.
    """
    z = bits(seed, name, shape)
    pair = (z & np.uint64(0x0000FFFF0000FFFF)) + ((z >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF))
    total = (pair >> np.uint64(32)) + (pair & np.uint64(0xFFFFFFFF))
    deviation = np.sqrt(np.float64(3.0) / np.float64(2.0**32 - 1))  # of four uniforms on 0..65535: (2**32 - 1) / 3
    x: Array = (total.astype(np.float64) - 2.0 * 65535) * deviation
    return x


def integers(seed: int, name: str, shape: tuple[int, ...], low: int, high: int) -> npt.NDArray[np.int64]:
    """Integers in [low, high], both included, high - low < 2**31."""
    span = np.uint64(high - low + 1)
    return (((bits(seed, name, shape) >> np.uint64(32)) * span) >> np.uint64(32)).astype(np.int64) + low


def tree_sum(x: Array) -> Array:
    """Sum over the last axis, keeping it, in a fixed order: halves added element by element."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        rest = x.shape[-1] - half
        x = np.concatenate([x[..., :rest] + x[..., half:], x[..., rest:half]], axis=-1)
    return x


def ln(x: Array) -> Array:
    """Natural logarithm of x > 0 by 2 atanh((m-1)/(m+1)) + e ln 2, relative error under 1e-14 away from 1."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < 0.7071067811865476
    mantissa = np.where(low, 2 * mantissa, mantissa)
    exponent = exponent - low
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = np.zeros_like(s)
    for n in range(17, 0, -2):
        series = series * square + 1.0 / n
    return 2 * s * series + exponent * LN2


def exp(x: Array) -> Array:
    """e**x for |x| <= 700, relative error under 1e-13: 2**n times a Taylor polynomial on |r| <= ln(2)/2."""
    n = np.rint(x / LN2)
    r = x - n * LN2
    series = np.ones_like(r)
    for i in range(14, 0, -1):
        series = 1.0 + series * r / i
    y: Array = np.ldexp(series, n.astype(np.int32))
    return y
