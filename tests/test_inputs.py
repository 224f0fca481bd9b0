"""Inputs: bit-equal, rounded to their dtype, and raw values that give the gates and betas of their regime.

Exact: frozen hashes, dtypes, saturated gates and betas, corners under shrinking. Bounded: the decay that a raw
gate gives. What each regime is: test_regimes.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from oracles import gates as activation
from oracles.recurrence import forward_reverse, is_stable
from verikda import regimes
from verikda.case import Case
from verikda.dtypes import is_representable, round_to
from verikda.inputs import make_call, raw_beta, raw_gate
from verikda.starts import stratified

WIDE = Case(lengths=(40,), heads=3, groups=2, K=16, V=24, h0="random", dht=True, seed=5)
PACK = Case(lengths=(5, 0, 17, 1), packed=True, tail_padding=3, heads=2, K=8, V=5, seed=9)


def arrays(case: Case) -> dict[str, np.ndarray]:
    p = make_call(case).problem
    return {name: getattr(p, name) for name in case.shapes}


def digest(case: Case) -> str:
    h = hashlib.sha256()
    for name, x in arrays(case).items():
        h.update(name.encode() + str(x.shape).encode())
        h.update(np.ascontiguousarray(x, dtype="<f8").tobytes())
    return h.hexdigest()[:32]


FROZEN = {
    "plain": (Case(), "d4aae0f40c289723eb3888bce66e16f9"),
    "wide bfloat16": (
        replace(WIDE, dtype="bfloat16", g_dtype="same", beta_dtype="same"),
        "e8878e918b4402c8626e6ec070f90047",
    ),
    "pack float16": (
        replace(PACK, dtype="float16", key_regime="collinear", gate_regime="ragged"),
        "baf3918038eeefb148d7168f29a4e75a",
    ),
    "bounded gate": (
        replace(WIDE, gate_in_kernel=True, lower_bound=-5.0, A_log=True, dt_bias=True, gate_regime="model"),
        "f68124d7458b003f4ba867cd6f31d3bc",
    ),
    "softplus gate": (
        replace(WIDE, gate_in_kernel=True, A_log=True, dt_bias=True, dtype="bfloat16"),
        "acb8077d37dc8cd1110ac6b4ff2530eb",
    ),
    "norm and sigmoid": (
        replace(PACK, qk_l2norm=True, beta_sigmoid=True, allow_neg_eigval=True),
        "5c7a507bf3e886a788e9514eb287cc03",
    ),
    "DeltaNet": (replace(PACK, rule="delta", beta_regime="up_to_two"), "d683d14d402396a6d29981566fb34e4c"),
}
EVERY_REGIME = "7cc752ce5b18d58707b8127b52aaf26f"


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_bits(name: str) -> None:
    """Stored cases rely on these bits; if one changes, raise `case.SCHEMA` and freeze the new ones."""
    case, want = FROZEN[name]
    assert digest(case) == want


def test_frozen_bits_of_every_regime() -> None:
    h = hashlib.sha256()
    for field, table in regimes.KINDS.items():
        for name in table:
            h.update(digest(replace(PACK, **{field: name})).encode())
    assert h.hexdigest()[:32] == EVERY_REGIME


def test_the_digest_sees_one_bit() -> None:
    assert digest(WIDE) != digest(replace(WIDE, overrides=(("dht", 7, 0.25),)))
    assert digest(WIDE) != digest(replace(WIDE, seed=6))


@pytest.mark.parametrize("case", stratified(n=40), ids=lambda c: f"{c.seed}")
def test_call_is_complete_and_representable(case: Case) -> None:
    call = make_call(case, poison=1e30)
    p = call.problem
    for name, shape in case.shapes.items():
        x = getattr(p, name)
        assert x.shape == shape
        assert x.dtype == np.float64
        assert call.dtypes[name] == case.dtype_of(name)
        assert is_representable(x, call.dtypes[name])
    for name in ("g", "h0", "A_log", "dt_bias", "dht"):
        assert (getattr(p, name) is None) == (name not in case.shapes)
    assert (p.cu_seqlens is None) == (not case.packed)
    assert call.dtypes.get("cu_seqlens") == (case.offsets if case.packed else None)
    assert len(p.spans) == case.N
    assert [b - a for _, a, b in p.spans] == list(case.lengths)
    assert p.gate == case.gate
    assert call.poison == 1e30
    for flag in ("chunk_size", "safe_gate", "state_v_first", "recompute", "final_state", "layout"):
        assert getattr(call, flag) == getattr(case, flag)
    for flag in ("qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "lower_bound"):
        assert getattr(p, flag) == getattr(case, flag)
    assert is_stable(p)
    if case.safe_gate:
        decay = activation.log_decay(p, p.g)
        assert decay is not None
        assert (decay >= -5).all()
    assert all(np.isfinite(x).all() for x in forward_reverse(p).values())


def test_without_backward_there_is_no_gradient_and_nothing_else_changes() -> None:
    call, full = make_call(WIDE, backward=False), make_call(WIDE)
    assert call.problem.do is None
    assert call.problem.dht is None
    assert "do" not in call.dtypes
    assert np.array_equal(call.problem.q, full.problem.q)
    shown = replace(WIDE, overrides=(("do", 0, 1.0), ("v", 0, 3.0)))
    assert make_call(shown, backward=False).problem.v[0, 0, 0, 0] == 3.0


def test_values_stay_while_a_case_shrinks() -> None:
    small = replace(WIDE, lengths=(11,), heads=2, groups=1, K=16, V=3, h0="none", dht=False)
    p, s = make_call(WIDE).problem, make_call(small).problem
    assert np.array_equal(s.k, p.k[:, :11, :2])
    assert np.array_equal(s.v, p.v[:, :11, :2, :3])
    assert np.array_equal(s.beta, p.beta[:, :11, :2])
    assert s.g is not None
    assert p.g is not None
    assert np.array_equal(s.g, p.g[:, :11, :2])


def test_exponents_scale_exactly() -> None:
    base = arrays(replace(WIDE, dtype="bfloat16"))
    scaled = arrays(replace(WIDE, dtype="bfloat16", q_exponent=-3, v_exponent=5, do_exponent=2))
    for name, e in {"q": -3, "v": 5, "h0": 5, "do": 2, "dht": 2, "k": 0, "beta": 0, "g": 0}.items():
        assert np.array_equal(scaled[name], np.ldexp(base[name], e)), name


def test_overrides_are_written_last_and_rounded() -> None:
    x = arrays(replace(WIDE, dtype="bfloat16", overrides=(("k", 3, 0.1), ("g", 0, -np.inf), ("h0", 2, 0.1))))
    assert x["k"].reshape(-1)[3] == round_to(0.1, "bfloat16") != 0.1
    assert x["g"].reshape(-1)[0] == -np.inf
    assert x["h0"].reshape(-1)[2] == np.float32(0.1)
    base = arrays(replace(WIDE, dtype="bfloat16"))
    assert sum(int((x[name] != base[name]).sum()) for name in x) == 3


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (
            {"dtype": "float16", "v_exponent": 20},
            r"^v reaches 3\.\d+e\+06, but float16 ends at 65504; lower v_exponent",
        ),
        ({"dtype": "float16", "do_exponent": 16, "value_regime": "zero"}, r"^do reaches .* lower do_exponent"),
        ({"dtype": "float16", "overrides": (("k", 0, 1e6),)}, r"^k reaches 1e\+06, but float16 ends at 65504"),
        (
            {"dtype": "float16", "g_dtype": "same", "gate_regime": "spike", "gate_magnitude": 1000.0, "overrides": ()},
            None,
        ),
    ],
)
def test_values_too_large_for_their_dtype_are_refused(knobs: dict, message: str | None) -> None:
    case = replace(WIDE, **knobs)
    if message is None:
        assert make_call(case).problem.g.min() == -30000
        return
    with pytest.raises(ValueError, match=message):
        make_call(case)


def test_expanded_layout_gets_equal_heads() -> None:
    x = arrays(replace(WIDE, layout="expanded"))
    for name in ("q", "k", "v", "g", "beta", "do"):
        assert (x[name] == x[name][:, :, :1]).all(), name
    assert not (arrays(WIDE)["k"] == arrays(WIDE)["k"][:, :, :1]).all()


# ------------------------------------------------------------------ gates and betas made inside the operator


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5])
@pytest.mark.parametrize("dt_bias", [False, True])
@pytest.mark.parametrize("regime", ["random", "mixed", "slow", "spike", "heads", "model"])
def test_raw_gate_gives_the_decay_of_its_regime(
    dtype: str, lower_bound: float | None, dt_bias: bool, regime: str
) -> None:
    """Up to the rounding of the raw gate: an error of u |x| in x is at most u |x| exp(A_log), relatively, in g."""
    raw = replace(
        WIDE, dtype=dtype, g_dtype="same", gate_regime=regime, gate_in_kernel=True, A_log=True, dt_bias=dt_bias,
        lower_bound=lower_bound,
    )  # fmt: skip
    want = make_call(replace(WIDE, gate_regime=regime, dtype="float32")).problem.g
    p = make_call(raw).problem
    got = activation.log_decay(p, p.g)
    assert got is not None
    assert want is not None
    u = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[dtype]
    multiplier = np.exp(p.A_log)[:, None] if lower_bound is not None else 1.0
    slack = u * np.abs(p.g) * multiplier + 1e-6
    reached = want if lower_bound is None else np.maximum(want, lower_bound)
    saturated = want <= (-np.inf if lower_bound is None else lower_bound)
    assert (got[saturated] == lower_bound).all()
    inside = (slack < 0.5) & ~saturated
    assert inside.sum() > 0.7 * (~saturated).sum()
    assert (np.abs(got - reached)[inside] <= (2 * slack * np.abs(reached))[inside]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_raw_gates_saturate_exactly(dtype: str, lower_bound: float | None) -> None:
    base = replace(
        WIDE, dtype=dtype, g_dtype="same", gate_in_kernel=True, A_log=True, dt_bias=True, lower_bound=lower_bound
    )
    zero = make_call(replace(base, gate_regime="zero")).problem
    assert (activation.log_decay(zero, zero.g) == 0).all()
    if lower_bound is not None:
        p = make_call(replace(base, gate_regime="bound", gate_magnitude=5.0)).problem
        assert (activation.log_decay(p, p.g) == -5).all()
    else:
        p = make_call(replace(base, gate_regime="reset")).problem
        assert (np.exp(activation.log_decay(p, p.g)) == 0).any()


@pytest.mark.parametrize("top", [1.0, 2.0])
def test_raw_beta_gives_its_regime_and_saturates(top: float) -> None:
    base = replace(WIDE, beta_sigmoid=True, allow_neg_eigval=top == 2.0, dtype="bfloat16", beta_dtype="same")
    for regime in regimes.BETAS:
        if regime == "up_to_two" and top == 1.0:
            continue
        p = make_call(replace(base, beta_regime=regime)).problem
        want = make_call(replace(WIDE, beta_regime=regime)).problem.beta
        got = activation.write_strength(p, p.beta)
        assert (np.abs(got - want) <= 2.0**-7 * np.abs(p.beta) * want + 1e-12).all()
        assert (got[want == 0] == 0).all()
        assert (got[want == top] == top).all()
    assert raw_beta(np.array([0.0, 2.0]), 2.0).tolist() == [-1000.0, 1000.0]
    assert raw_gate(np.zeros((1, 1, 1)), None, None, None).item() == -1000.0


def test_norm_inside_gets_lengths_to_divide_out() -> None:
    x = arrays(replace(WIDE, qk_l2norm=True))
    for name in ("q", "k"):
        n = np.sqrt((x[name] ** 2).sum(-1))
        assert n.min() >= 0.24
        assert n.max() <= 16.1
        assert n.max() / n.min() > 8
