"""Random numbers that are equal bit for bit on every platform and NumPy version.

The number at an index is a pure function of (seed, name, index): SplitMix64 (Steele, Lea and
Flood 2014), used as a counter-based generator, in 64-bit integers alone. NumPy's own generators promise
a stable stream of bits, but not stable distributions.

An index is built from the coordinates (row, head, channel), not from the flat position: a smaller
shape is a corner of the larger one with the same numbers, so a case keeps its values while it shrinks.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from oracles.problem import Array

Bits = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_AXIS_BITS = 12


def mix(z: int) -> int:
    """Output function of SplitMix64 on one 64-bit integer."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@lru_cache(256)
def stream_key(seed: int, name: str) -> int:
    """Start of the stream called `name`: another name or seed starts somewhere unrelated."""
    key = mix((seed + GOLDEN) & _MASK)
    for byte in name.encode():
        key = mix((key ^ byte) + GOLDEN & _MASK)
    return key


def _steps(index: Bits) -> Bits:
    return (index + np.uint64(1)) * np.uint64(GOLDEN)  # modulo 2**64, as it should be


def _output(z: Bits) -> Bits:
    """`mix` of every element, in place."""
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def _lattice(shape: tuple[int, ...]) -> Bits:
    """Steps of the index built from the coordinates: 12 bits for each axis after the first."""
    index = np.zeros((1,) * len(shape), dtype=np.uint64)
    for axis, size in enumerate(shape):
        if axis and size > 2**_AXIS_BITS:
            raise ValueError(f"axis {axis} of shape {shape} has {size} elements; at most {2**_AXIS_BITS} are allowed")
        inner = len(shape) - 1 - axis
        along = np.arange(size, dtype=np.uint64) << np.uint64(_AXIS_BITS * inner)
        index = index + along.reshape((-1,) + (1,) * inner)
    return _steps(index)


_kept_lattice = lru_cache(64)(_lattice)  # the tensors of a case share few shapes


def bits(seed: int, name: str, shape: tuple[int, ...]) -> Bits:
    """64 random bits for every coordinate of `shape`.

    Raises
    ------
    ValueError
        If an axis after the first is longer than 4096.
    """
    steps = _kept_lattice(shape) if math.prod(shape) <= 1 << 16 else _lattice(shape)
    return _output(steps + np.uint64(stream_key(seed, name)))


def uniform(seed: int, name: str, shape: tuple[int, ...]) -> Array:
    """Uniform on the open interval (0, 1): odd multiples of 2**-53."""
    return ((bits(seed, name, shape) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def normal(seed: int, name: str, shape: tuple[int, ...]) -> Array:
    """Mean 0, variance 1, bell-shaped, |x| < 3.47: the sum of four 16-bit uniforms (Irwin-Hall), kurtosis 2.7.

    Extreme values are the business of regimes, not of a tail.
    """
    z = bits(seed, name, shape)
    low = np.uint64(0x0000FFFF0000FFFF)
    pair = (z & low) + ((z >> np.uint64(16)) & low)
    x = ((pair >> np.uint64(32)) + (pair & np.uint64(0xFFFFFFFF))).astype(np.float64)
    x -= 2.0 * 65535
    x *= np.sqrt(np.float64(3.0) / np.float64(2.0**32 - 1))  # the variance of four uniforms is (2**32 - 1) / 3
    return x


def integers(seed: int, name: str, shape: tuple[int, ...], low: int, high: int) -> npt.NDArray[np.int64]:
    """Integers in [low, high], both included, high - low < 2**31."""
    span = np.uint64(high - low + 1)
    return (((bits(seed, name, shape) >> np.uint64(32)) * span) >> np.uint64(32)).astype(np.int64) + low
