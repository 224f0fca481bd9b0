"""The three number formats of a call: rounding to them, their spacing, their bits; and NumPy's dtypes.

Values live in float64 throughout this package and are rounded to their format once,
directly from float64 (no float32 in between, which would round twice), to nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from oracles import rounding
from oracles.problem import Array


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes
    ----------
    name : as in `Case.dtype`.
    precision : significand bits, the hidden one included.
    emin : exponent of the smallest normal number, 2**emin.
    largest : largest finite number.
    """

    name: str
    precision: int
    emin: int
    largest: float

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of one rounding in the normal range, 2**-precision."""
        return 2.0**-self.precision

    @property
    def smallest(self) -> float:
        """Smallest positive (subnormal) number, also the spacing of all subnormals."""
        return 2.0 ** (self.emin - self.precision + 1)


FORMATS = {
    "float16": Format("float16", 11, -14, 65504.0),
    "bfloat16": Format("bfloat16", 8, -126, 2.0**128 - 2.0**120),
    "float32": Format("float32", 24, -126, 2.0**128 - 2.0**104),
}

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}
"""What NumPy calls each dtype of an argument, offsets included."""


def format_of(dtype: str) -> Format:
    """The format called `dtype`.

    Raises
    ------
    ValueError
        For a name outside `FORMATS`.
    """
    try:
        return FORMATS[dtype]
    except KeyError:
        raise ValueError(f"dtype is {dtype!r}; use one of {', '.join(FORMATS)}") from None


def round_to(x: Array | float, dtype: str) -> Array:
    """Nearest number of `dtype`, ties to even, as float64; too large becomes +-inf as in IEEE 754.

    Parameters
    ----------
    x : float64, any shape. NaN, infinities and the sign of zero are kept.
    dtype : "float16", "bfloat16" or "float32".
    """
    rounded: Array = rounding.round_to(np.asarray(x, dtype=np.float64), format_of(dtype).name)
    return rounded


def ulp(x: Array | float, dtype: str) -> Array:
    """Spacing of the numbers of `dtype` at |x|: 2**(max(e, emin) - precision + 1) with 2**e <= |x| < 2**(e+1).

    At infinity and NaN it is NaN; beyond the largest number it is the spacing below it.
    """
    f = format_of(dtype)
    x = np.asarray(x, dtype=np.float64)
    exponent = np.frexp(np.minimum(np.abs(x), f.largest))[1] - 1
    exponent = np.where(x == 0, f.emin, np.maximum(exponent, f.emin))
    return np.where(np.isfinite(x), np.ldexp(1.0, exponent - (f.precision - 1)), np.nan)


def is_representable(x: Array | float, dtype: str) -> bool:
    """Whether rounding to `dtype` leaves every element of `x` as it is (NaN counts as kept)."""
    x = np.asarray(x, dtype=np.float64)
    return bool(np.array_equal(round_to(x, dtype), x, equal_nan=True))


def to_hex(value: float, dtype: str) -> str:
    """Bit pattern of `value` in `dtype`, such as 0x3f80 for 1 in bfloat16.

    Raises
    ------
    ValueError
        If `value` is not a number of that format: printing the bits of another number would mislead.
    """
    if not is_representable(value, dtype):
        raise ValueError(f"{value!r} is not a {dtype} number; round it with round_to first")
    kind = NUMPY_DTYPES[dtype]
    word = int(np.array(value, kind).view(f"u{kind.itemsize}"))
    return f"0x{word:0{2 * kind.itemsize}x}"
