"""The lines of oracles/EQUATIONS.md in mpmath, one sequence and value head, evaluated as they are printed.

`tokens` and `chunks` are the two forwards. Both call `hook(node, n, value)` on every named quantity of
token or chunk n, so that a quantity can be taken as an independent variable: `numeric` perturbs one and
differences the loss <do, o> + <dht, ht>. "K in Kg" is K as it enters Kg alone; "K" is K everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mpmath
import numpy as np

DIGITS = 50
STEP = mpmath.mpf(10) ** -30
"""Step of the central differences: error 1e-60, far below DIGITS, because they are taken at 100 digits."""

Hook = Callable[[str, int, Any], Any]


def untouched(node: str, n: int, value: Any) -> Any:
    return value


exp = np.frompyfunc(mpmath.exp, 1, 1)


def mp(x: Any) -> Any:
    return np.frompyfunc(lambda y: mpmath.mpf(float(y)), 1, 1)(x)


def lower(x: Any) -> Any:
    """M * x: 0 above the diagonal."""
    return np.array([[y if j <= i else mpmath.mpf(0) for j, y in enumerate(row)] for i, row in enumerate(x)])


def strict(x: Any) -> Any:
    """M1 * x: 0 on and above the diagonal."""
    return np.array([[y if j < i else mpmath.mpf(0) for j, y in enumerate(row)] for i, row in enumerate(x)])


def diag(x: Any) -> Any:
    return np.array([[y if i == j else mpmath.mpf(0) for j in range(len(x))] for i, y in enumerate(x)])


def eye(n: int) -> Any:
    return diag(mp(np.ones(n)))


def inputs(seed: int, T: int, K: int, V: int, **changes: Any) -> SimpleNamespace:
    r = np.random.default_rng(seed)
    x = SimpleNamespace(
        q=r.normal(size=(T, K)),
        k=r.normal(size=(T, K)) * 0.7,
        v=r.normal(size=(T, V)),
        g=-r.exponential(size=(T, K)),
        beta=r.uniform(size=T),
        scale=0.6,
        h0=r.normal(size=(K, V)),
        do=r.normal(size=(T, V)),
        dht=r.normal(size=(K, V)),
    )
    vars(x).update(changes)
    return SimpleNamespace(**{name: mp(value) for name, value in vars(x).items()})


def tokens(x: SimpleNamespace, hook: Hook = untouched) -> SimpleNamespace:
    """The token recurrence; every S~, r, S and o."""
    S, out = hook("h0", 0, x.h0), SimpleNamespace(Sd=[], r=[], S=[], o=[])
    for t in range(len(x.q)):
        q, k, v, g, beta = (hook(name, t, getattr(x, name)[t]) for name in ("q", "k", "v", "g", "beta"))
        Sd = hook("S~", t, diag(exp(g)) @ S)
        r = hook("r", t, v - Sd.T @ k)
        S = hook("S", t, Sd + beta * np.outer(k, r))
        for name, value in (("Sd", Sd), ("r", r), ("S", S), ("o", x.scale * (S.T @ q))):
            getattr(out, name).append(value)
    out.ht = S
    return out


def tokens_reverse(x: SimpleNamespace) -> list[SimpleNamespace]:
    """The reverse of the token recurrence, line by line; entry t holds the gradients of token t."""
    f, D, found = tokens(x), x.dht, []
    for t in reversed(range(len(x.q))):
        y = SimpleNamespace()
        y.D = D + x.scale * np.outer(x.q[t], x.do[t])
        y.dq = x.scale * (f.S[t] @ x.do[t])
        y.dbeta = x.k[t] @ y.D @ f.r[t]
        y.dr = x.beta[t] * (y.D.T @ x.k[t])
        y.dv = y.dr
        y.dk = x.beta[t] * (y.D @ f.r[t]) - f.Sd[t] @ y.dr
        y.Dd = y.D - np.outer(x.k[t], y.dr)
        y.dg = (y.Dd * f.Sd[t]).sum(1)
        D = y.before = diag(exp(x.g[t])) @ y.Dd
        found.append(y)
    return found[::-1]


def pairs(left: Any, right: Any, rows: Any, columns: Any) -> Any:
    """sum_d left_id right_jd exp(rows_id - columns_jd) for j <= i, 0 above: exp never sees those."""
    n, zero = len(left), mpmath.mpf(0)
    out = [[zero] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            out[i][j] = (left[i] * right[j] * exp(rows[i] - columns[j])).sum()
    return np.array(out)


def inverse(B: Any) -> Any:
    """(I + B)^-1 of a strictly lower B, by forward substitution."""
    A = eye(len(B))
    for i in range(len(B)):
        A[i] = A[i] - B[i, :i] @ A[:i] if i else A[i]
    return A


def chunks(x: SimpleNamespace, C: int, hook: Hook = untouched) -> list[SimpleNamespace]:
    """The chunked forward; entry n holds the quantities of chunk n, S at its start and Snext at its end."""
    S, found = hook("h0", 0, x.h0), []
    for n, a in enumerate(range(0, len(x.q), C)):
        y = SimpleNamespace(rows=slice(a, min(a + C, len(x.q))))

        def see(node: str, value: Any, n: int = n) -> Any:
            return hook(node, n, value)

        q, g, beta = see("q", x.q[y.rows]), see("g", x.g[y.rows]), see("beta", x.beta[y.rows])
        y.Q, y.K, y.V, y.beta = see("Q", x.scale * q), see("K", x.k[y.rows]), see("V", x.v[y.rows]), beta
        y.Gamma = see("Gamma", g.cumsum(0))
        y.gC = y.Gamma[-1]
        y.Aqk = lower(
            pairs(
                see("Q in Aqk", y.Q),
                see("K in Aqk", y.K),
                see("row Gamma in Aqk", y.Gamma),
                see("column Gamma in Aqk", y.Gamma),
            )
        )
        y.Aqk = see("Aqk", y.Aqk)
        y.L = strict(
            pairs(
                see("K row in L", y.K),
                see("K column in L", y.K),
                see("row Gamma in L", y.Gamma),
                see("column Gamma in L", y.Gamma),
            )
        )
        y.L = see("L", y.L)
        y.A = see("A", inverse(see("betaL", diag(see("beta in betaL", beta)) @ y.L)))
        y.betaV = see("betaV", diag(see("beta in betaV", beta)) @ y.V)
        y.betaK = diag(see("beta in betaK", beta)) @ (exp(see("Gamma in betaK", y.Gamma)) * see("K in betaK", y.K))
        y.betaK = see("betaK", y.betaK)
        y.U, y.W = see("U", y.A @ y.betaV), see("W", y.A @ y.betaK)
        y.Kg = see("Kg", exp(see("gC in Kg", y.gC) - see("Gamma in Kg", y.Gamma)) * see("K in Kg", y.K))
        y.Qg = see("Qg", exp(see("Gamma in Qg", y.Gamma)) * see("Q in Qg", y.Q))
        y.S = see("S", S)
        y.Vnew = see("Vnew", y.U - y.W @ y.S)
        y.O = y.Qg @ y.S + y.Aqk @ y.Vnew
        y.Snext = S = diag(exp(see("gC in S", y.gC))) @ y.S + y.Kg.T @ y.Vnew
        found.append(y)
    return found


def chunks_reverse(x: SimpleNamespace, C: int) -> list[SimpleNamespace]:
    """The chunked backward, line by line; entry n holds the gradients of chunk n."""
    dS, found = x.dht, []
    for f in reversed(chunks(x, C)):
        y, dO, e = SimpleNamespace(dS=dS), x.do[f.rows], exp(f.Gamma)
        y.dU = f.Aqk.T @ dO + f.Kg @ dS
        y.dAqk = lower(dO @ f.Vnew.T)
        y.dQg = dO @ f.S.T
        y.dKg = f.Vnew @ dS.T
        y.dW = -(y.dU @ f.S.T)
        y.dS_prev = diag(exp(f.gC)) @ dS + f.Qg.T @ dO - f.W.T @ y.dU
        y.dA = y.dU @ (diag(f.beta) @ f.V).T + y.dW @ (diag(f.beta) @ (e * f.K)).T
        y.AtdU = f.A.T @ y.dU
        y.dV = diag(f.beta) @ f.A.T @ y.dU
        y.P = f.A.T @ y.dW
        y.X = strict(-(f.A.T @ y.dA @ f.A.T))
        y.dbeta_V, y.dbeta_K = (y.AtdU * f.V).sum(1), (y.P * e * f.K).sum(1)
        y.dbeta_L = (y.X * f.L).sum(1)
        y.dbeta = y.dbeta_V + y.dbeta_K + y.dbeta_L
        y.dL = diag(f.beta) @ y.X
        decay = np.array([[exp(f.Gamma[i] - f.Gamma[j]) for j in range(len(e))] for i in range(len(e))])
        y.dQ_intra = (y.dAqk[:, :, None] * f.K[None] * decay).sum(1)
        y.left = (y.dL[:, :, None] * f.K[None] * decay).sum(1)
        y.right_Aqk = (y.dAqk[:, :, None] * f.Q[:, None] * decay).sum(0)
        y.right_L = (y.dL[:, :, None] * f.K[:, None] * decay).sum(0)
        y.right = y.right_Aqk + y.right_L
        y.dQ_state = e * y.dQg
        y.dQ = y.dQ_state + y.dQ_intra
        y.dq = x.scale * y.dQ
        y.dK_Kg, y.dK_W = exp(f.gC - f.Gamma) * y.dKg, f.beta[:, None] * e * y.P
        y.dK = y.dK_Kg + y.dK_W + y.left + y.right
        y.dGamma_Qg, y.dGamma_Kg, y.dGamma_W = y.dQg * f.Qg, -(y.dKg * f.Kg), y.P * f.beta[:, None] * e * f.K
        y.dGamma_Aqk_row, y.dGamma_L_row = y.dQ_intra * f.Q, y.left * f.K
        y.dGamma_Aqk_column, y.dGamma_L_column = -(y.right_Aqk * f.K), -(y.right_L * f.K)
        y.dGamma = y.dGamma_Qg + y.dGamma_Kg + y.dGamma_W + y.dQ_intra * f.Q + (y.left - y.right) * f.K
        y.dgC_S, y.dgC_Kg = (f.S * dS).sum(1) * exp(f.gC), (y.dKg * f.Kg).sum(0)
        y.dGamma[-1] += y.dgC_S + y.dgC_Kg
        y.dg = y.dGamma[::-1].cumsum(0)[::-1]
        dS = y.dS_prev
        found.append(y)
    return found[::-1]


def numeric(x: SimpleNamespace, node: str, n: int, shape: tuple[int, ...], C: int | None) -> Any:
    """Central differences of the loss in every element of one node, through the tokens (C None) or chunks."""
    with mpmath.workdps(2 * DIGITS):
        if n:  # what comes before token or chunk n does not depend on its nodes: start there
            first = n * (C or 1)
            rows = {name: getattr(x, name)[first:] for name in ("q", "k", "v", "g", "beta", "do")}
            S = tokens(x).S[n - 1] if C is None else chunks(x, C)[n].S
            x = SimpleNamespace(**vars(x) | rows | {"h0": S})

        def loss(index: tuple[int, ...], step: Any) -> Any:
            def hook(name: str, m: int, value: Any) -> Any:
                if (name, m) != (node, 0):
                    return value
                shifted = np.array(value, dtype=object)
                shifted[index] = shifted[index] + step
                return shifted[()]

            if C is None:
                f = tokens(x, hook)
                o, ht = np.array(f.o), f.ht
            else:
                parts = chunks(x, C, hook)
                o, ht = np.concatenate([y.O for y in parts]), parts[-1].Snext
            return (o * x.do).sum() + (ht * x.dht).sum()

        out = np.empty(shape, dtype=object)
        for index in np.ndindex(*shape):
            out[index] = (loss(index, STEP) - loss(index, -STEP)) / (2 * STEP)
        return out


def difference(found: Any, expected: Any) -> Any:
    """Largest difference over the largest expected magnitude."""
    found, expected = np.asarray(found, dtype=object), np.asarray(expected, dtype=object)
    assert found.shape == expected.shape, f"shapes {found.shape} and {expected.shape}"
    scale = max(abs(y) for y in expected.flat)
    assert scale > 1e-6, "the expected values are all nearly zero: the line is not tested"
    return max(abs(a - b) for a, b in zip(found.flat, expected.flat, strict=True)) / scale
