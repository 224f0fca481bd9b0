"""The emulator: in float64 it is the recurrence; rounded to nearest it stays inside its own stochastic noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from oracles import chunked_backward, chunked_forward, gated
from oracles.arithmetic import Exact, Nearest, Stochastic
from oracles.chunked import emulate
from oracles.contract import (
    FORWARD_SITES,
    Contract,
    chunked32,
    operands16,
    operands_tf32,
    recurrent32,
    storage16,
)
from oracles.problem import Problem
from oracles.recurrence import forward, forward_reverse
from oracles.rounding import round_to

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "delta": {"gate": "none"},
    "grouped, K != V": {"B": 2, "T": 33, "H": 1, "HV": 3, "K": 5, "V": 7},
    "pack with empties": {"T": 43, "offsets": [0, 0, 5, 21, 21, 40], "H": 1, "HV": 2},
    "only empties": {"T": 3, "offsets": [0, 0, 0]},
    "one token": {"T": 1, "K": 1, "V": 1, "H": 1, "HV": 1},
    "softplus": {"gate": "softplus", "parameters": True, "norm": True, "sigmoid": True},
    "bounded": {"gate": "bounded", "parameters": True, "norm": True, "sigmoid": True, "negative": True},
    "bounded, bare": {"gate": "bounded"},
    "reset": {"reset": True},
    "strong": {"decay": 8.0},
    "no states": {"states": False},
}


def problem(
    seed: int = 0,
    B: int = 1,
    T: int = 70,
    H: int = 2,
    HV: int = 4,
    K: int = 8,
    V: int = 6,
    gate: str = "log",
    offsets: list[int] | None = None,
    norm: bool = False,
    sigmoid: bool = False,
    negative: bool = False,
    parameters: bool = False,
    reset: bool = False,
    decay: float = 1.0,
    states: bool = True,
    dtype: str | None = None,
) -> Problem:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape)
        return x if dtype is None else round_to(x, dtype)

    N = B if offsets is None else len(offsets) - 1
    k = normal(B, T, H, K)
    if not norm:
        k /= 1.02 * np.sqrt((k * k).sum(-1, keepdims=True))
        k = k if dtype is None else round_to(k, dtype)
    g = None if gate == "none" else normal(B, T, HV, K)
    if g is not None and gate == "log":
        g = -decay * np.abs(g)
        if reset:
            g[:, ::7, :, :3] = -np.inf
            g[:, 3::11] = -np.inf
    return Problem(
        q=normal(B, T, H, K),
        k=k,
        v=normal(B, T, HV, V),
        g=g,
        beta=normal(B, T, HV) if sigmoid else 1 / (1 + np.exp(-normal(B, T, HV))),
        scale=K**-0.5,
        h0=normal(N, HV, K, V) if states else None,
        cu_seqlens=None if offsets is None else np.array(offsets, np.int64),
        gate=gate,  # type: ignore[arg-type]
        lower_bound=-5.0 if gate == "bounded" else None,
        A_log=normal(HV) if parameters else None,
        dt_bias=normal(HV, K) if parameters else None,
        qk_l2norm=norm,
        beta_sigmoid=sigmoid,
        allow_neg_eigval=negative,
        do=normal(B, T, HV, V),
        dht=normal(N, HV, K, V) if states else None,
    )


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert set(a) == set(b)
    return max(float(np.abs(a[n] - b[n]).max(initial=0) / max(np.abs(b[n]).max(initial=0), 1e-300)) for n in b)


CONTRACTS = {
    "16": chunked32(16),
    "32": chunked32(32),
    "64": chunked32(64),
    "23": chunked32(23),
    "token": recurrent32(),
    "anchored": operands16("bfloat16", 32),
    "anchored tf32": operands_tf32("float16", 32),
    "neumann": replace(chunked32(16), inverse="neumann"),
}


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_is_the_recurrence(shape: str, contract: str) -> None:
    p = problem(**SHAPES[shape])
    got = emulate(p, CONTRACTS[contract], Exact()).outputs
    assert distance(got, forward_reverse(p)) < 1e-12
    assert distance(emulate(p, CONTRACTS[contract], Exact(), backward=False).outputs, forward(p)) < 1e-12


FAULTS = {
    "dW transposed sign": (chunked_backward, "T", lambda x: x),
    "masks off": (gated.np, "tri", lambda C, k=0, dtype=float: np.ones((C, C), dtype)),
    "inverse skipped": (chunked_forward, "inverse", lambda N, op: np.broadcast_to(np.eye(N.shape[-1]), N.shape) - N),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_algorithm_is_not_the_recurrence(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(K=6, V=6, T=16)  # K = V = 6, C = 16: a missing transpose still has a shape
    p = replace(p, q=p.q[:, :6], k=p.k[:, :6], v=p.v[:, :6], g=p.g[:, :6], beta=p.beta[:, :6], do=p.do[:, :6])  # type: ignore[index]
    truth = forward_reverse(p)
    module, name, wrong = FAULTS[fault]
    monkeypatch.setattr(module, name, wrong)
    with np.errstate(all="ignore"):
        got = emulate(p, chunked32(16), Exact()).outputs
    monkeypatch.undo()
    assert not distance(got, truth) < 1e-3


@pytest.mark.parametrize("storage", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", ["plain", "delta", "pack with empties", "softplus", "bounded", "reset", "strong"])
def test_nearest_is_inside_the_noise(shape: str, storage: str) -> None:
    """Root mean square over each output: near 0.7 for a twin, since stochastic rounding has twice the variance."""
    p = problem(**SHAPES[shape], dtype=storage)
    truth = forward_reverse(p)
    contracts = [chunked32(16), recurrent32()] if storage == "float32" else [storage16(storage, 32)]  # type: ignore[arg-type]
    for contract in contracts:
        wide = dict.fromkeys(truth, "float32")
        nearest = emulate(p, contract, Nearest(), output_dtypes=wide).outputs
        noise = emulate(p, contract, Stochastic(np.random.default_rng(0), 8)).outputs
        for name, t in truth.items():
            floor = ((noise[name] - t) ** 2).sum() / 8 + ((2.0**-24 * t) ** 2).sum()
            ratio = np.sqrt(((nearest[name] - t) ** 2).sum() / floor)
            few = t.size < 64
            assert (0.02 if few else 0.25) < ratio < (3.0 if few else 1.5), (contract.name, name, ratio)


@pytest.mark.parametrize("shape", ["plain", "delta", "softplus"])
def test_explicit_float32_noise_is_no_larger_than_that_of_16_bit_storage(shape: str) -> None:
    """Under 16-bit storage real float32 arithmetic stands in for accumulation noise: both give the same floor."""
    p = problem(**SHAPES[shape], dtype="bfloat16")
    truth = forward_reverse(p)
    rms = {}
    for noisy in (False, True):
        out = emulate(p, storage16("bfloat16", 16), Stochastic(np.random.default_rng(1), 8, noisy)).outputs
        rms[noisy] = {n: np.sqrt(((out[n] - t) ** 2).mean()) for n, t in truth.items() if t.size > 64}
    for name, value in rms[True].items():
        assert 0.75 < value / rms[False][name] < 1.35, name


@pytest.mark.parametrize("site", sorted(operands16("bfloat16", 16).sites))
def test_every_site_makes_noise(site: str) -> None:
    """A site named in the contract and never rounded would make the floor too low."""
    p = problem(norm=True, T=40, dtype="bfloat16")
    wide = emulate(p, Contract("none", 16, "bfloat16"), Nearest()).outputs
    one = emulate(p, Contract("one", 16, "bfloat16", frozenset({site})), Nearest()).outputs
    changed = {n for n in wide if not np.array_equal(wide[n], one[n])}
    assert changed
    if site not in (*FORWARD_SITES, "QK", "qn", "kn", "betaV", "betaK"):
        assert not changed & {"o", "ht"}, "a site of the backward must leave the forward alone"


def test_runs_differ_and_repeat_with_their_seed() -> None:
    p = problem(dtype="bfloat16")
    a, b, c = (
        emulate(p, storage16("bfloat16", 16), Stochastic(np.random.default_rng(s), 3)).outputs for s in (4, 4, 5)
    )
    for name, x in a.items():
        assert x.shape[0] == 3
        np.testing.assert_array_equal(x, b[name])
        assert not np.array_equal(x[0], x[1])
        assert not np.array_equal(x, c[name])


@pytest.mark.parametrize("arithmetic", [Exact(), Nearest(), Stochastic(np.random.default_rng(0), 2)])
def test_intermediates(arithmetic: Exact | Nearest | Stochastic) -> None:
    """Shapes, and each state before a chunk is the final state of the tokens before it."""
    p = problem(T=43, offsets=[0, 0, 5, 43], H=1, HV=2)
    contract = chunked32(16)
    trace = emulate(p, contract, arithmetic, intermediates=True)
    runs = (2,) if isinstance(arithmetic, Stochastic) else ()
    x = trace.intermediates
    told = "Gamma, Aqk, A, L, U, W, Qg, Kg, Vnew, S, dAqk, dU, dW, dA, dL, dQg, dKg, dS"  # by the docstring of Trace
    assert set(told.split(", ")) <= set(x)
    N, HV, chunks, C, K, V = 3, 2, 3, 16, 8, 6
    last = {
        "Gamma": (C, K),
        "Aqk": (C, C),
        "A": (C, C),
        "W": (C, K),
        "U": (C, V),
        "S": (K, V),
        "dS": (K, V),
        "dU": (C, V),
    }
    for name, shape in last.items():
        assert x[name].shape in ((*runs, N, HV, chunks, *shape), (N, HV, chunks, *shape))
    tolerance = 1e-12 if isinstance(arithmetic, Exact) else 1e-5
    for n, (_, a, b) in enumerate(p.spans):
        for c in range(-(-(b - a) // C)):
            assert p.g is not None
            assert p.h0 is not None
            part = Problem(
                *(y[:, a : a + c * C] for y in (p.q, p.k, p.v, p.g, p.beta)), scale=p.scale, h0=p.h0[n : n + 1]
            )
            expected = forward(part)["ht"][0]
            np.testing.assert_allclose(x["S"][..., n, :, c, :, :], np.broadcast_to(expected, (*runs, *expected.shape)),
                                       rtol=0, atol=tolerance * 5)  # fmt: skip
    assert not x["W"][..., 0, :, :, :, :].any(), "an empty sequence has no intermediates"
    if isinstance(arithmetic, Exact):
        beta = np.zeros((HV, C))
        beta[:, :5] = p.beta[0, :5].T
        eye = x["A"][1, :, 0] @ (np.eye(C) + beta[..., None] * x["L"][1, :, 0])
        np.testing.assert_allclose(eye, np.broadcast_to(np.eye(C), eye.shape), atol=1e-12)


def test_intermediates_need_chunks() -> None:
    with pytest.raises(ValueError, match="no chunks"):
        emulate(problem(T=3), recurrent32(), Exact(), intermediates=True)


def test_outputs_are_rounded_by_nearest_only() -> None:
    p = problem(dtype="bfloat16")
    out = emulate(p, storage16("bfloat16", 32), Nearest(), output_dtypes={"dg": "bfloat16"}).outputs
    for name in ("o", "dq", "dk", "dv", "dg"):
        np.testing.assert_array_equal(out[name], round_to(out[name], "bfloat16"))
    noise = emulate(p, storage16("bfloat16", 32), Stochastic(np.random.default_rng(0), 1)).outputs
    assert not np.array_equal(noise["o"], round_to(noise["o"], "bfloat16"))


def test_reset_gates_have_no_gradient_and_lose_nothing_after_them() -> None:
    """G = -inf stands at -104 in Gamma: decays of later tokens keep float32's precision, as in a separate sequence."""
    p = problem(T=32, H=1, HV=1, reset=True)
    assert p.g is not None
    for arithmetic in (Exact(), Nearest(), Stochastic(np.random.default_rng(0), 2)):
        out = emulate(p, chunked32(32), arithmetic).outputs
        assert all(np.isfinite(x).all() for x in out.values())
        assert not out["dg"][..., np.isneginf(p.g)].any() if out["dg"].ndim == 4 else True
    o = emulate(p, chunked32(32), Nearest()).outputs["o"]
    np.testing.assert_allclose(o, forward(p)["o"], atol=2e-4)


@pytest.mark.parametrize("contract", [storage16("float16", 64), chunked32(64), recurrent32()])
def test_padding_rows_do_not_matter(contract: Contract) -> None:
    """NaN after the last offset stays there."""
    p = problem(T=30, offsets=[0, 5, 21])
    dirty = replace(p, **{n: np.where(np.arange(30)[None, :, None, None] >= 21, np.nan, getattr(p, n)) for n in "qkvg"})
    a, b = (emulate(x, contract, Nearest()).outputs for x in (p, dirty))
    for name, x in a.items():
        np.testing.assert_array_equal(x, b[name])


@pytest.mark.parametrize("contract", [storage16("bfloat16", 64), storage16("bfloat16", 16), recurrent32()])
def test_sequences_do_not_meet(contract: Contract) -> None:
    """A pack gives each sequence what it gets alone."""
    p = problem(T=70, offsets=[0, 3, 3, 51, 70])
    whole = emulate(p, contract, Exact()).outputs
    for n, (_, a, b) in enumerate(p.spans):
        assert p.g is not None
        assert p.h0 is not None
        assert p.dht is not None
        assert p.do is not None
        rows = (y[:, a:b] for y in (p.q, p.k, p.v, p.g, p.beta))
        own = Problem(*rows, scale=p.scale, h0=p.h0[n : n + 1], dht=p.dht[n : n + 1], do=p.do[:, a:b])
        alone = emulate(own, contract, Exact()).outputs
        for name, x in alone.items():
            part = whole[name][n : n + 1] if name in ("ht", "dh0") else whole[name][:, a:b]
            np.testing.assert_allclose(part, x, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk": 0}, "chunk is 0"),
        ({"storage": "float64"}, "storage is 'float64'"),
        ({"wide": "bfloat16"}, "only float32"),
        ({"inverse": "lu"}, "inverse is 'lu'"),
        ({"operands": "float16"}, "operands is 'float16'; use tf32"),
        ({"sites": frozenset({"Aqk", "AQK"})}, "'AQK' is no site"),
        ({"chunk": None, "sites": frozenset({"S", "W"})}, "'W' is no site; use S, qn, kn"),
    ],
)
def test_a_contract_names_what_exists(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Contract(**({"name": "x", "chunk": 16, "storage": "bfloat16"} | fields))


def test_a_16_bit_state_costs_more_than_a_float32_one() -> None:
    p = problem(decay=0.01, T=100, dtype="bfloat16")
    truth = forward(p)["o"]
    narrow = Contract("state-bfloat16", None, "bfloat16", frozenset({"S"}))
    errors = [
        np.abs(emulate(p, c, Nearest(), output_dtypes={"o": "float32"}, backward=False).outputs["o"] - truth).max()
        for c in (narrow, recurrent32())
    ]
    assert errors[0] > 1000 * errors[1]


@pytest.mark.parametrize(("operands", "ulp"), [(None, 2.0**-8), ("tf32", 2.0**-11)])
def test_products_of_rounded_operands_round_as_products_do(operands: Literal["tf32"] | None, ulp: float) -> None:
    """Aqk is off by about a rounding of each operand, across and inside 16-row blocks, not on its diagonal."""
    p = problem(T=64, K=64, decay=0.3, dtype="bfloat16")
    contract = Contract("operands", 64, "bfloat16", frozenset({"QK"}), operands=operands)
    plain, rounded = (emulate(p, c, Nearest(), intermediates=True).intermediates for c in (chunked32(64), contract))
    size = np.sqrt((plain["Aqk"] ** 2).mean())
    error = np.abs(rounded["Aqk"] - plain["Aqk"])
    assert np.diagonal(error, axis1=-2, axis2=-1).max() < 1e-5 * size  # float32 sums in another order
    below = np.tril(np.ones((64, 64), bool), -1)
    inside = below & (np.arange(64)[:, None] // 16 == np.arange(64) // 16)
    for where in (below & ~inside, inside):
        relative = np.sqrt((error[..., where] ** 2).mean() / (plain["Aqk"][..., where] ** 2).mean())
        assert 0.15 * ulp < relative < ulp
