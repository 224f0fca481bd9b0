"""Rounding: against NumPy's and ml_dtypes' own casts, and the statistics of stochastic rounding."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from oracles.rounding import FORMATS, hashed_noise, round_rotated, round_stochastic, round_to, spacing

CAST = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """A float32 array rounded and back by somebody else; no library casts to tf32: written with integers."""
    if dtype in CAST:
        return x.astype(CAST[dtype]).astype(np.float32)
    wide = x.view(np.uint32).astype(np.uint64)
    up = (wide & 0x1FFF) + (wide >> 13 & 1) > 0x1000
    y = ((wide >> 13) + up << 13).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(x), y, x)


def salts(runs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, (runs, 1), np.uint32)


def numbers(dtype: str) -> np.ndarray:
    """Normals, subnormals, both borders of overflow, zeros."""
    rng = np.random.default_rng(7)
    bits, least, largest = FORMATS[dtype]
    exponents = rng.integers(least - bits - 2, 15, 4000)
    x = rng.uniform(1, 2, 4000) * 2.0**exponents * rng.choice([-1, 1], 4000)
    edge = np.array(
        [0.0, -0.0, largest, -largest, largest * (1 + 2.0 ** -(bits + 3)), 2.0**least, 2.0 ** (least - bits)]
    )
    return np.concatenate([x, edge])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", FORMATS)
def test_every_16_bit_pattern_and_its_neighbourhood(dtype: str) -> None:
    """round_to agrees with the reference cast on float32 inputs, ties and NaN included."""
    if dtype == "float32":
        x = np.float64([1 + 2.0**-24, 1 + 3 * 2.0**-24, 2.0**-149 * 0.5, 2.0**-149 * 0.75, 3.5e38])
        expected = np.float64([1, 1 + 2.0**-22, 0, 2.0**-149, np.inf])
        np.testing.assert_array_equal(round_to(x, dtype), expected)
        return
    top = np.arange(1 << 16, dtype=np.uint32)
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0x1000, 0x0FFF, 0x1001, 0x3000):
        x = ((top << np.uint32(16)) | np.uint32(low)).view(np.float32)
        with np.errstate(all="ignore"):
            expected = cast(x, dtype)
        np.testing.assert_array_equal(round_to(x, dtype), expected)


@pytest.mark.parametrize("dtype", FORMATS)
def test_float64_is_rounded_once(dtype: str) -> None:
    """A value just above a tie must go up; through float32 it would become the tie and go to even."""
    bits = FORMATS[dtype][0]
    ulp = 2.0**-bits
    x = np.array([1 + ulp / 2 + 2.0**-45])
    assert round_to(x, dtype)[0] == 1 + ulp


@pytest.mark.parametrize("dtype", FORMATS)
def test_spacing_is_the_distance_of_neighbours(dtype: str) -> None:
    x = np.abs(round_to(numbers(dtype), dtype))
    x = x[x < FORMATS[dtype][2]]
    if dtype in CAST:
        up = np.nextafter(x.astype(CAST[dtype]), CAST[dtype](np.inf)).astype(np.float64)
    else:
        up = (x.astype(np.float32).view(np.uint32) + np.uint32(1 << 13)).view(np.float32).astype(np.float64)
    np.testing.assert_array_equal(spacing(x, dtype), up - x)


@pytest.mark.parametrize("dtype", FORMATS)
def test_stochastic_gives_one_of_the_two_neighbours(dtype: str) -> None:
    x = numbers(dtype)
    y = round_stochastic(x, dtype, salts(64))
    q = spacing(x, dtype)
    down, up = np.floor(x / q) * q, np.ceil(x / q) * q
    largest = FORMATS[dtype][2]
    up, down = np.where(up > largest, np.inf, up), np.where(down < -largest, -np.inf, down)
    # 16-bit sites take float32: a float64 input is first rounded there, so only float32 numbers have exact neighbours
    single = x.astype(np.float32) == x if dtype != "float32" else np.ones(x.shape, bool)
    inside = (y == down) | (y == up) | ~single
    assert inside.all(), (x[~inside.all(0)], y[:, ~inside.all(0)])


@pytest.mark.parametrize("dtype", FORMATS)
def test_representable_values_stay(dtype: str) -> None:
    with np.errstate(over="ignore"):
        x = cast(numbers(dtype).astype(np.float32), dtype).astype(np.float64)
    for real in (np.float64, np.float32):
        y = round_stochastic(x.astype(real), dtype, salts(16))
        np.testing.assert_array_equal(y, np.broadcast_to(x, y.shape))
    special = np.array([np.inf, -np.inf, np.nan, 0.0])
    np.testing.assert_array_equal(round_stochastic(special, dtype, salts(3)), np.tile(special, (3, 1)))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("exponent", [0, "subnormal"])
def test_mean_and_variance(dtype: str, exponent: int | str) -> None:
    """Unbiased with variance f (1-f) q^2: for uniform f a mean of q^2/6, twice that of rounding to nearest."""
    least = FORMATS[dtype][1]
    scale = 1.0 if exponent == 0 else 2.0 ** (least - 3)
    rng = np.random.default_rng(3)
    x = (scale * rng.uniform(1, 2, 20000)).astype(np.float32 if dtype != "float32" else np.float64)
    q = spacing(x, dtype)
    error = (round_stochastic(x, dtype, salts(40, seed=5)).astype(np.float64) - x) / q
    # 40 x 20000 errors, but values closer than 1/32 ulp share their draws: a few thousand independent classes
    assert abs(error.mean()) < 0.01
    assert abs((error**2).mean() - 1 / 6) < 0.01
    nearest = (round_to(x, dtype).astype(np.float64) - x) / q
    assert abs((nearest**2).mean() - 1 / 12) < 0.005
    # never closer than rounding to nearest
    assert (np.abs(error) >= np.abs(nearest) - 1e-9).all()


def test_equal_values_share_their_rounding_and_others_do_not() -> None:
    x = np.float32(1 + 0.37 * 2.0**-7)
    many = np.concatenate(
        [np.full(50, x), np.full(50, -4 * x), np.float32(1) + np.float32(2.0**-7) * np.arange(0.5, 50)]
    )
    error = round_stochastic(many, "bfloat16", salts(200)) - many
    assert (error[:, :50] == error[:, :1]).all()
    # sign and power of two do not matter, as in rounding to nearest
    np.testing.assert_array_equal(error[:, 50], -4 * error[:, 0])
    distinct = np.sign(error[:, 100:])
    correlation = np.corrcoef(distinct.T) - np.eye(distinct.shape[1])
    assert np.abs(correlation).max() < 0.4  # 5.6 deviations of 1/sqrt(200)
    assert abs(np.sign(error[:, 0]).mean() - (2 * 0.37 - 1)) < 0.25


@pytest.mark.parametrize("dtype", FORMATS)
def test_stochastic_rounding_is_odd(dtype: str) -> None:
    """As rounding to nearest is: the errors of x and -x cancel in a sum, and must do so in the floor."""
    x = numbers(dtype)
    np.testing.assert_array_equal(round_stochastic(-x, dtype, salts(8)), -round_stochastic(x, dtype, salts(8)))


def test_runs_and_sites_are_independent() -> None:
    x = np.random.default_rng(0).uniform(1, 2, 4096).astype(np.float32)
    error = round_stochastic(x, "bfloat16", salts(6, seed=9)) - x
    correlation = np.corrcoef(error) - np.eye(6)
    # f is common to all runs, the choice is not: E[e_a e_b] = 0
    assert np.abs(correlation).max() < 0.1


def test_float16_overflow_is_kept() -> None:
    y = round_stochastic(np.array([65504.0, 65519.0, 65537.0, -7e4], np.float32), "float16", salts(200))
    assert (y[:, 0] == 65504).all()
    assert set(np.unique(y[:, 1])) == {65504.0, np.inf}
    assert (y[:, 2] == np.inf).all()
    assert (y[:, 3] == -np.inf).all()


def test_hashed_noise_is_standard_and_odd() -> None:
    x = np.random.default_rng(1).standard_normal(20000)
    z = hashed_noise(x, salts(5))
    assert np.abs(z.mean(1)).max() < 0.03
    assert np.abs(z.var(1) - 1).max() < 0.03
    np.testing.assert_array_equal(hashed_noise(-x, salts(5)), -z)
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 0.04 for a, b in pairwise(z))


@pytest.mark.parametrize("dtype", FORMATS)
def test_rotated_rounding_is_another_rounding_to_nearest(dtype: str) -> None:
    """Variance q^2/12 on average, unbiased, odd, idempotent where it stores, exact where the value is representable."""
    rng = np.random.default_rng(3)
    factor = np.exp2(rng.uniform(-0.5, 0.5, (40, 1)))
    x = rng.choice([-1, 1], 4000) * 2.0 ** rng.uniform(-3, 3, 4000)
    y = round_rotated(x, dtype, factor)
    error = (y - x) / np.abs(x) * 2.0 ** FORMATS[dtype][0]
    # relative spacings are 1/m for mantissas m in [1, 2), spread evenly in log m: E[1/m^2] = 3 / (8 log 2)
    assert abs((error**2).mean() * 12 - 3 / (8 * np.log(2))) < 0.02
    assert abs(error.mean()) < 0.01
    # factors closer than a spacing make alike errors; hardly any pair is that close
    assert np.median(np.abs(np.corrcoef(error) - np.eye(40))) < 0.05
    np.testing.assert_array_equal(round_rotated(-x, dtype, factor), -y)
    np.testing.assert_allclose(round_rotated(y, dtype, factor), y, rtol=1e-15)
    exact = round_to(x, dtype)
    np.testing.assert_array_equal(round_rotated(exact, dtype, factor), np.broadcast_to(exact, y.shape))
    edge = np.array([65504.0, 65519.0, 65521.0, -7e4])
    if dtype == "float16":
        np.testing.assert_array_equal(
            np.isinf(round_rotated(edge, dtype, factor)), np.broadcast_to([False, False, True, True], (40, 4))
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_shape_is_kept(dtype: str) -> None:
    for shape in ((), (1,), (0,), (2, 3)):
        assert round_to(np.full(shape, 1 / 3), dtype).shape == shape
