"""Every line of oracles/EQUATIONS.md at 50 digits: three chunks of 4, 4 and 2 rows, K = 2, V = 3.

The table in that file and the lines here must be the same, so that no line is untested.
A forward line is compared with what the token recurrence does to unit inputs, a backward line with
central differences of the loss in the quantity it is the gradient of.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equations_mp as eq
import mpmath
import numpy as np
import pytest
from equation_lines import LINES, C, K, Pairs, V, line, world

import oracles

LIMIT = mpmath.mpf(10) ** -40

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
