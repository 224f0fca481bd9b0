"""The judgement of values: what it passes, what it fails, and what it will not decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracles.arithmetic import Nearest
from oracles.chunked import emulate
from oracles.contract import Contract, chunked32, recurrent32, storage16
from oracles.gated import GatedProducts
from oracles.problem import Problem
from oracles.recurrence import forward_reverse
from oracles.rounding import round_to
from verikda.blocks import SMALLEST, blocks_of
from verikda.floor import LIMIT, _Error, judge
from verikda.noise import OutputNoise, output_noise
from verikda.snippet import _weight


def problem(seed: int = 0, lengths: tuple[int, ...] = (40, 0, 9), tail: int = 3, H: int = 1, HV: int = 2, K: int = 8,
            V: int = 8, dtype: str = "bfloat16", decay: float = 1.0) -> Problem:  # fmt: skip
    rng = np.random.default_rng(seed)
    T, N = sum(lengths) + tail, len(lengths)

    def normal(*shape: int) -> np.ndarray:
        return round_to(rng.standard_normal(shape), dtype)

    k = normal(1, T, H, K)
    return Problem(
        q=normal(1, T, H, K),
        k=round_to(0.9 * k / np.sqrt((k * k).sum(-1, keepdims=True)), dtype),
        v=normal(1, T, HV, V),
        g=-decay * np.abs(normal(1, T, HV, K)),
        beta=round_to(rng.uniform(0, 1, (1, T, HV)), dtype),
        scale=K**-0.5,
        h0=normal(N, HV, K, V),
        cu_seqlens=np.cumsum([0, *lengths]),
        do=normal(1, T, HV, V),
        dht=normal(N, HV, K, V),
    )


def contract_for(dtype: str) -> Contract:
    return chunked32(16) if dtype == "float32" else storage16(dtype, 16)  # type: ignore[arg-type]


def dtypes_for(dtype: str) -> dict[str, str]:
    return dict.fromkeys(("o", "dq", "dk", "dv"), dtype) | dict.fromkeys(
        ("ht", "dh0", "dg", "dbeta", "dA_log", "ddt_bias"), "float32"
    )


def healthy(p: Problem, dtype: str) -> dict[str, np.ndarray]:
    return emulate(p, contract_for(dtype), Nearest(), output_dtypes=dtypes_for(dtype)).outputs


def verdict(p: Problem, outputs: dict[str, np.ndarray], dtype: str = "bfloat16", **options: Any) -> Any:
    return judge(outputs, dtypes_for(dtype), p, contract_for(dtype), **options)


DTYPES = ["bfloat16", "float16", "float32"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_healthy_passes(dtype: str) -> None:
    p = problem(dtype=dtype)
    found = verdict(p, healthy(p, dtype), dtype)
    assert found.verdict == "pass"
    assert set(found.outputs) == {"o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0"}
    assert all(0.2 < j.ratio < 2.5 for j in found.outputs.values())
    assert all(j.message == "" and j.excluded == 0 for j in found.outputs.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output", ["o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0"])
def test_one_wrong_block_fails_that_output_at_that_place(output: str, dtype: str) -> None:
    """An error of 40 roundoffs (16 bit) or 400 (float32, whose sums are longer) in one block."""
    p = problem(dtype=dtype)
    out = healthy(p, dtype)
    size = {"bfloat16": 10 * 2.0**-8, "float16": 10 * 2.0**-11, "float32": 100 * 2.0**-24}[dtype]
    at = (0, slice(32, 40), 0) if out[output].shape[1] > 2 else (2, 0)
    broken = out[output].copy()
    block = broken[at]
    rng = np.random.default_rng(0)
    block += size * 4 * np.sqrt((block**2).mean()) * rng.choice([-1.0, 1.0], block.shape)
    found = verdict(p, out | {output: broken}, dtype)
    assert found.verdict == "fail"
    assert [n for n, j in found.outputs.items() if j.verdict == "fail"] == [output]
    j = found.outputs[output]
    assert j.ratio > LIMIT
    assert j.coordinate is not None
    assert j.actual == broken[j.coordinate]
    assert j.expected == forward_reverse(p)[output][j.coordinate]
    inside = np.zeros(broken.shape, bool)
    inside[at] = True
    assert inside[j.coordinate]
    assert output in j.message
    assert "times the noise floor" in j.message


def test_a_16_bit_result_fails_under_a_float32_contract() -> None:
    p = problem(dtype="float32")
    out = {n: round_to(x, "bfloat16") for n, x in healthy(p, "float32").items()}
    found = judge(out, dict.fromkeys(out, "float32"), p, chunked32(16))
    assert all(j.verdict == "fail" and j.ratio > 1000 for j in found.outputs.values())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_fails_whatever_the_ratio(value: float) -> None:
    p = problem()
    out = healthy(p, "bfloat16")
    out["dk"][0, 7, 0, 3] = value
    found = verdict(p, out)
    assert found.verdict == "fail"
    assert found.outputs["dk"].coordinate == (0, 7, 0, 3)
    assert found.outputs["dk"].ratio == np.inf
    assert "not finite" in found.outputs["dk"].message
    assert found.outputs["o"].verdict == "pass"


def test_rows_of_no_sequence_must_be_zero() -> None:
    p = problem()
    out = healthy(p, "bfloat16")
    out["o"][0, 50, 1, 2] = 1e-30
    found = verdict(p, out)
    assert found.outputs["o"].verdict == "fail"
    assert found.outputs["o"].ratio == np.inf
    assert found.outputs["o"].coordinate == (0, 50, 1, 2)
    assert "must be exact" in found.outputs["o"].message


def test_an_empty_sequence_passes_its_states_through_exactly() -> None:
    """Ht = h0: only the output's own rounding is allowed, and float32 numbers have none."""
    p = problem(lengths=(0, 0), tail=0, HV=4)
    out = healthy(p, "bfloat16")
    assert verdict(p, out).verdict == "pass"
    assert verdict(p, out).outputs["ht"].ratio == 0
    out["ht"] = out["ht"] * (1 + 2.0**-20)
    assert verdict(p, out).outputs["ht"].verdict == "fail"


def test_overflow_of_the_truth_is_left_out_and_counted() -> None:
    """A float64 value beyond float16 has no right answer there; the rest of the output is judged."""
    p = problem(dtype="float16", lengths=(40,), tail=0)
    p.v[0, 20, 0, 0] = 60000.0
    p = replace(p, q=p.q * 8, beta=np.full_like(p.beta, 1.0), scale=4.0)
    truth = forward_reverse(p)
    over = np.abs(truth["o"]) > 65520
    assert over.any()
    with np.errstate(over="ignore"):
        out = {n: round_to(x, dtypes_for("float16")[n]) for n, x in truth.items()}
    found = judge(out, dtypes_for("float16"), p, chunked32(16))
    assert found.outputs["o"].excluded == over.sum()
    assert found.outputs["o"].verdict == "pass"
    out["o"][~over] *= 1.01
    assert judge(out, dtypes_for("float16"), p, chunked32(16)).outputs["o"].verdict == "fail"


def test_infinity_beside_the_largest_number_is_within_the_noise() -> None:
    """A truth of 65472 may round to inf when noise carries it past 65520; NaN, the other sign or 60000 may not."""
    p = problem(dtype="float16", lengths=(40,), tail=0, HV=1)
    p = replace(p, scale=p.scale * 65472.0 / np.abs(forward_reverse(p)["o"]).max())
    truth = forward_reverse(p)["o"]
    at = np.unravel_index(np.argmax(np.abs(truth)), truth.shape)
    out = {"o": healthy(p, "float16")["o"]}
    for value, expected in ((np.inf, "pass"), (-np.inf, "fail"), (np.nan, "fail")):
        out["o"][at] = np.copysign(1, truth[at]) * value
        assert verdict(p, out, "float16").outputs["o"].verdict == expected
    p = replace(p, scale=p.scale * 0.9)
    out = {"o": healthy(p, "float16")["o"]}
    out["o"][at] = np.copysign(np.inf, truth[at])
    assert verdict(p, out, "float16").verdict == "fail"


def test_a_standalone_script_lets_the_same_infinities_pass() -> None:
    """One element just below the largest number in a block that is noisier than it is, and one run that overflows."""
    p = problem(dtype="float16", lengths=(32,), tail=0, HV=1)
    truth = np.ones((1, 32, 1, 8))
    truth[0, [3, 20], 0, 0] = 65472.0
    truth[0, 30, 0, 5] = 7e4
    noise = OutputNoise("o", truth, "float16", p, contract_for("float16"))
    run = truth + np.where(truth == 1, 100.0, 0.0)
    run[0, 25, 0, 2] = np.nan
    noise.add(run[None], np.ones(1))
    fails = np.zeros(truth.shape, bool)
    for at in np.ndindex(truth.shape):
        result = truth.copy()
        result[at] = np.inf
        with np.errstate(invalid="ignore"):
            fails[at] = _Error("o", result, noise).judge(LIMIT).verdict == "fail"
    assert [tuple(at) for at in np.argwhere(~fails)] == [(0, 3, 0, 0), (0, 25, 0, 2), (0, 30, 0, 5)]
    np.testing.assert_array_equal(_weight(noise) == 2, fails)
    np.testing.assert_array_equal(_weight(noise) == 0, truth > 65520)


def test_overflow_of_the_contract_is_inconclusive() -> None:
    """In float16 a stored U overflows though o is small: no implementation of this contract could answer."""
    p = problem(dtype="float16", lengths=(40,), tail=0, HV=1)
    p = replace(p, h0=np.full_like(p.h0, 7e4), q=p.q * 2.0**-12)  # type: ignore[arg-type]
    found = verdict(p, healthy(p, "float16"), "float16")
    assert found.verdict == "inconclusive"
    assert found.outputs["o"].verdict == "inconclusive"
    assert "overflows" in found.detail
    truth = forward_reverse(p)
    exact = {n: round_to(x, dtypes_for("float16")[n]) for n, x in truth.items()}
    assert verdict(p, exact, "float16").outputs["o"].verdict == "inconclusive"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_float32_overflow_on_the_way_is_inconclusive(dtype: str) -> None:
    """A dbeta is in range, but terms of it, some 2^128 in size, are not."""
    p = problem(dtype=dtype, lengths=(12,), tail=0, HV=1)
    big = 2.0**64.2
    p = replace(p, v=p.v * big, do=p.do * big, h0=np.zeros_like(p.h0), dht=np.zeros_like(p.dht))
    p.do[:, 1::2] *= -1
    out = healthy(p, dtype)
    found = verdict(p, out, dtype)
    assert not np.isfinite(out["dbeta"]).all()
    assert found.outputs["dbeta"].verdict in ("inconclusive", "pass")
    out["o"][0, 0, 0, 0] = np.nan
    assert verdict(p, out, dtype).outputs["o"].verdict == "fail"


def test_outside_the_domain_is_inconclusive_unless_growth_is_small() -> None:
    p = problem()
    assert p.g is not None
    wild = replace(p, g=p.g + 2.0)
    found = verdict(wild, healthy(wild, "bfloat16"))
    assert found.verdict == "inconclusive"
    assert "stable domain" in found.detail
    mild = replace(p, g=np.where(np.arange(52)[:, None, None] == 11, 0.3, p.g))
    assert verdict(mild, healthy(mild, "bfloat16")).verdict == "pass"
    wrong = healthy(mild, "bfloat16")
    wrong["o"] = -wrong["o"]
    assert verdict(mild, wrong).verdict == "fail"


def test_all_zero_is_inconclusive() -> None:
    p = problem()
    zero = np.zeros_like
    p = replace(p, v=zero(p.v), h0=zero(p.h0), do=zero(p.do), dht=zero(p.dht))  # type: ignore[arg-type]
    found = verdict(p, healthy(p, "bfloat16"))
    assert found.verdict == "inconclusive"
    assert "zero" in found.detail
    out = healthy(p, "bfloat16")
    out["dg"][0, 0, 0, 0] = 1e-38
    assert verdict(p, out).verdict == "fail"


def test_nothing_to_judge_is_inconclusive() -> None:
    assert judge({}, {}, problem(), chunked32(16)).verdict == "inconclusive"


def test_wrong_shape_fails() -> None:
    p = problem()
    out = healthy(p, "bfloat16")
    out["ht"] = out["ht"][:2]
    found = verdict(p, out)
    assert found.verdict == "fail"
    assert "shape" in found.outputs["ht"].message
    assert found.outputs["o"].verdict == "pass"


def test_a_dtype_is_needed() -> None:
    p = problem()
    with pytest.raises(ValueError, match="dtype is given for o"):
        judge({"o": np.zeros((1, 52, 2, 8))}, {}, p, chunked32(16))


def test_forward_alone() -> None:
    p = problem()
    out = {n: x for n, x in healthy(p, "bfloat16").items() if n in ("o", "ht")}
    found = verdict(p, out)
    assert found.verdict == "pass"
    assert set(found.outputs) == {"o", "ht"}


def test_the_same_floor_serves_another_result() -> None:
    """Noise is kept per problem and contract, and another result of the same problem is judged by the same numbers."""
    p = problem()
    out = healthy(p, "bfloat16")
    a, b = verdict(p, out), verdict(p, out)
    assert a == b
    p2 = problem()
    assert verdict(p2, healthy(p2, "bfloat16")) == a


@pytest.mark.parametrize("dtype", DTYPES)
def test_regimes_where_roundings_are_coherent(dtype: str) -> None:
    """Repeated keys, equal gates, constant beta and v: rounding to nearest commits equal errors, which add up as n."""
    contracts = [storage16(dtype, 64)] if dtype != "float32" else [chunked32(64), recurrent32()]  # type: ignore[arg-type]
    worst = 0.0
    for g, beta, key in (
        (-0.011, 0.3, 0.37),
        (0.0, 0.9, 0.3),
        (-0.3, 1.0, 0.35),
        (-0.0013, 0.07, 0.2),
        (-4.99, 0.5, 0.3),
    ):
        p = problem(lengths=(150,), tail=0, HV=2, dtype=dtype)
        assert p.g is not None
        fill = {"k": key, "v": 1.3, "g": g, "beta": beta, "q": 0.7, "do": 0.9}
        p = replace(p, **{n: np.full_like(getattr(p, n), round_to(np.float64([x]), dtype)[0]) for n, x in fill.items()})
        for contract in contracts:
            out = emulate(p, contract, Nearest(), output_dtypes=dtypes_for(dtype)).outputs
            found = judge(out, dtypes_for(dtype), p, contract)
            assert found.verdict == "pass", (g, beta, key, contract.name, found)
            worst = max(worst, *(j.ratio for j in found.outputs.values() if j.ratio is not None))
    assert worst > 0.3, "the regime made no error at all"


def test_independent_roundings_would_call_coherent_ones_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stochastic rounding is keyed by the value: drawn per element, the floor misses what equal errors add up to."""
    from oracles import operations, rounding

    rng = np.random.default_rng(0)

    def independent(x: np.ndarray, dtype: str, runs: np.ndarray) -> np.ndarray:
        q = rounding.spacing(x, dtype)
        return (np.floor(x / q + rng.random((runs.shape[0], *x.shape[-3:]))) * q).astype(x.dtype)

    p = problem(lengths=(150,), tail=0, HV=2)
    fill = {"k": 0.2, "v": 1.3, "g": -0.0013, "beta": 0.07, "q": 0.7, "do": 0.9}
    p = replace(
        p, **{n: np.full_like(getattr(p, n), round_to(np.float64([x]), "bfloat16")[0]) for n, x in fill.items()}
    )
    contract = storage16("bfloat16", 64)
    out = emulate(p, contract, Nearest(), output_dtypes=dtypes_for("bfloat16")).outputs
    keyed = judge(out, dtypes_for("bfloat16"), p, contract, runs=64)
    monkeypatch.setattr(operations, "round_stochastic", independent)
    monkeypatch.setattr(operations, "round_rotated", independent)
    drawn = judge(out, dtypes_for("bfloat16"), replace(p), contract, runs=64)
    assert max(j.ratio for j in keyed.outputs.values()) < 1.2
    assert drawn.outputs["ht"].ratio > 2


def test_a_settled_recurrence_repeats_its_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one key, beta 1 and a slow constant gate the state settles, and each step commits the last step's roundings.

    Runs that round to nearest on rotated grids settle too; stochastic rounding alone would call this a fault.
    """
    from oracles import operations, rounding

    rng = np.random.default_rng(3)
    p = problem(lengths=(65,), tail=0, K=15, V=8, dtype="float32")
    assert p.g is not None
    k = np.broadcast_to(rng.standard_normal(15), p.k.shape)
    unit = k / np.sqrt((k * k).sum(-1, keepdims=True)) * (1 + 2.0**-23 * rng.standard_normal(p.k.shape))
    v = np.broadcast_to(round_to(rng.standard_normal(8), "float32"), p.v.shape)
    p = replace(
        p,
        k=round_to(0.999 * unit, "float32"),
        v=v.copy(),
        g=np.full_like(p.g, -(2.0**-12)),
        beta=np.ones_like(p.beta),
        h0=None,
    )
    contract = recurrent32()
    out = emulate(p, contract, Nearest(), output_dtypes=dtypes_for("float32")).outputs
    both = judge(out, dtypes_for("float32"), p, contract)

    def fresh(x: np.ndarray, dtype: str, factor: np.ndarray) -> np.ndarray:
        return rounding.round_stochastic(x, dtype, rng.integers(0, 1 << 32, factor.shape, np.uint32))

    monkeypatch.setattr(operations, "round_rotated", fresh)
    alone = judge(out, dtypes_for("float32"), replace(p), contract)
    assert both.outputs["ht"].ratio < 2
    assert alone.outputs["ht"].ratio > 1.5 * both.outputs["ht"].ratio, (alone.outputs["ht"], both.outputs["ht"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_decays_below_the_normal_numbers_may_be_flushed(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """exp(-88) is 0 where a GPU flushes it, and a gradient of 1e18 times that is no small number any more."""
    p = problem(lengths=(2,), tail=0, dtype=dtype)
    p = replace(p, h0=None, dht=None, v=p.v * 2.0**30, do=p.do * 2.0**30)
    p.v[:, 1], p.do[:, 0] = 0, 0
    p.g[:] = -88.0
    decay = GatedProducts._decay

    def flushed(self: GatedProducts, *at: Any) -> Any:
        E, weight = decay(self, *at)
        return np.where(np.abs(E) < 2.0**-126, 0, E), weight

    with monkeypatch.context() as patch:
        patch.setattr(GatedProducts, "_decay", flushed)
        result = healthy(p, dtype)
    plain = healthy(p, dtype)
    assert np.abs(result["dq"] - plain["dq"]).max() > 0
    assert verdict(p, result, dtype).verdict == verdict(p, plain, dtype).verdict == "pass"


@pytest.mark.parametrize("what", ["annihilated", "opposite"])
@pytest.mark.parametrize("seed", range(6))
def test_what_cancels_has_the_rounding_of_its_products(what: str, seed: int) -> None:
    """Products that are added are rounded first, in kernels that do not fuse the two; here that is all that is left.

    annihilated : D - k (beta k^T D) with D = q do^T, q along k, do a power of two. D rounds to nothing, and the error
    of beta k^T D is along k, where the next token takes it away.
    opposite : dht + q do^T with dht = -q do^T as rounded.
    """
    rng = np.random.default_rng(seed)
    p = problem(seed, lengths=(2, 2, 2), tail=0, K=3, V=6, dtype="float32")
    unit = rng.standard_normal(3)
    unit = round_to(unit / np.sqrt(unit @ unit), "float32")
    k = np.broadcast_to(unit, p.k.shape).copy()
    p = replace(p, gate="none", g=None, scale=1.0, q=k, k=k, beta=np.ones_like(p.beta), h0=np.zeros_like(p.dht))
    if what == "annihilated":
        last = np.arange(6)[:, None, None] % 2
        p = replace(p, do=last * np.exp2(rng.integers(-10, -6, p.v.shape)), dht=None)
    else:
        do = round_to(rng.standard_normal(6), "float32")
        dht = np.broadcast_to(round_to(-unit[:, None] * do, "float32"), p.h0.shape).copy()  # type: ignore[union-attr]
        p = replace(
            p, beta=np.zeros_like(p.beta), do=np.arange(6)[:, None, None] % 2 * do * np.ones(p.v.shape), dht=dht
        )
    out = emulate(p, recurrent32(), Nearest(), output_dtypes=dtypes_for("float32")).outputs
    found = judge(out, dtypes_for("float32"), p, recurrent32())
    assert {j.verdict for j in found.outputs.values()} == {"pass"}, [j.message for j in found.outputs.values()]
    assert np.any(out["dh0"] != forward_reverse(p)["dh0"]), "nothing was rounded"


def test_a_floor_goes_with_its_problem() -> None:
    """Floors are kept for further results of a problem that is alive, and no longer: a search makes thousands."""
    import gc

    from verikda.floor import _floors
    from verikda.noise import Floor

    def living() -> tuple[int, int]:
        gc.collect()
        return len(_floors), sum(isinstance(x, Floor) for x in gc.get_objects())

    before = living()
    kept = problem()
    verdict(kept, healthy(kept, "bfloat16"))
    assert living() == (before[0] + 1, before[1] + 1)
    for seed in range(5):
        p = problem(seed, lengths=(9,))
        verdict(p, healthy(p, "bfloat16"))
        del p
    assert living() == (before[0] + 1, before[1] + 1)


def test_blocks_are_a_partition_and_large_enough() -> None:
    p = problem(lengths=(1, 0, 3, 40, 2), tail=5, H=2, HV=4, K=2, V=3)
    truth = forward_reverse(p)
    for name, t in truth.items():
        b = blocks_of(name, t, p, storage16("bfloat16", 16))
        ones = b.sum(np.ones(t.shape))
        np.testing.assert_array_equal(ones, b.count)
        assert b.count.sum() == t.size
        exact = 1 if name not in ("ht", "dh0") else 0
        assert (b.count[: len(b.count) - exact] >= SMALLEST).all(), name
        if exact:
            outside = b.labels[0, 46:]
            assert (outside == len(b.count) - 1).all()
            assert b.count[-1] == t[0, 46:].size


def test_blocks_follow_sequence_head_and_chunk() -> None:
    p = problem(lengths=(40, 9), tail=0)
    o = forward_reverse(p)["o"]
    labels = blocks_of("o", o, p, storage16("bfloat16", 16)).labels
    assert len(np.unique(labels)) == 2 * (3 + 1)
    assert labels[0, 0, 0] == labels[0, 15, 0] != labels[0, 16, 0]
    assert labels[0, 39, 0] != labels[0, 40, 0]
    assert labels[0, 0, 0] != labels[0, 0, 1]
    # the token recurrence has no chunks: 64 tokens are judged together
    assert len(np.unique(blocks_of("o", o, p, recurrent32()).labels)) == 2 * 2


def test_small_blocks_join_their_own_head_first() -> None:
    p = problem(lengths=(17, 17), tail=0, K=4, V=4)
    o = forward_reverse(p)["o"]
    labels = blocks_of("o", o, p, storage16("bfloat16", 16)).labels
    assert labels[0, 16, 0] == labels[0, 15, 0]
    assert len(np.unique(labels)) == 4


def test_output_noise() -> None:
    x = np.array([0.0, 1.0, 1.9, -4.0])
    np.testing.assert_allclose(output_noise(x, "float16"), np.array([0, 1, 1, 16]) * 2.0**-20 / 12)
    np.testing.assert_allclose(output_noise(x, "bfloat16"), np.array([0, 1, 1, 16]) * 2.0**-14 / 12)
    np.testing.assert_allclose(output_noise(x, "float32"), x**2 * 2.0**-48)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", ["emulator", "zoo"])
def test_no_false_alarm_on_drawn_cases(target: str, dtype: str) -> None:
    """A handful of what `python -m verikda.false_alarm` does by the ten thousand."""
    from verikda.false_alarm import run_share

    share = run_share(target, None, dtype, 0, 0, 12)
    assert not share["failures"]
    assert share["verdicts"]["pass"] >= 9
    assert sum(share["verdicts"].values()) == 12
    assert 0.3 < max(ratio for ratio, _ in share["worst"].values()) < LIMIT


def test_the_evidence_would_show_an_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An implementation with a fault fails the run, is counted in the table and listed with a case that fails again."""
    from verikda.case import Case
    from verikda.checks import named
    from verikda.false_alarm import main
    from verikda.run_case import run_case
    from verikda.targets import resolve

    record = str(tmp_path / "shares.jsonl")
    options = ["--dtype", "float32", "--cases", "6", "--json", record]
    assert main(["--target", "zoo:DV_OFF", *options]) == 1
    assert main(["--target", "zoo", *options]) == 0
    assert main(["--target", "zoo", "--seed", "1", *options]) == 0
    capsys.readouterr()
    assert main(["--table", record]) == 1
    rows = capsys.readouterr().out.splitlines()
    healthy, faulty = ([x.strip() for x in rows[i].split("|")[1:-1]] for i in (3, 2))
    assert healthy[:6] == ["zoo:NONE", "float32", "12", "12", "0", "0"]
    assert faulty[:3] == ["zoo:DV_OFF", "float32", "6"]
    assert int(faulty[5]) >= 5
    assert rows[4].startswith("FAIL zoo:DV_OFF float32: dv[")
    case = Case.from_json(rows[5])
    assert run_case(resolve("zoo:DV_OFF"), case, named(("floor",))).verdict == "fail"


def test_a_share_is_the_same_whatever_else_runs() -> None:
    from verikda.false_alarm import run_share

    assert run_share("emulator", None, "float32", 5, 1, 3) == run_share("emulator", None, "float32", 5, 1, 3)
    assert run_share("emulator", None, "float32", 5, 1, 3) != run_share("emulator", None, "float32", 5, 2, 3)
