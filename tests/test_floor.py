"""The judgement of values: what it passes, what it fails, and what it will not decide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from floor_problems import DTYPES, contract_for, dtypes_for, healthy, problem, verdict

from oracles.contract import chunked32
from oracles.recurrence import forward_reverse
from oracles.rounding import round_to
from verikda.floor import LIMIT, _Error, judge
from verikda.noise import OutputNoise
from verikda.snippet import _weight


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


def test_a_floor_goes_with_its_problem() -> None:
    """Floors are kept for further results of a problem that is alive, and no longer: a search makes thousands."""
    import gc

    from verikda.floor import _floors
    from verikda.noise import Floor

    def living() -> tuple[int, int]:
        gc.collect()
        return len(_floors), sum(type(x) is Floor for x in gc.get_objects())

    before = living()
    kept = problem()
    verdict(kept, healthy(kept, "bfloat16"))
    assert living() == (before[0] + 1, before[1] + 1)
    for seed in range(5):
        p = problem(seed, lengths=(9,))
        verdict(p, healthy(p, "bfloat16"))
        del p
    assert living() == (before[0] + 1, before[1] + 1)
