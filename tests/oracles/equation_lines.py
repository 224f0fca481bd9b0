"""The lines of oracles/EQUATIONS.md about tokens, groups and gates; `test_equations` adds those about chunks.

`LINES` maps a test id to the line as it stands in the table and to what yields the pairs that must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import equations_mp as eq
import mpmath
import numpy as np

from oracles import gates, multiprecision
from oracles.problem import Problem

T, C, K, V = 10, 4, 2, 3
Pairs = Iterator[tuple[Any, Any]]
LINES: dict[str, tuple[str, Callable[[], Pairs]]] = {}


def line(name: str, formula: str) -> Callable[[Callable[[], Pairs]], Callable[[], Pairs]]:
    def register(check: Callable[[], Pairs]) -> Callable[[], Pairs]:
        assert name not in LINES
        LINES[name] = formula, check
        return check

    return register


@cache
def world() -> SimpleNamespace:
    x = eq.inputs(0, T, K, V)
    return SimpleNamespace(
        x=x, f=eq.tokens(x), r=eq.tokens_reverse(x), chunk=eq.chunks(x, C), back=eq.chunks_reverse(x, C)
    )


def as_problem(x: SimpleNamespace, last: int, **changes: Any) -> Problem:
    """Tokens before `last` as one call of the oracle."""

    def row(name: str) -> Any:
        return np.array(getattr(x, name)[:last], dtype=np.float64)[None, :, None]

    fields: dict[str, Any] = {name: row(name) for name in ("q", "k", "v", "g", "beta", "do")}
    fields |= {name: np.array(getattr(x, name), dtype=np.float64)[None, None] for name in ("h0", "dht")}
    return Problem(**(fields | {"scale": float(x.scale)} | changes))


# token recurrence: the printed lines against the mpmath oracle, with beta_t set to 0 or 1 to isolate a term


def oracle_state(t: int, beta: float | None = None) -> Any:
    p = as_problem(world().x, t + 1)
    if beta is not None:
        p.beta[0, t] = beta
    return multiprecision.forward(p)["ht"][0, 0]


@line("token-decay", "S~_t = diag(exp g_t) S_{t-1}")
def _() -> Pairs:
    for t in range(T):
        yield world().f.Sd[t], oracle_state(t, beta=0.0)


@line("token-residual", "r_t = v_t - S~_t^T k_t")
def _() -> Pairs:
    for t in range(T):
        yield np.outer(world().x.k[t], world().f.r[t]), oracle_state(t, beta=1.0) - oracle_state(t, beta=0.0)


@line("token-state", "S_t = S~_t + beta_t k_t r_t^T")
def _() -> Pairs:
    for t in range(T):
        yield world().f.S[t], oracle_state(t)


@line("token-output", "o_t = scale * S_t^T q_t")
def _() -> Pairs:
    yield np.array(world().f.o), multiprecision.forward(as_problem(world().x, T))["o"][0, :, 0]


# reverse of the token recurrence

TOKEN_REVERSE = {
    "token-D": ("D_t = (what comes from t + 1, or dht) + scale q_t do_t^T", "D", "S"),
    "token-dq": ("dq_t = scale * S_t do_t", "dq", "q"),
    "token-dbeta": ("dbeta_t = k_t^T D_t r_t", "dbeta", "beta"),
    "token-dr": ("dr_t = beta_t D_t^T k_t", "dr", "r"),
    "token-dv": ("dv_t = dr_t", "dv", "v"),
    "token-dk": ("dk_t = beta_t D_t r_t - S~_t dr_t", "dk", "k"),
    "token-D~": ("D~_t = D_t - k_t dr_t^T", "Dd", "S~"),
    "token-dg": ("dg_t = rowsum(D~_t * S~_t)", "dg", "g"),
}


def token_line(attribute: str, node: str) -> Pairs:
    for t in (0, 4, T - 1):
        found = getattr(world().r[t], attribute)
        yield found, eq.numeric(world().x, node, t, np.shape(found), None)


for _name, (_formula, *_what) in TOKEN_REVERSE.items():
    LINES[_name] = _formula, lambda what=_what: token_line(*what)


@line("token-D-before", "D_{t-1} = diag(exp g_t) D~_t")
def _() -> Pairs:
    for t in (1, 5, T - 1):
        do = world().x.do.copy()
        do[t - 1] = 0 * do[t - 1]  # leaves what reaches S_{t-1} through token t
        silent = SimpleNamespace(**vars(world().x) | {"do": do})
        yield world().r[t].before, eq.numeric(silent, "S", t - 1, (K, V), None)


@line("token-dh0", "dh0 = D_0")
def _() -> Pairs:
    yield world().r[0].before, eq.numeric(world().x, "h0", 0, (K, V), None)


# special cases and grouping


@line("deltanet", "DeltaNet: g = 0")
def _() -> Pairs:
    x = SimpleNamespace(**vars(world().x) | {"g": 0 * world().x.g})
    exact = multiprecision.forward_reverse(as_problem(x, T, g=None, gate="none"))
    yield np.array(eq.tokens(x).o), exact["o"][0, :, 0]
    yield np.array([y.dk for y in eq.tokens_reverse(x)]), exact["dk"][0, :, 0]


@line("scalar-gate", "scalar-gated: g equal over channels, S~_t = exp(g_t) S_{t-1}")
def _() -> Pairs:
    x = world().x
    S, g = x.h0, x.g[:, 0]
    for t in range(T):
        S = eq.exp(g[t]) * S
        S = S + x.beta[t] * np.outer(x.k[t], x.v[t] - S.T @ x.k[t])
    yield S, multiprecision.forward(as_problem(SimpleNamespace(**vars(x) | {"g": g[:, None] + 0 * x.g}), T))["ht"][0, 0]


@line("groups", "value head i uses query/key head i // (HV/H); dq and dk are summed over the group")
def _() -> Pairs:
    heads = [eq.inputs(seed, 5, K, V) for seed in range(4)]
    for i in (1, 3):
        heads[i].q, heads[i].k = heads[i - 1].q, heads[i - 1].k
    parts = [as_problem(x, 5) for x in heads]
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(p, name) for p in parts], axis=2) for name in ("v", "g", "beta", "do")
    }
    joined |= {name: np.concatenate([getattr(parts[i], name) for i in (0, 2)], axis=2) for name in ("q", "k")}
    joined |= {name: np.concatenate([getattr(p, name) for p in parts], axis=1) for name in ("h0", "dht")}
    exact = multiprecision.forward_reverse(Problem(scale=parts[0].scale, **joined))
    single = [eq.tokens_reverse(x) for x in heads]
    for name in ("dq", "dk"):
        each = [np.array([getattr(y, name) for y in r]) for r in single]
        yield np.stack([each[0] + each[1], each[2] + each[3]], axis=1), exact[name][0]
    yield np.stack([np.array(eq.tokens(x).o) for x in heads], axis=1), exact["o"][0]


# what happens before the recurrence: float64 code against the printed formula, to its own rounding

RAW = np.array([-30.0, -2.0, -0.3, 0.0, 0.4, 3.0, 30.0])


def gate(kind: Any, A_log: float | None, bound: float | None) -> Any:
    empty = np.zeros((1, 1, 1, len(RAW)))
    p = Problem(
        *(empty,) * 4,
        empty[..., 0],
        1.0,
        gate=kind,
        lower_bound=bound,
        A_log=None if A_log is None else np.array([A_log]),
        dt_bias=np.full((1, len(RAW)), 0.25),
    )
    return gates.log_decay(p, RAW[None, None, None])[0, 0, 0]


def rounded(formula: Callable[[Any], Any], x: Any = RAW) -> Any:
    return np.array([float(formula(mpmath.mpf(float(y)))) for y in x])


def nearly(found: Any, expected: Any) -> tuple[Any, Any]:
    """The expected values in place of those that are within 8 roundings of float64."""
    return np.where(abs(found - expected) <= 8 * 2.0**-53 * abs(expected), expected, found), expected


@line("gate-softplus", "softplus gate: g = -exp(A_log) * softplus(x + dt_bias)")
def _() -> Pairs:
    def formula(x: Any) -> Any:
        return -mpmath.exp(0.5) * mpmath.log(1 + mpmath.exp(x + mpmath.mpf(0.25)))

    yield nearly(gate("softplus", 0.5, None), rounded(formula))


@line("gate-bounded", "bounded gate: g = lower_bound * sigmoid(exp(A_log) * (x + dt_bias))")
def _() -> Pairs:
    def formula(x: Any) -> Any:
        return -4 / (1 + mpmath.exp(-mpmath.exp(0.5) * (x + mpmath.mpf(0.25))))

    found, expected = gate("bounded", 0.5, -4.0), rounded(formula)
    # sigmoid(y) turns the rounding of y into a relative error of up to |y| roundings
    found = np.where(abs(found - expected) <= 64 * 2.0**-53 * abs(expected), expected, found)
    yield found, expected


@line("gate-no-A_log", "A_log absent: multiplier 1")
def _() -> Pairs:
    yield gate("softplus", None, None), gate("softplus", 0.0, None)
    yield gate("bounded", None, -4.0), gate("bounded", 0.0, -4.0)


@line("norm", "q, k norm: x / sqrt(sum x^2 + 1e-6)")
def _() -> Pairs:
    for x in (RAW, 1e-4 * RAW, RAW[:1]):
        root = mpmath.sqrt(mpmath.fsum(mpmath.mpf(float(y)) ** 2 for y in x) + mpmath.mpf("1e-6"))
        yield nearly(gates.l2norm(x), rounded(lambda y, root=root: y / root, x))


@line("beta-sigmoid", "beta <- sigmoid(x), or 2 sigmoid(x) with allow_neg_eigval")
def _() -> Pairs:
    for double in (False, True):
        p = Problem(*(RAW,) * 5, 1.0, beta_sigmoid=True, allow_neg_eigval=double)
        yield (nearly(gates.write_strength(p, RAW), rounded(lambda x, m=1 + double: m / (1 + mpmath.exp(-x)))))
