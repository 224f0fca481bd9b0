"""Strategies draw valid cases only, reach everything they promise, and shrink to the simplest.

Whether a case lies within the capabilities of a target is judged here by a table of its own.
"""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from oracles.recurrence import is_stable
from verikda import knobs, regimes
from verikda.call import Capabilities
from verikda.case import H0, LAYOUTS, Case
from verikda.inputs import make_call
from verikda.permits import permits
from verikda.starts import coherent_cases, stratified, wide_cases
from verikda.strategies import cases, describe, labels, length_class

SMALL = Capabilities(
    dtypes=("bfloat16",), chunk_sizes=(64,), rules=("delta",), gates=(), layouts=("contiguous",), max_k=16, max_v=8,
    grouped=False, packed=False, empty=False, tail_padding=False, initial_state=False, backward=False, dht=False,
    scale=False, qk_l2norm=False, beta_sigmoid=False, allow_neg_eigval=False, safe_gate=False, state_v_first=False,
    recompute=False, hard_reset=False, g_dtypes=("float32",), beta_dtypes=("same",),
    beta_above_one=False,
)  # fmt: skip


def outside(case: Case, c: Capabilities) -> list[str]:
    """Names of the capabilities that `case` goes beyond."""
    kda = case.rule == "kda"
    used = {
        "dtypes": case.dtype in c.dtypes,
        "chunk_sizes": case.chunk_size in c.chunk_sizes,
        "rules": case.rule in c.rules,
        "gates": not kda or case.gate in c.gates,
        "layouts": case.layout in c.layouts,
        "max_k": bool(c.k_sizes) or c.max_k >= case.K,
        "max_v": bool(c.v_sizes) or c.max_v >= case.V,
        "grouped": c.grouped or case.groups == 1,
        "packed": c.packed or not case.packed,
        "empty": c.empty or 0 not in case.lengths,
        "tail_padding": c.tail_padding or case.tail_padding == 0,
        "initial_state": c.initial_state or case.h0 == "none",
        "dht": (c.dht and c.backward) or not case.dht,
        "scale": c.scale or case.scale is None,
        "qk_l2norm": c.qk_l2norm or not case.qk_l2norm,
        "beta_sigmoid": c.beta_sigmoid or not case.beta_sigmoid,
        "allow_neg_eigval": c.allow_neg_eigval or not case.allow_neg_eigval,
        "safe_gate": c.safe_gate or not case.safe_gate,
        "state_v_first": c.state_v_first or not case.state_v_first,
        "recompute": c.recompute or case.recompute,
        "hard_reset": c.hard_reset or not kda or case.gate_regime != "reset",
        "g_dtypes": not kda or case.g_dtype in c.g_dtypes,
        "beta_dtypes": case.beta_dtype in c.beta_dtypes,
        "k_sizes": not c.k_sizes or case.K in c.k_sizes,
        "v_sizes": not c.v_sizes or case.V in c.v_sizes,
        "beta_above_one": c.beta_above_one or case.beta_regime != "up_to_two",
        "required": all(getattr(case, flag) for flag in c.required),
    }
    return [name for name, fine in used.items() if not fine]


def subsets(options: tuple) -> st.SearchStrategy[tuple]:
    return st.sets(st.sampled_from(options), min_size=1).map(lambda s: tuple(x for x in options if x in s))


_FULL = Capabilities()
capabilities = st.builds(
    Capabilities,
    **{
        f.name: st.booleans() if isinstance(f.default, bool) else subsets(f.default)
        for f in fields(Capabilities)
        if isinstance(f.default, bool) or (isinstance(f.default, tuple) and f.default)
    },
    k_sizes=st.sampled_from([(), (), (64, 128)]),
    v_sizes=st.sampled_from([(), (), (128,)]),
    max_k=st.sampled_from([1, 16, 64, 256]),
    max_v=st.sampled_from([1, 16, 64, 256]),
)


def test_the_judge_sees_every_capability() -> None:
    """Every limit of a minimal target is broken by some case of a complete one, and by none of its own."""
    broken = {name for case in stratified(n=100) for name in outside(case, SMALL)}
    unseen = {"notes", "backward", "autograd", "shape_invariant", "beyond_safe_gate", "required", "k_sizes", "v_sizes"}
    assert broken >= {f.name for f in fields(Capabilities)} - unseen
    assert all(outside(case, SMALL) == [] for case in stratified(SMALL, 50))


def test_a_target_of_few_sizes_and_required_flags_gets_nothing_else() -> None:
    fused = Capabilities(
        k_sizes=(128,), v_sizes=(64, 128), gates=("bounded",), required=("qk_l2norm", "beta_sigmoid"),
        beta_above_one=False,
    )  # fmt: skip
    some = stratified(fused, 40)
    assert all(outside(case, fused) == [] and permits(fused, case) is None for case in some)
    assert {(case.K, case.V) for case in some} == {(128, 64), (128, 128)}
    shows = {
        "K = 64": replace(some[0], K=64),
        "V = 32": replace(some[0], V=32),
        "qk_l2norm = False": replace(some[0], qk_l2norm=False, key_regime="random"),
        "beta above 1": replace(some[0], beta_regime="up_to_two", allow_neg_eigval=True),
    }
    for reason, case in shows.items():
        assert permits(fused, case) == reason


@settings(max_examples=500)
@given(cases())
def test_cases_are_valid_stable_and_within_limits(case: Case) -> None:
    assert is_stable(make_call(case).problem)
    assert sum(case.lengths) <= 160
    assert max(case.K, case.V) <= 64
    assert case.HV <= 4
    assert case.HV * case.K * case.V <= 8192
    assert len(labels(case)) == 10
    assert "\n" not in describe(case)


@settings(max_examples=100, phases=[Phase.generate])  # shrinking a set of capabilities takes minutes, tells little
@given(st.data(), capabilities)
def test_cases_stay_within_any_capabilities(data: st.DataObject, c: Capabilities) -> None:
    case = data.draw(cases(c, max_tokens=40))
    assert outside(case, c) == []
    assert all(outside(case, c) == [] for case in (*stratified(c, 4), *coherent_cases(c, 2), *wide_cases(c, 2)))


def test_nothing_is_drawn_and_thrown_away() -> None:
    count = 0

    @settings(max_examples=300)
    @given(cases())
    def run(case: Case) -> None:
        nonlocal count
        count += 1

    run()
    assert count >= 300


def seen(list_of_cases: list[Case]) -> dict[str, set]:
    return {f.name: {getattr(case, f.name) for case in list_of_cases} for f in fields(Case)}


EVERYTHING: dict[str, set] = {
    **{field: set(table) for field, table in regimes.KINDS.items()},
    "dtype": {"float16", "bfloat16", "float32"},
    "g_dtype": {"same", "float32"},
    "beta_dtype": {"same", "float32"},
    "offsets": {"int32", "int64"},
    "chunk_size": {16, 32, 64},
    "rule": {"kda", "delta"},
    "h0": set(H0),
    "layout": set(LAYOUTS),
    "scale": {None, 1.0, 0.125},
    "lower_bound": {None, -5.0, -1.0, -0.25},
    "gate_magnitude": {1.0, 0.0625, 0.25, 4.99, 5.0, 6.0, 12.0, 50.0},
    "heads": {1, 2, 3, 4},
    "groups": {1, 2, 3},
    "tail_padding": {0, 1, 19},
    **{f.name: {False, True} for f in fields(Case) if isinstance(f.default, bool)},
}
EVERYTHING["gate_regime"] -= {"positive"}


def test_random_search_reaches_most_of_everything() -> None:
    """Hypothesis varies what it has drawn, so that 1000 cases are not 1000 independent ones: most, not all."""
    drawn: list[Case] = []

    @settings(max_examples=1000)
    @given(cases(unstable=True))
    def run(case: Case) -> None:
        drawn.append(case)

    run()
    found = seen(drawn)
    for name, want in EVERYTHING.items():
        assert len(found[name] & want) >= 0.7 * len(want), name
    assert {len(case.overrides) for case in drawn} >= {0, 1, 2}
    assert {item[0] for case in drawn for item in case.overrides} >= {"q", "k", "v", "g", "beta", "do"}
    usual = {n for c in stratified(n=300) for n in c.lengths}
    assert any(n not in usual for c in drawn for n in c.lengths)


@pytest.mark.parametrize(("field", "name"), [(f, n) for f, table in regimes.KINDS.items() for n in table])
def test_random_search_reaches_every_regime(field: str, name: str) -> None:
    quick = settings(max_examples=1, phases=[Phase.generate])
    assert find(cases(unstable=True, **{field: name}), lambda case: getattr(case, field) == name, settings=quick)


def test_shrinking_ends_at_the_default_case() -> None:
    # `find` answers with the last case it ran, so the explain phase, which tries variations at the end, is left out
    quick = settings(max_examples=2000, phases=[Phase.generate, Phase.shrink])
    assert find(cases(), lambda case: True, settings=quick) == Case()
    needs = find(cases(), lambda case: case.gate_regime == "spike" and case.T > 16, settings=quick)
    assert needs == Case(lengths=(17,), gate_regime="spike")
    pack = find(cases(), lambda case: case.packed and case.N > 1 and case.dtype == "float16", settings=quick)
    assert pack == Case(dtype="float16", packed=True, lengths=(1, 3))


class Recorder(SimpleNamespace):
    """Knobs that note which of them are read."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            reads.add(name)
        return super().__getattribute__(name)


reads: set[str] = set()


def test_reads_names_all_that_options_depend_on() -> None:
    """Fixed knobs are met by looking ahead along `READS`; a dependence left out would end in the middle of a draw."""
    found: dict[str, set[str]] = {name: set() for name in knobs.OPTIONS}
    for case in stratified(n=60):
        known: dict[str, Any] = {}
        for name in knobs.OPTIONS:
            reads.clear()
            knobs.OPTIONS[name](Recorder(**known), Capabilities(), knobs.Limits(unstable=True))
            found[name] |= reads
            known[name] = getattr(case, name)
    assert found == {name: set(knobs.READS.get(name, ())) for name in knobs.OPTIONS}


def test_simplest_first() -> None:
    """Shrinking goes to the first option: it must be the default wherever the default is allowed."""
    simple, known = Case(), {}
    space = knobs.Space(Capabilities(), knobs.Limits(), {})
    for name in knobs.OPTIONS:
        first = space.options(name, known)[0]
        assert first == getattr(simple, name), name
        known[name] = first
    assert set(knobs.OPTIONS) == {f.name for f in fields(Case)}


# ------------------------------------------------------------------ fixed knobs


@pytest.mark.parametrize(
    "fixed",
    [
        {"dtype": "bfloat16", "gate_regime": ["bound", "spike"], "max_tokens": 80},
        {"safe_gate": True},
        {"allow_neg_eigval": True},
        {"gate_regime": "reset"},
        {"gate_regime": ["reset", "positive"], "unstable": True},
        {"gate_regime": "positive", "unstable": True},
        {"A_log": True},
        {"lower_bound": [-5.0, -2.5]},
        {"dt_bias": True, "lower_bound": None},
        {"tail_padding": 7},
        {"offsets": "int32"},
        {"lengths": (5, 0, 3)},
        {"lengths": [(3,), (4,)], "packed": False},
        {"K": 128, "V": 128, "heads": 1, "groups": 1, "chunk_size": 64},
        {"rule": "delta", "beta_regime": "up_to_two"},
        {"g_dtype": "same", "gate_magnitude": 7.5},
        {"seed": [1, 2], "overrides": False},
        {"overrides": (("v", 0, 3.0),), "lengths": [(3,), (4,)]},  # a case without a token has no such element
        {"final_state": False},
        {"final_state": True, "dht": False},
    ],
    ids=str,
)
def test_fixed_knobs_hold_and_bring_what_they_need(fixed: dict) -> None:
    @settings(max_examples=15)
    @given(cases(**fixed))
    def run(case: Case) -> None:
        for name, value in fixed.items():
            if name in knobs.OPTIONS and not isinstance(value, bool):
                allowed = value if isinstance(value, list) else [value]
                assert getattr(case, name) in allowed
        if fixed.get("overrides") is False:
            assert case.overrides == ()

    run()
    plain = {name: value for name, value in fixed.items() if not (name == "overrides" and value is False)}
    assert len(stratified(n=10, **plain)) == 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cases(speed=3), "'speed' is no knob of a case; the knobs are rule, dtype, "),
        (lambda: stratified(speed=3), "'speed' is no knob of a case; the knobs are rule, dtype, "),
        (lambda: cases(dtype="float8"), r"no case with these capabilities has dtype=\['float8'\]; fix fewer"),
        (lambda: cases(SMALL, rule="kda"), r"no case with these capabilities has rule=\['kda'\]; fix fewer"),
        (
            lambda: cases(rule="delta", safe_gate=True),
            r"no case with these capabilities has rule=\['delta'\] and safe_gate=\[True\]; ",
        ),
        (lambda: cases(gate_regime="positive"), r"no case with these capabilities has gate_regime=\['positive'\]; fix"),
        (lambda: cases(Capabilities(dtypes=())), "no case has any dtype with these capabilities; let them name"),
        (lambda: cases(max_tokens=0), "max_tokens is 0, but it must be at least 1; "),
        (lambda: cases(K=300), r"no case with these capabilities has K=\[300\]; fix fewer knobs or other values"),
    ],
)
def test_impossible_wishes_are_refused_at_once(make, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        make()


# ------------------------------------------------------------------ words for people


def test_describe_names_what_matters() -> None:
    case = Case(
        lengths=(5, 0, 7), packed=True, tail_padding=2, heads=2, groups=3, K=8, V=4, dtype="bfloat16",
        gate_regime="bound", gate_magnitude=5.0, gate_in_kernel=True, lower_bound=-5.0, key_regime="repeated",
        beta_regime="one", h0="large", qk_l2norm=True, recompute=False, layout="strided", seed=3,
        overrides=(("v", 0, 1.0),),
    )  # fmt: skip
    assert describe(case) == (
        "kda bfloat16; 3 packed sequences [5,0,7] + 2 rows; H=2 HV=6 K=8 V=4 C=64; gate bound x 5, bounded in kernel"
        " down to -5; k repeated, q random, beta one; v random, do random; h0 large; qk_l2norm; no recompute; strided;"
        " 1 overrides; seed 3"
    )
    scaled = Case(
        lengths=(1,), packed=True, offsets="int32", dtype="float16", g_dtype="same", beta_dtype="same",
        q_exponent=-4, v_exponent=2, do_exponent=3, scale=1.0,
    )  # fmt: skip
    assert describe(scaled) == (
        "kda float16, g float16, beta float16, offsets int32; 1 packed sequences [1]; H=1 HV=1 K=1 V=1 C=64; gate"
        " random x 1; k random, q random, beta random; v random, do random; q x 2^-4; v and h0 x 2^2;"
        " do and dht x 2^3; scale 1; seed 0"
    )
    plain = "B=1 T=1; H=1 HV=1 K=1 V=1 C=64; k random, q random, beta random; v random, do random; seed 0"
    assert describe(Case(rule="delta")) == "delta float32; " + plain


CHANGED = {
    "lengths": (3, 5), "packed": False, "tail_padding": 2, "heads": 2, "groups": 2, "K": 2, "V": 2, "dtype": "float32",
    "g_dtype": "same", "beta_dtype": "same", "offsets": "int32", "chunk_size": 32, "gate_regime": "zero",
    "key_regime": "collinear", "query_regime": "zero", "beta_regime": "one", "value_regime": "zero",
    "do_regime": "zero",
    "gate_magnitude": 2.0, "q_exponent": 1, "v_exponent": 1, "do_exponent": 1, "h0": "random", "dht": True,
    "scale": 1.0, "A_log": True, "dt_bias": True, "qk_l2norm": True, "beta_sigmoid": False,
    "allow_neg_eigval": True, "safe_gate": True, "state_v_first": True, "recompute": False, "layout": "strided",
    "seed": 1, "gate_in_kernel": False, "lower_bound": -4.0, "overrides": (("q", 0, 1.0),), "rule": "delta",
    "final_state": False,
}  # fmt: skip


@pytest.mark.parametrize("name", [f.name for f in fields(Case)])
def test_describe_names_every_field_that_is_changed(name: str) -> None:
    base = Case(lengths=(3, 4), packed=True, dtype="float16", beta_sigmoid=True)
    if name == "packed":
        base = replace(base, lengths=(4, 4))
    elif name != "rule":
        base = replace(base, gate_in_kernel=True, lower_bound=-5.0)
    more = {"gate_in_kernel": {"lower_bound": None}}.get(name, {})
    assert describe(replace(base, **{name: CHANGED[name]}, **more)) != describe(base)


@pytest.mark.parametrize(
    ("lengths", "name"),
    [
        ((0,), "0 with empties"),
        ((1,), "1"),
        ((15,), "under 16"),
        ((16, 0), "under a chunk with empties"),
        ((31,), "whole chunks - 1"),
        ((5, 32), "whole chunks"),
        ((65,), "whole chunks + 1"),
        ((70,), "partial chunk"),
    ],
)
def test_length_class(lengths: tuple, name: str) -> None:
    assert length_class(Case(lengths=lengths, packed=True, chunk_size=32)) == name


def test_labels_name_regimes_not_in_play() -> None:
    assert labels(Case(rule="delta"))[:2] == ("gate=none", "gate form=none")
    assert "gate=random" in labels(Case())
