"""Generator and arithmetic behind all inputs: published vectors, frozen bits, and distributions.

What is promised is equality to the bit on every platform and NumPy version, so known outputs stand here as
hexadecimal constants. If one of them changes, every stored case changes its meaning: raise `case.SCHEMA`.
"""

from __future__ import annotations

import hashlib

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verikda import counter, exact

FROZEN: dict = {
    "key": 2695751193515710949,
    "uniform": [
        "0x1.f1d06ce808058p-4",
        "0x1.e1da4e47c8c11p-1",
        "0x1.da1835839e0dcp-3",
        "0x1.b3f566165033fp-1",
        "0x1.5ed4bb9b3822ep-2",
        "0x1.2e5b90e97a404p-3",
    ],
    "normal": ["-0x1.cb9a361c77339p+0", "0x1.b8cb1c313bde0p-1", "0x1.28290f5cb8376p+0", "0x1.5da862c038eb8p-4"],
    "integers": [-3, 3, -2, 3, -3, 1, 2, -3],
    "arithmetic": "65d602a880e69a286a25744728ce97a900102da846e04263028328c639f2fb1c",
}


def sequence(key: int, index: counter.Bits) -> counter.Bits:
    """Element index + 1 of the SplitMix64 sequence seeded with `key`, for every index."""
    return counter._output(counter._steps(index) + np.uint64(key))


def test_published_vectors_of_splitmix64() -> None:
    """First outputs for seeds 1234567 and 0, as published with the reference implementation."""
    want = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert sequence(1234567, np.arange(5, dtype=np.uint64)).tolist() == want
    want0 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert sequence(0, np.arange(4, dtype=np.uint64)).tolist() == want0


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_arrays_agree_with_unbounded_integers(key: int, index: int) -> None:
    got = int(sequence(key, np.array([index], dtype=np.uint64))[0])
    assert got == counter.mix((key + (index + 1) * counter.GOLDEN) % 2**64)


def test_frozen_numbers() -> None:
    assert counter.stream_key(0, "q") == FROZEN["key"]
    u = counter.uniform(7, "q", (2, 3))
    assert [x.hex() for x in u.ravel().tolist()] == FROZEN["uniform"]
    x = counter.normal(7, "q", (2, 2))
    assert [v.hex() for v in x.ravel().tolist()] == FROZEN["normal"]
    assert counter.integers(7, "q", (8,), -3, 3).tolist() == FROZEN["integers"]


def test_frozen_arithmetic() -> None:
    x = counter.uniform(1, "x", (4096,))
    values = [exact.ln(x), exact.exp(200 * (x - 0.5)), exact.softplus(40 * (x - 0.5)), exact.logit(x)]
    values += [exact.softplus_inverse(x), exact.tree_sum(x.reshape(64, 64))]
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(v, dtype="<f8").tobytes() for v in values)).hexdigest()
    assert digest == FROZEN["arithmetic"]


def test_smaller_shapes_are_corners_of_larger_ones() -> None:
    large = counter.bits(3, "k", (9, 4, 17))
    assert np.array_equal(counter.bits(3, "k", (5, 2, 8)), large[:5, :2, :8])
    state = counter.bits(3, "h0", (3, 2, 5, 7))
    assert np.array_equal(counter.bits(3, "h0", (1, 2, 4, 7)), state[:1, :, :4])


def test_no_two_coordinates_share_their_bits() -> None:
    for shape in ((9, 4, 256), (3, 2, 100, 120), (2, 4096)):
        assert np.unique(counter.bits(3, "k", shape)).size == np.prod(shape)


def test_large_and_small_shapes_agree() -> None:
    """Small lattices are kept, large ones are not: the same numbers either way."""
    large = counter.bits(3, "k", (5000, 4, 8))
    assert np.array_equal(large[:7], counter.bits(3, "k", (7, 4, 8)))


def test_draws_do_not_write_into_what_is_kept() -> None:
    first = counter.bits(1, "a", (4, 2, 3)).copy()
    counter.bits(2, "b", (4, 2, 3))[:] = 0
    assert np.array_equal(counter.bits(1, "a", (4, 2, 3)), first)


def test_names_and_seeds_give_unrelated_streams() -> None:
    streams = [counter.bits(s, n, (64,)) for s in (0, 1, 2**32 - 1) for n in ("q", "k", "qk", "kq", "")]
    assert len({int(x) for s in streams for x in s}) == 64 * len(streams)


def test_too_long_an_axis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^axis 1 of shape \(2, 5000\) has 5000 elements; at most 4096 are allowed$"):
        counter.bits(0, "q", (2, 5000))


def test_distributions() -> None:
    """Within 5 standard errors of what is stated, for moments, neighbours and streams; a shifted mean is seen."""
    n = 200_000
    u, x = counter.uniform(11, "u", (n,)), counter.normal(11, "x", (n,))
    assert 0 < u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1
    assert abs(u.mean() - 0.5) < 5 / np.sqrt(12 * n)
    assert abs((u * u).mean() - 1 / 3) < 5 * np.sqrt(4 / 45 / n)
    assert abs(x.mean()) < 5 / np.sqrt(n)
    assert abs(x.mean() + 0.02) > 5 / np.sqrt(n)
    assert abs((x * x).mean() - 1) < 5 * np.sqrt(1.7 / n)
    assert abs((x**4).mean() - 2.7) < 0.08
    assert np.abs(x).max() < 3.47
    for other in (np.roll(x, 1), np.roll(x, 8), counter.normal(12, "x", (n,)), counter.normal(11, "y", (n,))):
        assert abs((x * other).mean()) < 5 / np.sqrt(n)
    counts = np.bincount(counter.integers(5, "i", (n,), 0, 6), minlength=7)
    assert counts.size == 7
    assert (np.abs(counts - n / 7) < 5 * np.sqrt(n / 7)).all()
    ones = np.array([(counter.bits(5, "b", (n,)) >> np.uint64(b) & np.uint64(1)).mean() for b in range(64)])
    assert (np.abs(ones - 0.5) < 5 * 0.5 / np.sqrt(n)).all()


def test_heads_and_channels_are_uncorrelated() -> None:
    x = counter.normal(3, "k", (512, 4, 16)).reshape(512, -1)
    c = x.T @ x / 512
    assert np.abs(c - np.eye(64)).max() < 5.5 * np.sqrt(1.0 / 512)


@given(st.floats(2.0**-1000, 2.0**1000))
def test_ln_is_accurate(x: float) -> None:
    want = mpmath.log(mpmath.mpf(x))
    assert abs(float(exact.ln(np.array([x]))[0]) - want) <= 1e-15 + 1e-14 * abs(want)


@given(st.floats(-700, 700))
def test_exp_is_accurate(x: float) -> None:
    want = mpmath.exp(mpmath.mpf(x))
    assert abs(float(exact.exp(np.array([x]))[0]) - want) <= 1e-13 * want


@given(st.floats(2.0**-20, 600))
def test_softplus_inverse_inverts(s: float) -> None:
    x = exact.softplus_inverse(np.array([s]))
    assert abs(float(exact.softplus(x)[0]) - s) <= 1e-9 * s


@given(st.floats(0, 1))
def test_logit_inverts_the_sigmoid_and_saturates(p: float) -> None:
    x = float(exact.logit(np.array([p]))[0])
    if p in (0.0, 1.0):
        assert x == (1000.0 if p else -1000.0)
    else:
        assert abs(1 / (1 + mpmath.exp(-x)) - p) <= 2.0**-50


@given(st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_tree_sum_sums(n: int, seed: int) -> None:
    x = counter.integers(seed, "x", (3, n), -100, 100).astype(np.float64)
    assert np.array_equal(exact.tree_sum(x)[:, 0], x.sum(-1))
