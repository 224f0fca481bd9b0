"""The truth: the token recurrence and its hand-derived reverse in float64.

    S~_t = diag(exp g_t) S_{t-1}          r_t = v_t - S~_t^T k_t
    S_t  = S~_t + beta_t k_t r_t^T        o_t = scale * S_t^T q_t

Reverse, with D_t the gradient of S_t (D_T starts at dht), adding scale*q_t do_t^T first:

    dq_t = scale * S_t do_t
    dbeta_t = k_t^T D_t r_t               dr_t = beta_t D_t^T k_t          dv_t = dr_t
    dk_t = beta_t D_t r_t - S~_t dr_t     D~_t = D_t - k_t dr_t^T
    dg_t = rowsum(D~_t * S~_t)            D_{t-1} = diag(exp g_t) D~_t     (dh0 = D_0)

A *lane* is one sequence and one value head. Lanes are sorted by length, so that the lanes
still running at step t are the first ones; rows are gathered in the order (step, lane), so
that one step reads one slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from oracles import gates
from oracles.problem import Array, Problem
from oracles.validate import check_problem

__all__ = ["check_problem", "forward", "forward_reverse", "growth", "is_stable"]

_GROUP_BYTES = 1 << 20
"""States advanced together: about one second-level cache."""
_SEGMENT_BYTES = 1 << 25
"""States kept for one stretch of the reverse, if the square root of T does not ask for more."""

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Lanes:
    """Where the rows of a group of lanes lie.

    Attributes
    ----------
    sequence, head : [lanes], sequence number and value head.
    rows : [R] into arrays flattened to [B*T*HV, ...], ordered by (step, lane).
    shared : [R] into arrays flattened to [B*T*H, ...].
    starts : [steps + 1], step t owns rows starts[t] : starts[t + 1].
    """

    sequence: Index
    head: Index
    rows: Index
    shared: Index
    starts: list[int]


def _lane_groups(spans: list[tuple[int, int, int]], T: int, H: int, HV: int, state_bytes: int) -> Iterator[_Lanes]:
    span = np.array(spans, dtype=np.int64).reshape(-1, 3)
    lengths = np.repeat(span[:, 2] - span[:, 1], HV)
    order = np.argsort(-lengths, kind="stable")
    size = max(1, _GROUP_BYTES // state_bytes)
    for first in range(0, len(order), size):
        lanes = order[first : first + size]
        sequence, head = lanes // HV, lanes % HV
        length = lengths[lanes]
        running = np.searchsorted(-length, -np.arange(length[0]), side="left")
        starts = np.concatenate([[0], np.cumsum(running)])
        step = np.repeat(np.arange(length[0]), running)
        lane = np.arange(len(step)) - starts[step]
        token = (span[sequence, 0] * T + span[sequence, 1])[lane] + step
        rows = token * HV + head[lane]
        shared = token * H + head[lane] // (HV // H)
        yield _Lanes(sequence, head, rows, shared, starts.tolist())


@dataclass
class _Rows:
    """Arrays of one group, one row per (step, lane). q is scaled, u = beta k."""

    q: Array
    k: Array
    v: Array
    decay: Array | None
    beta: Array
    u: Array
    r: Array


def _advance(
    x: _Rows, starts: list[int], S: Array, o: Array | None, kept: tuple[Array, Array] | None, first: int, last: int
) -> None:
    """Steps first..last of the recurrence, in place on S [lanes,K,V]; fills r, o and the kept S~, S."""
    base = starts[first]
    update = np.empty_like(S)
    for a, b in pairwise(starts[first : last + 1]):
        n = b - a
        state, k, r = S[:n], x.k[a:b], x.r[a:b]
        if x.decay is not None:
            state *= x.decay[a:b, :, None]
        if kept is not None:
            kept[0][a - base : b - base] = state
        np.matmul(k[:, None, :], state, out=r[:, None, :])
        np.subtract(x.v[a:b], r, out=r)
        np.multiply(x.u[a:b, :, None], r[:, None, :], out=update[:n])
        state += update[:n]
        if kept is not None:
            kept[1][a - base : b - base] = state
        if o is not None:
            np.matmul(x.q[a:b, None, :], state, out=o[a:b, None, :])


@dataclass
class _RowGradients:
    """Gradients of one group, one row per (step, lane)."""

    dq: Array
    dk: Array
    dv: Array
    dbeta: Array
    dg: Array | None


def _retreat(
    x: _Rows,
    starts: list[int],
    do: Array,
    D: Array,
    kept: tuple[Array, Array],
    out: _RowGradients,
    first: int,
    last: int,
) -> None:
    """Steps last..first of the reverse, in place on D [lanes,K,V], with S~ and S of these steps."""
    base, end = starts[first], starts[last]
    before, after = kept
    update = np.empty_like(D)
    carried = np.empty_like(before) if x.decay is not None else None
    Dk = np.empty_like(x.r[base:end])
    for t in range(last - 1, first - 1, -1):
        a, b = starts[t], starts[t + 1]
        n = b - a
        d, k, dr = D[:n], x.k[a:b], out.dv[a:b]
        np.multiply(x.q[a:b, :, None], do[a:b, None, :], out=update[:n])
        d += update[:n]
        np.matmul(k[:, None, :], d, out=Dk[a - base : b - base, None, :])
        np.matmul(d, x.r[a:b, :, None], out=out.dk[a:b, :, None])
        np.multiply(x.beta[a:b, None], Dk[a - base : b - base], out=dr)
        np.multiply(k[:, :, None], dr[:, None, :], out=update[:n])
        d -= update[:n]
        if x.decay is not None and carried is not None:
            carried[a - base : b - base] = d
            d *= x.decay[a:b, :, None]
    here = slice(base, end)
    np.matmul(after, do[here, :, None], out=out.dq[here, :, None])
    out.dbeta[here] = (Dk * x.r[here]).sum(-1)
    out.dk[here] *= x.beta[here, None]
    out.dk[here] -= np.matmul(before, out.dv[here, :, None])[..., 0]
    if out.dg is not None and carried is not None:
        carried *= before  # D~ * S~
        carried.sum(-1, out=out.dg[here])


def forward(problem: Problem) -> dict[str, Array]:
    """Outputs of the token recurrence.

    Parameters
    ----------
    problem : a call with finite values; g = -inf is allowed with gate "log".

    Returns
    -------
    dict
        "o" [B,T,HV,V] and "ht" [N,HV,K,V], float64. Rows after the last offset are 0, an
        empty sequence passes its state through. Outside the stable domain values may overflow to inf or NaN.

    Raises
    ------
    ValueError
        When the problem has no meaning, see `check_problem`.
    """
    return _solve(problem, reverse=False)


def forward_reverse(problem: Problem) -> dict[str, Array]:
    """Outputs and gradients of the loss <do, o> + <dht, ht>.

    States are kept at checkpoints and recomputed between them, so memory grows with the square root of T.

    Parameters
    ----------
    problem : as for `forward`; a missing do or dht is 0.

    Returns
    -------
    dict
        "o", "ht", and the gradients of the caller's arguments: "dq", "dk", "dv", "dbeta"; "dg" if g is
        given; "dh0", "dA_log", "ddt_bias" if h0, A_log, dt_bias are. Float64, each of its argument's shape.

    Raises
    ------
    ValueError
        When the problem has no meaning, see `check_problem`.
    """
    return _solve(problem, reverse=True)


def _solve(problem: Problem, reverse: bool) -> dict[str, Array]:
    check_problem(problem)
    p = problem
    B, T, H, K = p.q.shape
    HV, V = p.v.shape[2:]
    end = T if p.cu_seqlens is None else int(p.cu_seqlens[-1])
    q, k, v, raw_beta = p.q[:, :end], p.k[:, :end], p.v[:, :end], p.beta[:, :end]
    raw_g = None if p.g is None else p.g[:, :end]
    do = np.zeros_like(v) if p.do is None else p.do[:, :end]
    qn, kn = (gates.l2norm(q), gates.l2norm(k)) if p.qk_l2norm else (q, k)
    beta = gates.write_strength(p, raw_beta)
    g = gates.log_decay(p, raw_g)
    N = len(p.spans)
    h0 = np.zeros((N, HV, K, V)) if p.h0 is None else p.h0

    o, ht = np.zeros((B, end, HV, V)), np.empty((N, HV, K, V))
    dq, dk, dv, dbeta = np.zeros((B, end, HV, K)), np.zeros((B, end, HV, K)), np.zeros_like(o), np.zeros((B, end, HV))
    dg, dh0 = None if g is None else np.zeros((B, end, HV, K)), np.empty_like(ht)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        decay = None if g is None else np.exp(g).reshape(-1, K)
        for lanes in _lane_groups(p.spans, end, H, HV, 8 * K * V):
            at, rows = (lanes.sequence, lanes.head), lanes.rows
            kr, br = kn.reshape(-1, K)[lanes.shared], beta.reshape(-1)[rows]
            x = _Rows(
                q=qn.reshape(-1, K)[lanes.shared] * p.scale,
                k=kr,
                v=v.reshape(-1, V)[rows],
                decay=None if decay is None else decay[rows],
                beta=br,
                u=br[:, None] * kr,
                r=np.empty((len(rows), V)),
            )
            S, out_o = h0[at], np.empty((len(rows), V))
            if not reverse:
                _advance(x, lanes.starts, S, out_o, None, 0, len(lanes.starts) - 1)
            else:
                out = _RowGradients(
                    dq=np.empty_like(kr),
                    dk=np.empty_like(kr),
                    dv=np.empty_like(x.v),
                    dbeta=np.empty_like(br),
                    dg=None if decay is None else np.empty_like(kr),
                )
                D = np.zeros_like(S) if p.dht is None else p.dht[at]
                _both_ways(x, lanes.starts, do.reshape(-1, V)[rows], S, D, out_o, out)
                dq.reshape(-1, K)[rows], dk.reshape(-1, K)[rows] = out.dq, out.dk
                dv.reshape(-1, V)[rows], dbeta.reshape(-1)[rows] = out.dv, out.dbeta
                if dg is not None:
                    dg.reshape(-1, K)[rows] = out.dg
                dh0[at] = D
            o.reshape(-1, V)[rows], ht[at] = out_o, S

        results = {"o": o}
        if reverse:
            dq, dk = (x.reshape(B, end, H, HV // H, K).sum(3) for x in (dq * p.scale, dk))
            if p.qk_l2norm:
                dq, dk = gates.l2norm_reverse(q, dq), gates.l2norm_reverse(k, dk)
            results |= {"dq": dq, "dk": dk, "dv": dv, "dbeta": gates.write_strength_reverse(p, raw_beta, dbeta)}
            if raw_g is not None and dg is not None:
                results |= gates.log_decay_reverse(p, raw_g, dg)
    if end < T:
        for name in set(results) - {"dA_log", "ddt_bias"}:
            full = np.zeros((B, T, *results[name].shape[2:]))
            full[:, :end] = results[name]
            results[name] = full
    results["ht"] = ht
    if reverse and p.h0 is not None:
        results["dh0"] = dh0
    return results


def _both_ways(x: _Rows, starts: list[int], do: Array, S: Array, D: Array, o: Array, out: _RowGradients) -> None:
    """Advance S over all steps and bring D back, keeping the states of one segment at a time."""
    steps = len(starts) - 1
    length = max(1, _SEGMENT_BYTES // S.nbytes, math.isqrt(steps))
    cuts = [*range(0, steps, length), steps]
    segments = list(pairwise(cuts))
    checkpoints = []
    kept: tuple[Array, Array] | None = None
    for first, last in segments:
        checkpoints.append(S[: starts[first + 1] - starts[first]].copy())
        if last == steps:
            kept = _room(S, starts[last] - starts[first])
        _advance(x, starts, S, o, kept, first, last)
    for first, last in reversed(segments):
        start = checkpoints.pop()
        if kept is None:
            kept = _room(S, starts[last] - starts[first])
            _advance(x, starts, start, None, kept, first, last)
        _retreat(x, starts, do, D, kept, out, first, last)
        kept = None


def _room(S: Array, rows: int) -> tuple[Array, Array]:
    return np.empty((rows, *S.shape[1:])), np.empty((rows, *S.shape[1:]))


def _step_terms(problem: Problem) -> tuple[Array, Array | None]:
    """Terms of each step's map (I - beta k k^T) diag(exp g): beta |k|^2 [B,T,HV] and g [B,T,HV,K], without the tail."""
    check_problem(problem)
    p = problem
    end = p.q.shape[1] if p.cu_seqlens is None else int(p.cu_seqlens[-1])
    k = gates.l2norm(p.k[:, :end]) if p.qk_l2norm else p.k[:, :end]
    squared = np.repeat((k * k).sum(-1), p.v.shape[2] // p.k.shape[2], axis=2)
    return gates.write_strength(p, p.beta[:, :end]) * squared, gates.log_decay(p, None if p.g is None else p.g[:, :end])


def is_stable(problem: Problem) -> bool:
    """Whether no step can enlarge the state: g <= 0 after activation and 0 <= beta |k|^2 <= 2, in every row.

    Rows after the last offset do not count.
    """
    strength, g = _step_terms(problem)
    if g is not None and bool((g > 0).any()):
        return False
    return bool(((strength >= 0) & (strength <= 2)).all())


def growth(problem: Problem) -> float:
    """Upper bound on how much a unit change of the state, or of one write, can grow, in either direction of time.

    The state obeys S_t = M_t S_{t-1} + beta_t k_t v_t^T with M_t = (I - beta_t k_t k_t^T) diag(exp g_t), and its
    gradient goes back through M_t^T. With |M_t| <= m_t = max(1, |1 - beta_t |k_t|^2|) exp(max_d g_td), the
    bound is the largest product of consecutive m_t over all sequences, heads and stretches, at least 1.

    Returns
    -------
    float
        1 for a stable problem; inf where the bound is no float64.
    """
    strength, g = _step_terms(problem)
    # I - beta k k^T has eigenvalues 1 (K - 1 times) and 1 - beta |k|^2
    norms = np.abs(1.0 - strength) if problem.q.shape[3] == 1 else np.maximum(1.0, np.abs(1.0 - strength))
    with np.errstate(divide="ignore", over="ignore"):
        logs = np.log(norms) if g is None else np.log(norms) + g.max(-1)
        worst = 0.0
        for b, first, last in problem.spans:
            run = np.zeros(logs.shape[2])
            for t in range(first, last):
                run = np.maximum(run + logs[b, t], 0.0)
                worst = max(worst, float(run.max()))
        return float(np.exp(worst))
