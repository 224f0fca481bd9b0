"""Rounding is exact: to nearest, ties to even, once, straight from float64."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verikda.dtypes import FORMATS, NUMPY_DTYPES, is_representable, round_to, to_hex, ulp

NAMES = tuple(FORMATS)


def from_bits(word: int, dtype: str) -> float:
    kind = NUMPY_DTYPES[dtype]
    return float(np.array(word, f"u{kind.itemsize}").view(kind))


def all_numbers(dtype: str) -> np.ndarray:
    """Every finite number of a 16-bit format, ascending, one zero."""
    with np.errstate(invalid="ignore"):
        x = np.arange(2**16, dtype=np.uint16).view(NUMPY_DTYPES[dtype]).astype(np.float64)
    return np.unique(x[np.isfinite(x)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_is_kept(dtype: str) -> None:
    x = all_numbers(dtype)
    assert np.array_equal(round_to(x, dtype), x)
    assert x[-1] == FORMATS[dtype].largest
    assert x[x > 0][0] == FORMATS[dtype].smallest


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_midpoint_goes_to_the_even_neighbour_and_its_neighbours_do_not(dtype: str) -> None:
    """All of them, on both sides: a conversion through float32 rounds the float64 next to a midpoint twice."""
    x = all_numbers(dtype)
    low, high, middle = x[:-1], x[1:], (x[:-1] + x[1:]) / 2
    even = (np.arange(low.size) - np.flatnonzero(x == 0)[0]) % 2 == 0  # bit patterns count up from zero
    assert np.array_equal(round_to(middle, dtype), np.where(even, low, high))
    assert np.array_equal(round_to(np.nextafter(middle, -np.inf), dtype), low)
    assert np.array_equal(round_to(np.nextafter(middle, np.inf), dtype), high)
    through_float32 = np.nextafter(middle, np.inf).astype(np.float32).astype(NUMPY_DTYPES[dtype]).astype(np.float64)
    assert not np.array_equal(through_float32, high)


@pytest.mark.parametrize("dtype", NAMES)
def test_overflow_starts_half_an_ulp_past_the_largest(dtype: str) -> None:
    f = FORMATS[dtype]
    edge = f.largest + float(ulp(f.largest, dtype)) / 2
    assert round_to(edge, dtype) == np.inf  # the tie: the largest is odd
    assert round_to(np.nextafter(edge, 0), dtype) == f.largest
    assert round_to(-edge, dtype) == -np.inf
    assert round_to(1e300, dtype) == np.inf


@pytest.mark.parametrize("dtype", NAMES)
def test_special_values_and_shapes_are_kept(dtype: str) -> None:
    x = np.array([[0.0, -0.0, np.inf], [-np.inf, np.nan, -1e-320]])
    y = round_to(x, dtype)
    assert y.shape == (2, 3)
    assert np.array_equal(y[0], x[0])
    assert np.array_equal(np.signbit(y), np.signbit(x) | np.array([[False] * 3, [False, np.signbit(np.nan), True]]))
    assert y[1, 0] == -np.inf
    assert np.isnan(y[1, 1])
    assert y[1, 2] == 0
    assert round_to(np.ones((3, 0)), dtype).shape == (3, 0)
    assert round_to(1.0, dtype).shape == ()
    assert np.array_equal(round_to(np.ones((4, 6))[:, ::2], dtype), np.ones((4, 3)))


@given(st.floats(allow_nan=False, allow_infinity=False, width=64), st.sampled_from(NAMES))
def test_rounding_is_nearest_in_rational_arithmetic(x: float, dtype: str) -> None:
    f = FORMATS[dtype]
    y = float(round_to(x, dtype))
    if np.isinf(y):
        assert abs(Fraction(x)) >= Fraction(f.largest) + Fraction(float(ulp(f.largest, dtype))) / 2
        return
    assert is_representable(y, dtype)
    error = abs(Fraction(y) - Fraction(x))
    assert error <= Fraction(float(ulp(x, dtype))) / 2
    assert error <= max(Fraction(f.unit_roundoff) * abs(Fraction(x)), Fraction(f.smallest) / 2)


@given(st.integers(0, 2**16 - 2), st.sampled_from(["float16", "bfloat16"]))
def test_ulp_is_the_distance_to_the_next_number(word: int, dtype: str) -> None:
    x = from_bits(word, dtype)
    following = from_bits(word + 1, dtype)
    if np.isfinite(x) and np.isfinite(following):
        assert ulp(x, dtype) == abs(following - x)


def test_ulp_of_float32_is_numpys() -> None:
    x = np.array([0.0, 1.0, 1.5, 2.0, 1e-40, 3e38, -7.25, 2.0**-126])
    assert np.array_equal(ulp(x, "float32"), np.abs(np.spacing(x.astype(np.float32))).astype(np.float64))
    assert np.isnan(ulp(np.array([np.inf, np.nan]), "float32")).all()


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (1.0, "bfloat16", "0x3f80"),
        (-2.0, "float16", "0xc000"),
        (0.1, "float32", None),
        (float(np.float32(0.1)), "float32", "0x3dcccccd"),
        (-0.0, "float16", "0x8000"),
        (np.inf, "bfloat16", "0x7f80"),
        (2.0**-133, "bfloat16", "0x0001"),
    ],
)
def test_hex_of_known_numbers(value: float, dtype: str, text: str | None) -> None:
    if text is None:
        with pytest.raises(ValueError, match=r"^0\.1 is not a float32 number; round it with round_to first$"):
            to_hex(value, dtype)
        return
    assert to_hex(value, dtype) == text
    back = from_bits(int(text, 16), dtype)
    assert back == value
    assert np.signbit(back) == np.signbit(value)


@given(st.integers(0, 2**32 - 1))
def test_hex_round_trip_of_float32(word: int) -> None:
    x = from_bits(word, "float32")
    if not np.isnan(x):
        assert int(to_hex(x, "float32"), 16) == word


def test_a_dtype_that_is_none_is_said() -> None:
    with pytest.raises(ValueError, match=r"^dtype is 'float8'; use one of float16, bfloat16, float32$"):
        round_to(1.0, "float8")


def test_format_facts_match_numpy() -> None:
    for name, f in FORMATS.items():
        info = ml_dtypes.finfo(NUMPY_DTYPES[name])
        assert float(info.max) == f.largest
        assert float(info.smallest_subnormal) == f.smallest
        assert float(info.tiny) == 2.0**f.emin
        assert info.nmant + 1 == f.precision
