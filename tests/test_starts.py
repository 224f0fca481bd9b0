"""The fixed starts of a search: always the same, complete, and within what a target has."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter

import pytest
from test_strategies import EVERYTHING, SMALL, outside, seen

from verikda import regimes
from verikda.blocks import SMALLEST
from verikda.call import Capabilities
from verikda.permits import permits
from verikda.starts import coherent_cases, long_cases, stratified, wide_cases
from verikda.strategies import length_class


def test_stratified_start_reaches_everything() -> None:
    found = seen(stratified(n=100))
    for name, want in EVERYTHING.items():
        assert found[name] >= want, name
    assert {case.gate for case in stratified(n=100)} == {"none", "log", "softplus", "bounded"}
    assert found["seed"] == set(range(100))
    lengths = {length_class(case) for case in stratified(n=100)}
    assert lengths >= {"1", "0 with empties", "under 16", "whole chunks", "whole chunks + 1", "whole chunks - 1"}
    assert lengths >= {"partial chunk", "under a chunk", "whole chunks with empties"}
    sizes = found["K"] | found["V"]
    assert sizes >= {1, 2, 3, 8, 15, 16, 17, 24, 32, 33, 64}
    assert any(case.N > 20 for case in stratified(n=100))
    assert sum(case.K != case.V for case in stratified(n=100)) > 80


def test_stratified_regimes_meet_lengths_that_can_show_them() -> None:
    """Each regime at least twice with 16 or more tokens in one sequence, and no regime dominates."""
    start = stratified(n=100)
    for field, table in regimes.KINDS.items():
        for name in table:
            with_it = [c for c in start if getattr(c, field) == name and (field != "gate_regime" or c.rule == "kda")]
            if name != "positive":
                assert sum(max(c.lengths) >= 16 for c in with_it) >= 2, name
                assert len(with_it) <= 40, name


START = "6072976b960bb295"
"""Digest of the first 60 cases, so that two machines are known to start alike."""


def test_stratified_start_is_always_the_same_and_grows_by_appending() -> None:
    start = stratified(n=60)
    assert start == stratified(n=60)
    assert stratified(n=100)[:60] == start
    assert len(set(start)) == 60
    text = "\n".join(c.to_json() for c in start)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == START, "the start is another one: fine after a new option"


def test_stratified_start_begins_narrow_and_shows_each_gate_to_each_dtype() -> None:
    for variant in range(5):
        start = stratified(n=60, variant=variant)
        assert start[0].dtype != "float32"
        forms = Counter((c.dtype, c.gate) for c in start if c.rule == "kda")
        assert len(forms) == 9
    assert stratified(Capabilities(dtypes=("float32",)), 3)[0].dtype == "float32"


def test_another_variant_is_another_start_and_as_complete() -> None:
    first, second = stratified(n=100), stratified(n=100, variant=1)
    assert not set(first) & set(second)
    assert not {c.seed for c in first} & {c.seed for c in second}
    pairs = [{(c.gate_regime, c.key_regime) for c in start} for start in (first, second)]
    assert len(pairs[0] - pairs[1]) > 10
    found = seen(second)
    for name, want in EVERYTHING.items():
        assert found[name] >= want, name


def test_long_cases_have_every_tail_and_thousands_of_tokens() -> None:
    tails, long, kept = long_cases()
    assert set(tails.lengths) >= set(range(65))
    assert long.T > 2048
    assert (kept.lengths, kept.beta_regime, kept.gate_regime, kept.h0) == ((2200,), "tiny", "tiny_steps", "large")
    assert {long_cases(variant=i)[2].dtype for i in range(9)} == {"bfloat16", "float16"}
    for case in (tails, long, *long_cases(variant=3)[:2]):
        assert (case.dtype, case.h0, case.dht, case.gate_regime) == ("float32", "random", True, "slow")
    assert tails.HV * tails.K * tails.V <= 16
    (only,) = long_cases(SMALL)
    assert (only.T, only.rule, only.dtype, only.h0) == (2200, "delta", "bfloat16", "none")
    few = long_cases(Capabilities(k_sizes=(128,), v_sizes=(128,)))
    assert {(c.K, c.V) for c in few} == {(128, 128)}


@pytest.mark.parametrize("c", [Capabilities(), Capabilities(dtypes=("bfloat16",), gates=("bounded",), packed=False)])
def test_a_long_case_has_more_elements_than_16_bits_count(c: Capabilities) -> None:
    for variant in range(3):
        long = long_cases(c, variant=variant)[-1]
        sizes = {name: math.prod(shape) for name, shape in long.shapes.items()}
        assert min(sizes[name] for name in ("q", "k", "v", "g", "do")) > 1 << 16
        assert long.HV * long.K * long.V <= 1024, "each element of a state costs time in every token"


def test_wide_cases_have_the_channels_of_models_and_hear_them_all() -> None:
    some = wide_cases(n=16)
    assert some[:8] == wide_cases(n=8)
    assert not set(some) & set(wide_cases(n=16, variant=1))
    assert min(min(c.K, c.V) for c in some) > 64
    assert sum(c.K == 128 for c in some) >= 4
    assert {c.dtype for c in some} == {"float16", "bfloat16", "float32"}
    assert {c.chunk_size for c in some} == {16, 32, 64}
    assert any(max(c.lengths) > c.chunk_size for c in some), "no state between chunks"
    assert all(sum(c.lengths) <= 80 and c.h0 == "random" and c.dht for c in some)
    few = wide_cases(SMALL, 2)
    assert all(outside(c, SMALL) == [] for c in few)


def test_coherent_cases_have_few_terms_in_many_blocks_and_each_dtype() -> None:
    some = coherent_cases(n=30)
    assert some == coherent_cases(n=30)
    assert not set(some) & set(coherent_cases(n=30, variant=1))
    for case in some:
        assert max(case.lengths) <= 7
        assert max(case.K, case.V) <= 8
        assert case.N * case.HV >= 24
        assert (case.query_regime, case.beta_regime, case.do_regime) == ("keys", "near_one", "ints")
        assert (case.scale, case.h0) == (1.0, "none")
    assert sum(max(c.lengths) * c.K >= SMALLEST for c in some) > 15, "sequences that are a block of their own"
    assert {(c.dtype, c.gate) for c in some} == set(
        itertools.product(("float16", "bfloat16", "float32"), ("log", "softplus", "bounded"))
    )
    found = seen(some)
    assert found["key_regime"] == {"sparse_int", "repeated"}
    assert {c.gate_regime for c in some if c.gate == "log"} == {"random", "reset"}


def test_coherent_cases_stay_within_what_a_restricted_target_has() -> None:
    few = coherent_cases(SMALL, 10)
    assert all(outside(case, SMALL) == [] for case in few)
    assert {(c.K, c.beta_regime) for c in few} <= {(1, "near_one"), (8, "near_one")}
    fixed = Capabilities(k_sizes=(128,), v_sizes=(64,), gates=("bounded",), required=("qk_l2norm",), scale=False)
    wide = coherent_cases(fixed, 10)
    assert all(outside(case, fixed) == [] and permits(fixed, case) is None for case in wide)


def test_stratified_start_finds_what_a_restricted_target_has() -> None:
    found = seen(stratified(SMALL, 60))
    assert found["key_regime"] == {name for name, r in regimes.KEYS.items() if r.stable}
    assert found["rule"] == {"delta"}
    assert found["K"] == {1, 2, 3, 8, 15, 16}
