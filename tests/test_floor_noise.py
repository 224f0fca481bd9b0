"""The noise of the floor: roundings that repeat, cancel or are flushed, the blocks it is summed over, and storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from floor_problems import DTYPES, dtypes_for, healthy, problem, verdict

from oracles.arithmetic import Nearest, Stochastic
from oracles.chunked import emulate
from oracles.contract import chunked32, operands_tf32, recurrent32, storage16
from oracles.gated import GatedProducts
from oracles.recurrence import forward_reverse
from oracles.rounding import round_to
from verikda import noise
from verikda.blocks import SMALLEST, blocks_of
from verikda.case import Case
from verikda.floor import judge
from verikda.inputs import make_call
from verikda.noise import output_noise
from verikda.zoo.target import ZooTarget


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


def test_noise_that_is_owed_to_few_runs_is_estimated_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """K = 1, so a key of length 1 leaves 1 - beta of the state: of 36 such factors rounding can be all that is left."""
    case = Case(
        lengths=(1, 8, 102, 49, 0, 0), packed=True, heads=3, dtype="bfloat16", beta_dtype="same", chunk_size=16,
        gate_regime="tiny_steps", gate_magnitude=50.0, gate_in_kernel=True, A_log=True, dt_bias=True, qk_l2norm=True,
        query_regime="one_large_row", value_regime="zero", do_regime="last_token_only", q_exponent=-4,
        do_exponent=-10, h0="random", scale=0.125, layout="expanded",
    )  # fmt: skip
    call = make_call(case)
    contract = operands_tf32("bfloat16", 16)
    arithmetic = Stochastic(np.random.default_rng(5), 48, True)
    runs = emulate(call.problem, contract, arithmetic).outputs
    dtypes = dict.fromkeys(runs, "float32")

    def failed() -> list[int]:
        p = replace(call.problem)  # another problem, so another floor
        verdicts = [judge({n: x[i] for n, x in runs.items()}, dtypes, p, contract).verdict for i in range(48)]
        return [i for i, verdict in enumerate(verdicts) if verdict == "fail"]

    assert len(failed()) <= 1
    truth = forward_reverse(call.problem)
    truth["dg"][0, 45, 0] += 1e-20  # far beyond any run
    found = judge(truth, dtypes, call.problem, contract).outputs["dg"]
    assert (found.verdict, found.coordinate) == ("fail", (0, 45, 0, 0))
    monkeypatch.setattr(noise, "RARE", 64)
    assert len(failed()) > 5, "64 runs do not know what they owe to few of them"


def test_few_runs_are_those_of_which_one_is_eight_times_the_mean() -> None:
    p = problem(lengths=(20,), tail=0)
    truth = forward_reverse(p)["o"]
    for ratio, owed in ((0.0, True), (0.11, True), (0.2, False), (1.0, False)):  # of the other 63 runs to the largest
        found = noise.OutputNoise("o", truth, "float32", p, chunked32(64))
        runs = np.broadcast_to(truth, (64, *truth.shape)).copy()
        runs += np.sqrt([1.0] + [ratio] * 63)[:, None, None, None, None]
        found.add(runs, np.ones(64))
        assert found.owed_to_few.all() == found.owed_to_few.any() == owed, ratio


def test_no_more_runs_are_made_where_the_noise_is_known() -> None:
    p = problem(lengths=(40,), tail=0, dtype="float32")
    out = forward_reverse(p)
    out["o"][0, 3] *= 1 + 2e-5
    found = judge(out, dtypes_for("float32"), p, chunked32(64))
    assert (found.verdict, found.runs) == ("fail", 64), found.outputs["o"]


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


def test_what_subnormal_terms_leave_where_they_cancel_is_no_error() -> None:
    """A state that one token has decayed to 1e-42, beta 1 and a key along q: dg is 0, of terms that round apart."""
    pack = (1, 2, 1, 3, 1, 1, 2, 3) * 4
    case = Case(
        lengths=pack, packed=True, tail_padding=1, heads=3, K=32, V=3, beta_dtype="same", chunk_size=16,
        gate_regime="last_row_strong", key_regime="orthogonal", query_regime="keys", beta_regime="one",
        value_regime="one_large_row", do_regime="decades", gate_magnitude=6.0, do_exponent=-10, h0="large",
        gate_in_kernel=True, A_log=True, dt_bias=True, beta_sigmoid=True, allow_neg_eigval=True, recompute=False,
        final_state=False, layout="strided", seed=470730930,
    )  # fmt: skip
    target = ZooTarget()
    call = make_call(case)
    truth, result = forward_reverse(call.problem), target.run(call)
    at = (0, 7, 0, 0)
    assert (truth["dg"][at], result.outputs["dg"][at]) == (0.0, -(2.0**-148))
    said = judge(result.outputs, result.dtypes, call.problem, target.contract(call), truth=truth)
    assert said.verdict == "pass"
    planted = result.outputs["dg"].copy()
    planted[at] = 2.0**-142
    outputs = result.outputs | {"dg": planted}
    said = judge(outputs, result.dtypes, call.problem, target.contract(call), truth=truth)
    assert said.outputs["dg"].message == "dg[0, 7, 0, 0] = 1.79366203e-43, float64 says 0: must be exact"
