"""Every line of oracles/EQUATIONS.md at 50 digits: three chunks of 4, 4 and 2 rows, K = 2, V = 3.

The table in that file and the lines here must be the same, so that no line is untested.
A forward line is compared with what the token recurrence does to unit inputs, a backward line with
central differences of the loss in the quantity it is the gradient of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equations_mp as eq
import mpmath
import numpy as np
import pytest

import oracles
from oracles import gates, multiprecision
from oracles.problem import Problem

LIMIT = mpmath.mpf(10) ** -40
T, C, K, V = 10, 4, 2, 3
Pairs = Iterator[tuple[Any, Any]]
LINES: dict[str, tuple[str, Callable[[], Pairs]]] = {}
"""Test id -> (line as it stands in EQUATIONS.md, what yields the pairs that must be equal)."""


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


# chunked forward: what the token recurrence does to the rows of one chunk with unit inputs


def run(n: int, **changes: Any) -> SimpleNamespace:
    """The token recurrence on the rows of chunk n."""
    rows = world().chunk[n].rows
    cut = {name: getattr(world().x, name)[rows] for name in ("q", "k", "v", "g", "beta", "do")}
    return eq.tokens(SimpleNamespace(**cut | {"scale": world().x.scale, "h0": world().chunk[n].S} | changes))


def unit(shape: tuple[int, ...], *index: int) -> Any:
    x = np.zeros(shape)
    x[index] = 1
    return eq.mp(x)


def write_at(n: int, j: int) -> SimpleNamespace:
    """Only row j writes, v_j = (1, 0, 0), from an empty state: S_j = k_j (1, 0, 0)."""
    rows = len(world().chunk[n].K)
    return run(n, beta=unit((rows,), j), v=unit((rows, V), j, 0), h0=eq.mp(np.zeros((K, V))))


def written(f: SimpleNamespace, n: int) -> Any:
    """beta_t r_t, the update of each row."""
    return world().chunk[n].beta[:, None] * np.array(f.r)


CHUNKS = range(3)


@line("chunk-Gamma", "Gamma = inclusive cumsum of g inside the chunk, gC = last row")
def _() -> Pairs:
    for n in CHUNKS:
        y = world().chunk[n]
        still = run(n, beta=0 * y.beta, h0=eq.mp(np.ones((K, V))))
        yield eq.exp(y.Gamma), np.array(still.S)[:, :, 0]
        yield eq.exp(y.gC), still.ht[:, 0]


@line("chunk-Aqk", "Aqk_ij = M_ij sum_d Q_id K_jd exp(Gamma_id - Gamma_jd)")
def _() -> Pairs:
    for n in CHUNKS:
        Aqk = world().chunk[n].Aqk
        yield Aqk, np.array([[o[0] for o in write_at(n, j).o] for j in range(len(Aqk))]).T


@line("chunk-L", "L_ij = M1_ij sum_d K_id K_jd exp(Gamma_id - Gamma_jd)")
def _() -> Pairs:
    for n in CHUNKS:
        L = world().chunk[n].L
        seen = np.array([[-r[0] for r in write_at(n, j).r] for j in range(len(L))]).T
        yield L, seen + eq.eye(len(L))  # row j itself has r_j = v_j


@line("chunk-A", "A = (I + diag(beta) L)^-1")
def _() -> Pairs:
    for n in CHUNKS:
        A, beta = world().chunk[n].A, world().chunk[n].beta
        zero = eq.mp(np.zeros((K, V)))
        columns = [written(run(n, v=unit((len(A), V), j, 0), h0=zero), n)[:, 0] / beta[j] for j in range(len(A))]
        yield A, np.array(columns).T


@line("chunk-U", "U = A diag(beta) V")
def _() -> Pairs:
    for n in CHUNKS:
        yield world().chunk[n].U, written(run(n, h0=eq.mp(np.zeros((K, V)))), n)


@line("chunk-W", "W = A diag(beta) (exp Gamma * K)")
def _() -> Pairs:
    for n in CHUNKS:
        W = world().chunk[n].W
        silent = eq.mp(np.zeros((len(W), V)))
        yield W, np.array([-written(run(n, v=silent, h0=unit((K, V), d, 0)), n)[:, 0] for d in range(K)]).T


@line("chunk-Kg", "Kg = exp(gC - Gamma) * K")
def _() -> Pairs:
    for n in CHUNKS:
        Kg = world().chunk[n].Kg
        yield Kg, np.array([write_at(n, j).ht[:, 0] for j in range(len(Kg))])


@line("chunk-Qg", "Qg = exp Gamma * Q")
def _() -> Pairs:
    for n in CHUNKS:
        y = world().chunk[n]
        still = [run(n, beta=0 * y.beta, h0=unit((K, V), d, 0)) for d in range(K)]
        yield y.Qg, np.array([[o[0] for o in f.o] for f in still]).T


@line("chunk-Vnew", "Vnew = U - W S")
def _() -> Pairs:
    for n in CHUNKS:
        yield world().chunk[n].Vnew, written(run(n), n)


@line("chunk-O", "O = Qg S + Aqk Vnew")
def _() -> Pairs:
    yield np.concatenate([y.O for y in world().chunk]), np.array(world().f.o)


@line("chunk-S", "S <- diag(exp gC) S + Kg^T Vnew")
def _() -> Pairs:
    for y in world().chunk:
        yield y.Snext, world().f.S[y.rows.stop - 1]


@line("exponents", "with g <= 0 every exponent that is needed (i >= j) is <= 0")
def _() -> Pairs:
    for y in world().chunk:
        n = len(y.Gamma)
        between = [y.Gamma[i] - y.Gamma[j] for i in range(n) for j in range(i + 1)]
        needed = np.concatenate([*between, y.Gamma.ravel(), (y.gC - y.Gamma).ravel()])
        yield 1 + np.maximum(needed, 0), np.ones(len(needed))


@line("anchor", "exp(Gamma_i - Gamma_r) exp(Gamma_r - Gamma_j): both exponents <= 0 exactly for r between j and i")
def _() -> Pairs:
    for y in world().chunk:
        G = y.Gamma
        for i in range(len(G)):
            for j in range(i + 1):
                for r in range(len(G)):
                    yield eq.exp(G[i] - G[r]) * eq.exp(G[r] - G[j]), eq.exp(G[i] - G[j])
                    assert ((G[i] - G[r] <= 0).all() and (G[r] - G[j] <= 0).all()) == (j <= r <= i)


# chunked backward: id -> (line, attribute of the backward, node that it is the gradient of, mask)

CHUNK_BACKWARD: dict[str, tuple[str, str, str, Callable[[Any], Any] | None]] = {
    "chunk-dU": ("dU = Aqk^T dO + Kg dS", "dU", "U", None),
    "chunk-dVnew": ("dU is also the gradient of Vnew", "dU", "Vnew", None),
    "chunk-dAqk": ("dAqk = (dO Vnew^T) * M", "dAqk", "Aqk", eq.lower),
    "chunk-dQg": ("dQg = dO S^T", "dQg", "Qg", None),
    "chunk-dKg": ("dKg = Vnew dS^T", "dKg", "Kg", None),
    "chunk-dW": ("dW = -dU S^T", "dW", "W", None),
    "chunk-dS": ("dS_prev = diag(exp gC) dS + Qg^T dO - W^T dU", "dS_prev", "S", None),
    "chunk-dA": ("dA = dU (diag(beta) V)^T + dW (diag(beta) exp Gamma * K)^T", "dA", "A", None),
    "chunk-dbetaV": ("A^T dU is the gradient of diag(beta) V", "AtdU", "betaV", None),
    "chunk-dV": ("dV = diag(beta) A^T dU", "dV", "V", None),
    "chunk-P": ("P = A^T dW is the gradient of diag(beta) exp Gamma * K", "P", "betaK", None),
    "chunk-X": ("X = -(A^T dA A^T) * M1 is the gradient of diag(beta) L", "X", "betaL", eq.strict),
    "chunk-dbeta-V": ("dbeta, part 1: rowsum(A^T dU * V)", "dbeta_V", "beta in betaV", None),
    "chunk-dbeta-K": ("dbeta, part 2: rowsum(P * exp Gamma * K)", "dbeta_K", "beta in betaK", None),
    "chunk-dbeta-L": ("dbeta, part 3: rowsum(X * L)", "dbeta_L", "beta in betaL", None),
    "chunk-dbeta": ("dbeta = part 1 + part 2 + part 3", "dbeta", "beta", None),
    "chunk-dL": ("dL = diag(beta) X", "dL", "L", eq.strict),
    "chunk-dQ-state": ("dQ, part 1: exp Gamma * dQg", "dQ_state", "Q in Qg", None),
    "chunk-dQ-intra": (
        "dQ, part 2: dQ_intra_i = sum_j dAqk_ij K_j exp(Gamma_i - Gamma_j)",
        "dQ_intra",
        "Q in Aqk",
        None,
    ),
    "chunk-dQ": ("dQ = exp Gamma * dQg + dQ_intra", "dQ", "Q", None),
    "chunk-dq": ("gradient of the caller's q: scale dQ", "dq", "q", None),
    "chunk-dK-Kg": ("dK, part 1: exp(gC - Gamma) * dKg", "dK_Kg", "K in Kg", None),
    "chunk-dK-W": ("dK, part 2: beta exp Gamma * P", "dK_W", "K in betaK", None),
    "chunk-left": ("left_i = sum_j dL_ij K_j exp(Gamma_i - Gamma_j)", "left", "K row in L", None),
    "chunk-right-Aqk": ("right_j, Aqk: sum_i dAqk_ij Q_i exp(Gamma_i - Gamma_j)", "right_Aqk", "K in Aqk", None),
    "chunk-right-L": ("right_j, L: sum_i dL_ij K_i exp(Gamma_i - Gamma_j)", "right_L", "K column in L", None),
    "chunk-dK": ("dK = exp(gC - Gamma) * dKg + beta exp Gamma * P + left + right", "dK", "K", None),
    "chunk-dGamma-Qg": ("dGamma, Qg: dQg * Qg", "dGamma_Qg", "Gamma in Qg", None),
    "chunk-dGamma-Kg": ("dGamma, Kg: -dKg * Kg", "dGamma_Kg", "Gamma in Kg", None),
    "chunk-dGamma-W": ("dGamma, W: P * beta exp Gamma * K", "dGamma_W", "Gamma in betaK", None),
    "chunk-dGamma-Aqk-row": ("dGamma, row of Aqk: dQ_intra * Q", "dGamma_Aqk_row", "row Gamma in Aqk", None),
    "chunk-dGamma-L-row": ("dGamma, row of L: left * K", "dGamma_L_row", "row Gamma in L", None),
    "chunk-dGamma-Aqk-col": ("dGamma, column of Aqk: -right * K", "dGamma_Aqk_column", "column Gamma in Aqk", None),
    "chunk-dGamma-L-col": ("dGamma, column of L: -right * K", "dGamma_L_column", "column Gamma in L", None),
    "chunk-dgC-S": ("dGamma[last], decay of the state: rowsum(S * dS) * exp gC", "dgC_S", "gC in S", None),
    "chunk-dgC-Kg": ("dGamma[last], Kg: sum_r (dKg * Kg)_r", "dgC_Kg", "gC in Kg", None),
    "chunk-dGamma": (
        "dGamma = dQg * Qg - dKg * Kg + P * beta exp Gamma * K + dQ_intra * Q + (left - right) * K,"
        " dGamma[last] += rowsum(S * dS) * exp gC + sum_r (dKg * Kg)_r",
        "dGamma",
        "Gamma",
        None,
    ),
    "chunk-dg": ("dg = reverse (suffix) cumsum of dGamma inside the chunk", "dg", "g", None),
}


def chunk_line(attribute: str, node: str, mask: Callable[[Any], Any] | None) -> Pairs:
    for n in CHUNKS:
        found = getattr(world().back[n], attribute)
        expected = eq.numeric(world().x, node, n, np.shape(found), C)
        yield found, expected if mask is None else mask(expected)


for _name, (_formula, *_what) in CHUNK_BACKWARD.items():
    LINES[_name] = _formula, lambda what=_what: chunk_line(*what)


@line("chunk-whole", "the chunked gradients are those of the token recurrence")
def _() -> Pairs:
    for chunked, token in (("dq", "dq"), ("dK", "dk"), ("dV", "dv"), ("dbeta", "dbeta"), ("dg", "dg")):
        parts, whole = [getattr(y, chunked) for y in world().back], [getattr(y, token) for y in world().r]
        yield np.concatenate(parts), np.array(whole)
    yield world().back[0].dS_prev, world().r[0].before


@line("diagonal", "the (i = i) terms of dQ_intra * Q and right * K cancel exactly in dGamma")
def _() -> Pairs:
    for y, f in zip(world().back, world().chunk, strict=True):
        own = np.diag(y.dAqk)[:, None]
        off_row, off_column = (y.dQ_intra - own * f.K) * f.Q, (y.right_Aqk - own * f.Q) * f.K
        yield 1 + off_row - off_column, 1 + y.dQ_intra * f.Q - y.right_Aqk * f.K


@pytest.mark.parametrize("name", LINES)
def test_line(name: str) -> None:
    with mpmath.workdps(eq.DIGITS):
        compared = 0
        for found, expected in LINES[name][1]():
            assert eq.difference(found, expected) < LIMIT, f"{name}: {LINES[name][0]}"
            compared += 1
        assert compared


def test_table_and_lines_are_the_same() -> None:
    text = (Path(oracles.__file__).parent / "EQUATIONS.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(.*)` \| `test_equations\.py::test_line\[(.*)\]` \|$", text, re.MULTILINE)
    assert [(formula, name) for name, (formula, _) in LINES.items()] == table


@pytest.mark.parametrize("name", ["token-dg", "chunk-dW", "chunk-dGamma", "chunk-dbeta-L"])
def test_a_wrong_line_is_seen(name: str) -> None:
    """One sign or one element off by 1e-12 is far above the limit."""
    with mpmath.workdps(eq.DIGITS):
        for found, expected in LINES[name][1]():
            wrong = np.array(found, dtype=object)
            wrong.flat[0] = wrong.flat[0] + mpmath.mpf(10) ** -12
            assert eq.difference(wrong, expected) > LIMIT
            assert eq.difference(-np.asarray(found), expected) > 1
            break
