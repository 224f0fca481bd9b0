"""The float64 recurrence: relations that hold exactly, its domain, and what it refuses."""

from __future__ import annotations

import importlib.util
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oracles import recurrence
from oracles.problem import Problem
from oracles.recurrence import check_problem, forward, forward_reverse, growth, is_stable

STATES = ("h0", "dht")
ROWS = ("q", "k", "v", "g", "beta", "do")


def draw(
    seed: int = 0, B: int = 1, T: int = 12, H: int = 2, HV: int = 4, K: int = 5, V: int = 3, N: int = 0
) -> Problem:
    r = np.random.default_rng(seed)
    k = r.normal(size=(B, T, H, K))
    return Problem(
        q=r.normal(size=(B, T, H, K)),
        k=k / np.linalg.norm(k, axis=-1, keepdims=True),
        v=r.normal(size=(B, T, HV, V)),
        g=-r.exponential(size=(B, T, HV, K)),
        beta=r.uniform(size=(B, T, HV)),
        scale=K**-0.5,
        h0=r.normal(size=(N or B, HV, K, V)),
        do=r.normal(size=(B, T, HV, V)),
        dht=r.normal(size=(N or B, HV, K, V)),
    )


def fused(problem: Problem, seed: int = 1, bound: float | None = None) -> Problem:
    r = np.random.default_rng(seed)
    HV, K = problem.v.shape[2], problem.q.shape[3]
    return replace(
        problem,
        gate="softplus" if bound is None else "bounded",
        lower_bound=bound,
        A_log=r.normal(size=HV),
        dt_bias=r.normal(size=(HV, K)),
        qk_l2norm=True,
        beta_sigmoid=True,
        allow_neg_eigval=True,
    )


def rows(problem: Problem, first: int, last: int, n: int) -> Problem:
    """Tokens first..last and state n as a call of their own."""
    cut = {name: None if (x := getattr(problem, name)) is None else x[:, first:last].copy() for name in ROWS}
    states = {name: None if (x := getattr(problem, name)) is None else x[n : n + 1].copy() for name in STATES}
    return replace(problem, cu_seqlens=None, **cut, **states)


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


# relations


OFFSETS = np.array([0, 0, 7, 7, 8, 25, 25])


@pytest.mark.parametrize("kind", ["log", "softplus", "bounded", "none"])
def test_packed_is_separate(kind: str) -> None:
    """Bit for bit, with empty sequences, and with NaN in the rows that belong to nobody."""
    packed = replace(draw(T=30, N=6), cu_seqlens=OFFSETS)
    if kind == "none":
        packed = replace(packed, g=None, gate="none")
    elif kind != "log":
        packed = fused(packed, bound=-5.0 if kind == "bounded" else None)
    for name in ROWS:
        if getattr(packed, name) is not None:
            getattr(packed, name)[:, 25:] = np.nan
    whole = forward_reverse(packed)
    sums: dict[str, Any] = {"dA_log": 0.0, "ddt_bias": 0.0}
    for n, (_, first, last) in enumerate(packed.spans):
        for name, x in forward_reverse(rows(packed, first, last, n)).items():
            if name in sums:
                sums[name] = sums[name] + x
            elif name in ("ht", "dh0"):
                np.testing.assert_array_equal(whole[name][n], x[0], err_msg=name)
            else:
                np.testing.assert_array_equal(whole[name][:, first:last], x, err_msg=name)
                assert not whole[name][:, 25:].any()
    for name in sums.keys() & whole.keys():
        np.testing.assert_allclose(whole[name], sums[name], rtol=1e-13, atol=1e-13)


def test_empty_sequences_pass_states_through() -> None:
    problem = replace(draw(T=8, N=4), cu_seqlens=np.array([0, 0, 8, 8, 8]))
    found = forward_reverse(problem)
    for n in (0, 2, 3):
        np.testing.assert_array_equal(found["ht"][n], problem.h0[n])
        np.testing.assert_array_equal(found["dh0"][n], problem.dht[n])


@pytest.mark.parametrize("group", [1, 1 << 30], ids=["one lane at a time", "all lanes"])
@pytest.mark.parametrize("segment", [1, 700, 1 << 30], ids=["short", "middle", "whole"])
def test_checkpoints_change_nothing(group: int, segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(draw(T=30, N=6), cu_seqlens=OFFSETS)
    expected = forward_reverse(problem)
    monkeypatch.setattr(recurrence, "_GROUP_BYTES", group)
    monkeypatch.setattr(recurrence, "_SEGMENT_BYTES", segment)
    same(forward_reverse(problem), expected)


def test_forward_is_the_forward_of_both() -> None:
    problem = fused(draw())
    both = forward_reverse(problem)
    same(forward(problem), {name: both[name] for name in ("o", "ht")})


def test_groups_are_repeated_heads() -> None:
    grouped = fused(draw(H=2, HV=6))
    whole = forward_reverse(grouped)
    repeated = forward_reverse(replace(grouped, q=grouped.q.repeat(3, 2), k=grouped.k.repeat(3, 2)))
    for name in whole.keys() - {"dq", "dk"}:
        np.testing.assert_array_equal(whole[name], repeated[name], err_msg=name)
    for name in ("dq", "dk"):
        summed = repeated[name].reshape(1, 12, 2, 3, 5).sum(3)
        np.testing.assert_allclose(whole[name], summed, rtol=1e-13, atol=1e-14, err_msg=name)


def test_zero_gate_is_no_gate() -> None:
    gated, plain = replace(draw(), g=np.zeros((1, 12, 4, 5))), replace(draw(), g=None, gate="none")
    a, b = forward_reverse(gated), forward_reverse(plain)
    assert a.pop("dg").any()
    same(a, b)


def test_power_of_two_scales_exactly() -> None:
    problem = draw()
    a, b = forward_reverse(problem), forward_reverse(replace(problem, v=problem.v * 8, h0=problem.h0 * 8))
    for name, factor in (("o", 8), ("ht", 8), ("dv", 1), ("dh0", 1), ("dq", 8), ("dk", 8), ("dg", 8), ("dbeta", 8)):
        np.testing.assert_array_equal(a[name] * factor, b[name], err_msg=name)


def test_prefix_does_not_see_later_tokens() -> None:
    problem = draw()
    full = forward(problem)["o"][:, :7]
    np.testing.assert_array_equal(full, forward(rows(problem, 0, 7, 0))["o"])


def test_inputs_are_unchanged() -> None:
    problem = fused(replace(draw(T=30, N=6), cu_seqlens=OFFSETS))
    names = (*ROWS, *STATES, "A_log", "dt_bias", "cu_seqlens")
    before = {name: getattr(problem, name).copy() for name in names}
    forward_reverse(problem)
    same(before, {name: getattr(problem, name) for name in names})


def test_strided_inputs() -> None:
    problem = draw()
    wide = {name: np.repeat(getattr(problem, name), 2, axis=1)[:, ::2] for name in ROWS}
    same(forward_reverse(replace(problem, **wide)), forward_reverse(problem))


# hard resets and extreme gates


def test_hard_reset_forgets() -> None:
    """From a row of -inf on, everything is as from an empty state; the gradients before it do not see after it."""
    problem = draw()
    problem.g[:, 5] = -np.inf
    found = forward_reverse(problem)
    assert all(np.isfinite(x).all() for x in found.values())
    assert not found["dg"][:, 5].any()
    late = rows(problem, 5, 12, 0)
    late = replace(late, h0=None, g=np.concatenate([np.zeros((1, 1, 4, 5)), problem.g[:, 6:]], axis=1))
    after = forward_reverse(late)
    for name in ("o", "dq", "dk", "dv", "dbeta"):
        np.testing.assert_array_equal(found[name][:, 5:], after[name], err_msg=name)
    before = forward_reverse(replace(rows(problem, 0, 5, 0), dht=None))
    for name in ("o", "dq", "dk", "dv", "dbeta", "dg"):
        np.testing.assert_array_equal(found[name][:, :5], before[name], err_msg=name)
    np.testing.assert_array_equal(found["dh0"], before["dh0"])


@pytest.mark.parametrize("A_log", [-700.0, -3.0, 0.0, 50.0, 700.0])
@pytest.mark.parametrize("bound", [None, -5.0], ids=["softplus", "bounded"])
def test_extreme_raw_gates_are_finite(A_log: float, bound: float | None) -> None:
    problem = fused(draw(), bound=bound)
    raw = np.random.default_rng(2).choice([-1e300, -1e4, -800.0, 0.0, 800.0, 1e4, 1e300], size=problem.g.shape)
    found = forward_reverse(replace(problem, g=raw, A_log=np.full(4, A_log)))
    for name, x in found.items():
        assert np.isfinite(x).all(), name


# an independent derivative


def test_against_autograd() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: the float64 reverse is not compared with torch autograd here")
    import torch

    problem = fused(draw(B=2, T=9, H=2, HV=4))
    names = ("q", "k", "v", "g", "beta", "h0", "A_log", "dt_bias")
    x = {name: torch.tensor(getattr(problem, name), requires_grad=True) for name in names}
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (x["q"], x["k"]))
    q, k = q.repeat_interleave(2, 2), k.repeat_interleave(2, 2)
    g = -x["A_log"].exp()[:, None] * torch.nn.functional.softplus(x["g"] + x["dt_bias"])
    beta, S, o = 2 * x["beta"].sigmoid(), x["h0"], []
    for t in range(9):
        S = g[:, t].exp()[..., None] * S
        r = x["v"][:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], r)
        o.append(problem.scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    loss = (torch.stack(o, 1) * torch.tensor(problem.do)).sum() + (S * torch.tensor(problem.dht)).sum()
    found = forward_reverse(problem)
    for name, gradient in zip(names, torch.autograd.grad(loss, list(x.values())), strict=True):
        expected = gradient.numpy()
        assert np.abs(found["d" + name] - expected).max() < 1e-13 * np.abs(expected).max(), name


def test_memory_grows_slower_than_the_states() -> None:
    """1600 states of 32 x 32 are 12.5 MiB; kept in stretches of 0.25 MiB they need under a third of that."""
    problem = draw(T=1600, H=1, HV=1, K=32, V=32)
    size = 1600 * 32 * 32 * 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "_SEGMENT_BYTES", 1 << 18)
        tracemalloc.start()
        forward_reverse(problem)
        lean = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        patch.setattr(recurrence, "_SEGMENT_BYTES", 1 << 30)
        tracemalloc.start()
        forward_reverse(problem)
        greedy = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert lean < size / 3 + 16 * problem.q.nbytes
    assert greedy > size


# domain


def test_stable_problems() -> None:
    problem = draw()
    assert is_stable(problem)
    assert growth(problem) == 1.0
    assert is_stable(replace(problem, beta=np.zeros_like(problem.beta)))
    assert is_stable(fused(problem))
    problem.g[:, 3] = -np.inf
    assert is_stable(problem)
    assert growth(problem) == 1.0


@pytest.mark.parametrize(
    ("name", "value"), [("g", 1e-3), ("beta", 2.2), ("beta", -0.1), ("k", 1.5)], ids=["g>0", "beta>2", "beta<0", "k"]
)
def test_unstable_problems(name: str, value: float) -> None:
    problem = draw()
    getattr(problem, name)[0, 4, 1] = value
    assert not is_stable(problem)
    packed = replace(problem, cu_seqlens=np.array([0, 4]))
    assert is_stable(packed), "the row is outside every sequence"


@pytest.mark.parametrize("seed", range(4))
def test_growth_bounds_what_is_measured(seed: int) -> None:
    """Unit states put in before any token never come out larger than the bound; one step reaches it."""
    r = np.random.default_rng(seed)
    problem = draw(seed, H=1, HV=1, K=3)
    problem = replace(problem, g=r.uniform(-0.5, 0.4, size=problem.g.shape), beta=r.uniform(0, 4, size=(1, 12, 1)))
    bound, measured = growth(problem), 0.0
    for first in range(12):
        tail = replace(rows(problem, first, 12, 0), h0=np.eye(3)[None, None], v=np.zeros((1, 12 - first, 1, 3)))
        for last in range(1, 13 - first):
            S = forward(rows(replace(tail, do=None, dht=None), 0, last, 0))["ht"][0, 0]
            measured = max(measured, float(np.linalg.norm(S, 2)))
    assert 1.0 < measured <= bound * (1 + 1e-12)
    one = replace(tail, g=np.full((1, 1, 1, 3), 0.3), beta=np.full((1, 1, 1), 3.0), do=None, dht=None)
    reached = np.linalg.norm(forward(one)["ht"][0, 0], 2)
    np.testing.assert_allclose([growth(one), reached], 2 * np.exp(0.3), rtol=1e-12)


def test_growth_stays_inside_a_sequence() -> None:
    problem = draw(T=8, H=1, HV=1, N=2)
    problem.g[:] = 1.0
    np.testing.assert_allclose(growth(replace(problem, cu_seqlens=np.array([0, 5, 8]))), np.exp(5))


# refusals

BASE = draw()
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "k shape": ({"k": BASE.k[:, :5]}, "k has shape"),
    "v rank": ({"v": BASE.v[0]}, "both need 4"),
    "heads": ({"v": BASE.v[:, :, :3]}, "no multiple of the 2 heads"),
    "beta": ({"beta": BASE.beta[..., None]}, "beta has shape"),
    "g shape": ({"g": BASE.beta}, "g has shape"),
    "h0": ({"h0": np.zeros((1, 4, 3, 5))}, "h0 has shape"),
    "float32": ({"q": BASE.q.astype(np.float32)}, "float32"),
    "empty axis": ({"q": BASE.q[..., :0], "k": BASE.k[..., :0]}, "empty axis"),
    "offsets start": ({"cu_seqlens": np.array([1, 12])}, "start at 0"),
    "offsets fall": ({"cu_seqlens": np.array([0, 8, 4])}, "never decrease"),
    "offsets beyond": ({"cu_seqlens": np.array([0, 13])}, "end at or before T = 12"),
    "offsets type": ({"cu_seqlens": np.array([0.0, 12.0])}, "vector of at least 2 integers"),
    "offsets short": ({"cu_seqlens": np.array([0])}, "vector of at least 2 integers"),
    "states of a pack": ({"cu_seqlens": np.array([0, 3, 12])}, "h0 has shape"),
    "gate name": ({"gate": "safe"}, "gate is 'safe'"),
    "no g": ({"g": None}, "g is missing"),
    "g but no gate": ({"gate": "none"}, "g is given"),
    "no bound": ({"gate": "bounded"}, "lower_bound is None"),
    "bound too low": ({"gate": "bounded", "lower_bound": -5.1}, "lower_bound is -5.1"),
    "bound positive": ({"gate": "bounded", "lower_bound": 0.0}, "lower_bound is 0.0"),
    "bound unused": ({"lower_bound": -5.0}, "only the bounded gate"),
    "A_log unused": ({"A_log": np.zeros(4)}, "only a gate inside the operator"),
    "A_log shape": ({"gate": "softplus", "A_log": np.zeros(2)}, "A_log has shape"),
    "A_log large": ({"gate": "softplus", "A_log": np.full(4, 710.0)}, "A_log reaches 710"),
    "neg without sigmoid": ({"allow_neg_eigval": True}, "without beta_sigmoid"),
    "scale": ({"scale": float("nan")}, "scale is nan"),
    "g NaN": ({"g": np.full_like(BASE.v[..., :1].repeat(5, 3), np.nan)}, "g holds NaN"),
    "g +inf": ({"g": np.full_like(BASE.v[..., :1].repeat(5, 3), np.inf)}, "g holds NaN or \\+inf"),
    "raw g -inf": ({"gate": "softplus", "g": np.full((1, 12, 4, 5), -np.inf)}, "g holds a value that is not finite"),
    "q inf": ({"q": np.full_like(BASE.q, np.inf)}, "q holds"),
    "h0 NaN": ({"h0": np.full((1, 4, 5, 3), np.nan)}, "h0 holds"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refusals(what: str) -> None:
    changes, message = WRONG[what]
    problem = replace(BASE, **changes)
    for function in (check_problem, forward, forward_reverse, is_stable, growth):
        with pytest.raises(ValueError, match=message):
            function(problem)


def test_pack_needs_batch_one() -> None:
    with pytest.raises(ValueError, match="batch size 2"):
        check_problem(replace(draw(B=2), cu_seqlens=np.array([0, 3, 12])))
