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


class _Group:
    """Arguments and results of one group of lanes, one row per (step, lane); q is scaled, u = beta k."""

    def __init__(
        self, starts: list[int], q: Array, k: Array, v: Array, decay: Array | None, beta: Array, do: Array | None
    ) -> None:
        self.starts, self.q, self.k, self.v, self.decay, self.beta, self.do = starts, q, k, v, decay, beta, do
        self.u = beta[:, None] * k
        self.r, self.o = np.empty_like(v), np.empty_like(v)
        if do is not None:
            self.dq, self.dk, self.dg = np.empty_like(k), np.empty_like(k), np.empty_like(k)
            self.dv, self.dbeta = np.empty_like(v), np.empty_like(beta)

    def advance(self, S: Array, first: int, last: int, results: bool = True, kept: Array | None = None) -> None:
        """Steps first..last of the recurrence, in place on S [lanes,K,V]: r; o and dq as results; S~ where kept."""
        base = self.starts[first]
        update = np.empty_like(S)
        for a, b in pairwise(self.starts[first : last + 1]):
            state, k, r = S[: b - a], self.k[a:b], self.r[a:b]
            if self.decay is not None:
                state *= self.decay[a:b, :, None]
            if kept is not None:
                kept[a - base : b - base] = state
            np.matmul(k[:, None, :], state, out=r[:, None, :])
            np.subtract(self.v[a:b], r, out=r)
            np.multiply(self.u[a:b, :, None], r[:, None, :], out=update[: b - a])
            state += update[: b - a]
            if results:
                np.matmul(self.q[a:b, None, :], state, out=self.o[a:b, None, :])
                if self.do is not None:
                    np.matmul(state, self.do[a:b, :, None], out=self.dq[a:b, :, None])

    def retreat(self, D: Array, first: int, last: int, kept: Array) -> None:
        """Steps last..first of the reverse, in place on D [lanes,K,V]; kept holds S~ and is used up."""
        assert self.do is not None
        base, end = self.starts[first], self.starts[last]
        update = np.empty_like(D)
        Dk, Sdr = np.empty_like(self.v[base:end]), np.empty_like(self.k[base:end])
        for t in range(last - 1, first - 1, -1):
            a, b = self.starts[t], self.starts[t + 1]
            d, outer = D[: b - a], update[: b - a]
            row, here = slice(a, b), slice(a - base, b - base)
            k, dr = self.k[row], self.dv[row]
            np.multiply(self.q[row, :, None], self.do[row, None, :], out=outer)
            d += outer
            np.matmul(k[:, None, :], d, out=Dk[here, None, :])
            np.matmul(d, self.r[row, :, None], out=self.dk[row, :, None])
            np.multiply(self.beta[row, None], Dk[here], out=dr)
            np.matmul(kept[here], dr[:, :, None], out=Sdr[here, :, None])
            np.multiply(k[:, :, None], dr[:, None, :], out=outer)
            d -= outer
            if self.decay is not None:
                kept[here] *= d
                d *= self.decay[row, :, None]
        self.dbeta[base:end] = (Dk * self.r[base:end]).sum(-1)
        self.dk[base:end] *= self.beta[base:end, None]
        self.dk[base:end] -= Sdr
        kept.sum(-1, out=self.dg[base:end])

    def both_ways(self, S: Array, D: Array) -> Array:
        """Advance S over all steps, in place, and bring D back to dh0, keeping the states of one segment at a time."""
        steps = len(self.starts) - 1
        length = max(1, _SEGMENT_BYTES // S.nbytes, math.isqrt(steps))
        checkpoints: list[tuple[int, int, Array]] = []
        kept = S[:0]
        for first in range(0, steps, length):
            last = min(first + length, steps)
            checkpoints.append((first, last, S[: self.starts[first + 1] - self.starts[first]].copy()))
            kept = np.empty((self.starts[last] - self.starts[first], *S.shape[1:]))
            self.advance(S, first, last, kept=kept if last == steps else None)
        while checkpoints:
            first, last, start = checkpoints.pop()
            if last < steps:
                kept = np.empty((self.starts[last] - self.starts[first], *S.shape[1:]))
                self.advance(start, first, last, results=False, kept=kept)
            self.retreat(D, first, last, kept)
        return D


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
    raw_q, raw_k, v, raw_beta = p.q[:, :end], p.k[:, :end], p.v[:, :end], p.beta[:, :end]
    raw_g = None if p.g is None else p.g[:, :end]
    do = None if not reverse else np.zeros_like(v) if p.do is None else p.do[:, :end]
    q, k = (gates.l2norm(raw_q), gates.l2norm(raw_k)) if p.qk_l2norm else (raw_q, raw_k)
    beta, g = gates.write_strength(p, raw_beta), gates.log_decay(p, raw_g)

    wide, tall, states = (B, end, HV, K), (B, end, HV, V), (len(p.spans), HV, K, V)
    h0 = np.zeros(states) if p.h0 is None else p.h0
    dht = np.zeros(states) if p.dht is None else p.dht
    o, ht, dh0 = np.zeros(tall), np.empty(states), np.empty(states)
    shapes = {"dq": wide, "dk": wide, "dg": wide, "dv": tall, "dbeta": (B, end, HV)} if reverse else {}
    row = {name: np.zeros(shape) for name, shape in shapes.items()}
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        decay = None if g is None else np.exp(g).reshape(-1, K)
        for lanes in _lane_groups(p.spans, end, H, HV, 8 * K * V):
            at, rows = (lanes.sequence, lanes.head), lanes.rows
            group = _Group(
                lanes.starts,
                q=q.reshape(-1, K)[lanes.shared] * p.scale,
                k=k.reshape(-1, K)[lanes.shared],
                v=v.reshape(-1, V)[rows],
                decay=None if decay is None else decay[rows],
                beta=beta.reshape(-1)[rows],
                do=None if do is None else do.reshape(-1, V)[rows],
            )
            S = h0[at]
            if reverse:
                dh0[at] = group.both_ways(S, dht[at])
            else:
                group.advance(S, 0, len(lanes.starts) - 1)
            o.reshape(-1, V)[rows], ht[at] = group.o, S
            for name, shape in shapes.items():
                row[name].reshape(-1, *shape[3:])[rows] = getattr(group, name)

        results: dict[str, Array] = {"o": o}
        if reverse:
            dq, dk = (x.reshape(B, end, H, HV // H, K).sum(3) for x in (row["dq"] * p.scale, row["dk"]))
            if p.qk_l2norm:
                dq, dk = gates.l2norm_reverse(raw_q, dq), gates.l2norm_reverse(raw_k, dk)
            dbeta = gates.write_strength_reverse(p, raw_beta, row["dbeta"])
            results |= {"dq": dq, "dk": dk, "dv": row["dv"], "dbeta": dbeta}
            if raw_g is not None:
                results |= gates.log_decay_reverse(p, raw_g, row["dg"])
    if end < T:
        for name in results.keys() - {"dA_log", "ddt_bias"}:
            full = np.zeros((B, T, *results[name].shape[2:]))
            full[:, :end] = results[name]
            results[name] = full
    results["ht"] = ht
    if reverse and p.h0 is not None:
        results["dh0"] = dh0
    return results


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
