"""The token recurrence under a rounding contract (`chunk` None): the state is rounded at every token.

    S~_t = diag(exp g_t) S_{t-1}          r_t = v_t - S~_t^T k_t
    S_t  = S~_t + beta_t k_t r_t^T        o_t = S_t^T q_t               (q already scaled)

Reverse, with D_t the gradient of S_t, q_t do_t^T included:

    dq_t = S_t do_t                       dr_t = beta_t D_t^T k_t       dv_t = dr_t
    dbeta_t = r_t . D_t^T k_t             dk_t = beta_t D_t r_t - S~_t dr_t
    D~_t = D_t - k_t dr_t^T               dg_t = rowsum(D~_t * S~_t)    D_{t-1} = diag(exp g_t) D~_t

A token is a block of one row in the layout of `oracles.layout`, so arrays are [.., X, 1, D] and states [.., X, K, V].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from oracles.arithmetic import Arithmetic
from oracles.contract import Contract
from oracles.layout import Layout, flat_tokens, make_layout
from oracles.operations import Operations
from oracles.outputs import finish
from oracles.preactivation import Preactivation
from oracles.problem import Problem
from oracles.rounding import Floats

_STATE_BYTES = 1 << 28
"""States of all tokens held at once; above it heads are done one after the other."""


def emulate_tokens(
    problem: Problem,
    contract: Contract,
    arithmetic: Arithmetic,
    *,
    backward: bool = True,
    output_dtypes: Mapping[str, str] | None = None,
) -> dict[str, Floats]:
    """Outputs of the token recurrence in the given arithmetic; see `oracles.chunked.emulate`."""
    op = arithmetic.under(contract)
    layout = make_layout(problem, 1)
    H, K, V = problem.q.shape[2], problem.q.shape[3], problem.v.shape[3]
    HV = problem.v.shape[2]
    size = len(layout.tokens) * HV * K * V * (op.runs or 1) * np.dtype(op.real).itemsize
    if size > _STATE_BYTES and H > 1:
        parts = [
            emulate_tokens(_head(problem, h), contract, arithmetic, backward=backward, output_dtypes=output_dtypes)
            for h in range(H)
        ]
        axes = {"ht": -3, "dh0": -3, "dbeta": -1, "dA_log": -1}
        return {name: np.concatenate([p[name] for p in parts], axes.get(name, -2)) for name in parts[0]}
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        tokens, other = _run(problem, layout, op, backward)
        return finish(problem, layout, op, tokens, other, output_dtypes)


def _head(p: Problem, h: int) -> Problem:
    """One query/key head and its value heads."""
    group = p.v.shape[2] // p.q.shape[2]
    own, values = slice(h, h + 1), slice(h * group, (h + 1) * group)

    def cut(x: Floats | None) -> Floats | None:
        return None if x is None else x[..., values, :, :]

    return replace(
        p,
        q=p.q[:, :, own],
        k=p.k[:, :, own],
        v=p.v[:, :, values],
        g=None if p.g is None else p.g[:, :, values],
        beta=p.beta[:, :, values],
        h0=cut(p.h0),
        dht=cut(p.dht),
        A_log=None if p.A_log is None else p.A_log[values],
        dt_bias=None if p.dt_bias is None else p.dt_bias[values],
        do=None if p.do is None else p.do[:, :, values],
    )


def _run(
    problem: Problem, layout: Layout, op: Operations, backward: bool
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    heads, N, K, V = problem.v.shape[2], len(problem.spans), problem.q.shape[3], problem.v.shape[3]
    front = Preactivation(problem, layout, op)
    x = front.forward()
    q, k, v, beta = (layout.blocks(y, heads) for y in (x.q, x.k, x.v, x.beta))
    decay = None if x.g is None else np.swapaxes(op.exp(layout.blocks(x.g, heads)), -1, -2)
    kT = np.swapaxes(k, -1, -2)
    steps = layout.slices(heads)

    def initial(given: Floats | None) -> Floats:
        h = np.zeros((N, heads, K, V)) if given is None else given
        return op.state(h[layout.order].reshape(-1, K, V))

    state = initial(problem.h0)
    before, after, r = op.empty(v.shape[0], K, V), op.empty(v.shape[0], K, V), op.empty(*v.shape)
    for at, running in op.steps(steps):
        S = state[..., :running, :, :]
        if decay is not None:
            S = op.wide(decay[..., at, :, :] * S)
        before[..., at, :, :] = S
        r[..., at, :, :] = op.wide(v[at] - op.dot(k[..., at, :, :], S))
        u = op.wide(beta[..., at, :, :] * r[..., at, :, :])
        S = op.site("S", S + op.wide(kT[..., at, :, :] * u))
        after[..., at, :, :] = state[..., :running, :, :] = S
    tokens, other = {"o": layout.rows(op.dot(q, after), heads)}, {"ht": state}
    if not backward:
        return tokens, other

    dO = layout.blocks(
        op.array(flat_tokens(np.zeros_like(problem.v) if problem.do is None else problem.do, layout)), heads
    )
    qT = np.swapaxes(q, -1, -2)
    back = initial(problem.dht)
    D, D_, Dk = (op.empty(*s) for s in (after.shape[-3:], after.shape[-3:], v.shape))
    for at, running in op.steps(reversed(steps)):
        d = op.wide(back[..., :running, :, :] + op.wide(qT[..., at, :, :] * dO[at]))
        D[..., at, :, :] = d
        Dk[..., at, :, :] = op.dot(k[..., at, :, :], d)
        d = op.wide(d - op.wide(kT[..., at, :, :] * op.wide(beta[..., at, :, :] * Dk[..., at, :, :])))
        D_[..., at, :, :] = d
        back[..., :running, :, :] = d if decay is None else op.wide(decay[..., at, :, :] * d)
    dr = op.wide(beta * Dk)

    def by_key(a: Floats, b: Floats) -> Floats:
        """[.., X, 1, V] times the transpose of [.., X, K, V]."""
        return op.dot(a, np.swapaxes(b, -1, -2))

    dq, dk = by_key(dO, after), beta * by_key(r, D) - by_key(dr, before)
    dbeta = op.total(Dk * r, -1)
    dg = None if decay is None else np.swapaxes(op.total(D_ * before, -1), -1, -2)
    rows = {name: layout.rows(y, heads) for name, y in {"q": dq, "k": dk, "v": dr, "beta": dbeta}.items()}
    tokens["dv"] = rows["v"]
    given = front.reverse(
        rows["q"], op.wide(rows["k"]), rows["beta"], None if dg is None else layout.rows(dg, heads), x
    )
    tokens |= {name: y for name, y in given.items() if name not in ("dA_log", "ddt_bias")}
    other |= {name: y for name, y in given.items() if name in ("dA_log", "ddt_bias")}
    if problem.h0 is not None:
        other["dh0"] = back
    return tokens, other
