"""What the operator does to q, k, g and beta before the recurrence, and its reverse, in the emulator's arithmetic.

    l2norm    y = x rstd, rstd = 1 / sqrt(sum x^2 + eps);      dx = rstd (dy - y (y . dy))
    softplus  g = -exp(A_log) softplus(x + dt_bias);           dx = -dg exp(A_log) sigmoid(x + dt_bias)
    bounded   g = lower_bound sigmoid(m (x + dt_bias));        dx = dg lower_bound s (1 - s) m,  m = exp(A_log)
    beta      sigmoid(x), or 2 sigmoid(x) with allow_neg_eigval

Arrays are [.., n, h, D] over the n tokens that belong to a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oracles.layout import Layout, flat_tokens
from oracles.operations import Operations
from oracles.problem import L2NORM_EPS, Problem
from oracles.rounding import Floats

RESET_BELOW = -2048.0
"""Gates below it are resets, -inf included: after a gate of -2048 the float32 Gamma has a spacing of 2^-12, so that not
even float16's accuracy is left for the decays of later tokens. Above it Gamma is the plain cumulative sum."""

RESET = -104.0
"""What stands for a reset in Gamma: exp(-104) is under half the smallest subnormal of float32, so it rounds to 0. It
keeps differences of Gamma defined, and Gamma small enough to carry later decays. The gradient of a reset is 0."""


@dataclass
class Activated:
    """Arguments as the recurrence takes them.

    Attributes
    ----------
    q, k : [.., n, H, K], q already scaled.
    v : [n, HV, V].
    g : [.., n, HV, K] or None.    reset : where g was below RESET_BELOW, or None if nowhere.
    beta : [.., n, HV, 1].
    """

    q: Floats
    k: Floats
    v: Floats
    g: Floats | None
    reset: Floats | None
    beta: Floats


class Preactivation:
    """Forward and reverse of everything in front of the recurrence."""

    def __init__(self, problem: Problem, layout: Layout, op: Operations) -> None:
        self.problem, self.layout, self.op = problem, layout, op
        self.scale = op.real(problem.scale)

    def forward(self) -> Activated:
        """Apply norms, gate and sigmoid."""
        p, op = self.problem, self.op
        q, k, v, beta = (op.array(flat_tokens(x, self.layout)) for x in (p.q, p.k, p.v, p.beta))
        if p.qk_l2norm:
            self.q, self.k, self.rq, self.rk = q, k, self._rstd(q), self._rstd(k)
            self.qn, self.kn = op.site("qn", q * self.rq), op.site("kn", k * self.rk)
            q, k = self.qn, self.kn
        if p.beta_sigmoid:
            self.s_beta = self._sigmoid(beta)
            beta = self.s_beta * op.real(2.0 if p.allow_neg_eigval else 1.0)
        g, reset = None, None
        if p.g is not None:
            g = self._gate(op.array(flat_tokens(p.g, self.layout)))
            below = g < RESET_BELOW
            if below.any():
                g, reset = np.where(below, op.real(RESET), g), below
        return Activated(op.wide(q * self.scale) if p.scale != 1.0 else q, k, v, g, reset, beta)

    def reverse(self, dq: Floats, dk: Floats, dbeta: Floats, dg: Floats | None, x: Activated) -> dict[str, Floats]:
        """Gradients of the caller's arguments, from those of `Activated` per value head.

        Parameters
        ----------
        dq, dk, dg : [.., n, HV, K], dq that of the scaled q; dbeta : [.., n, HV, 1].

        Returns
        -------
        dict
            dq, dk [.., n, H, K], dbeta, dg, and dA_log [.., HV, 1], ddt_bias [.., HV, K] where they apply.
        """
        p, op = self.problem, self.op
        dq, dk = self._grouped(dq) * self.scale, self._grouped(dk)
        if p.qk_l2norm:
            dq = self._norm_reverse(dq, op.either(self.qn, self.q * self.rq), self.rq)
            dk = self._norm_reverse(dk, op.either(self.kn, self.k * self.rk), self.rk)
        if p.beta_sigmoid:
            slope = self.s_beta * (1 - self.s_beta) * op.real(2.0 if p.allow_neg_eigval else 1.0)
            dbeta = dbeta * slope
        out = {"dq": dq, "dk": dk, "dbeta": dbeta}
        if dg is not None and p.g is not None:
            if x.reset is not None:
                dg = np.where(x.reset, op.real(0), dg)
            out |= self._gate_reverse(dg)
        return out

    def _rstd(self, x: Floats) -> Floats:
        op = self.op
        return op.function(1 / np.sqrt(op.total(x * x, -1) + op.real(L2NORM_EPS)))

    def _norm_reverse(self, dy: Floats, y: Floats, rstd: Floats) -> Floats:
        dx: Floats = self.op.wide(dy - self.op.wide(y * self.op.total(y * dy, -1))) * rstd
        return dx

    def _grouped(self, x: Floats) -> Floats:
        """Sum over the value heads of each query/key head."""
        H, HV = self.problem.q.shape[2], self.problem.v.shape[2]
        if H == HV:
            return x
        parts = x.reshape(*x.shape[:-2], H, HV // H, x.shape[-1])
        total = parts[..., 0, :]
        for i in range(1, HV // H):
            total = self.op.wide(total + parts[..., i, :])
        return total

    def _sigmoid(self, x: Floats) -> Floats:
        e = self.op.exp(-np.abs(x))
        return self.op.function(np.where(x >= 0, self.op.real(1), e) / self.op.wide(1 + e))

    def _gate(self, x: Floats) -> Floats:
        p, op = self.problem, self.op
        if p.gate == "log":
            return x
        self.z = op.wide(x + op.array(p.dt_bias)) if p.dt_bias is not None else x
        self.m = op.array(np.ones((1, 1, 1))) if p.A_log is None else op.exp(op.array(p.A_log[None, :, None]))
        if p.gate == "softplus":
            self.s = self._sigmoid(self.z)
            self.g = op.wide(-self.m * op.softplus(self.z))
        else:
            assert p.lower_bound is not None
            self.y = op.wide(self.m * self.z)
            self.s = self._sigmoid(self.y)
            self.g = op.wide(op.real(p.lower_bound) * self.s)
        return self.g

    def _gate_reverse(self, dg: Floats) -> dict[str, Floats]:
        p, op = self.problem, self.op
        if p.gate == "log":
            return {"dg": dg}
        zero = dg == 0  # a hard reset has dg = 0 and may have an unbounded slope
        with np.errstate(invalid="ignore", over="ignore"):
            if p.gate == "softplus":
                dlog, dx = dg * self.g, op.wide(dg * (-self.m * self.s))
            else:
                assert p.lower_bound is not None
                dy = op.wide(dg * (op.real(p.lower_bound) * self.s * (1 - self.s)))
                dlog, dx = dy * self.y, op.wide(dy * self.m)
        dlog, dx = np.where(zero, op.real(0), dlog), np.where(zero, op.real(0), dx)
        out = {"dg": dx}
        if p.A_log is not None:
            out["dA_log"] = op.total(op.total(dlog, -1), -3)[..., 0, :, :]
        if p.dt_bias is not None:
            out["ddt_bias"] = op.total(dx, -3)[..., 0, :, :]
        return out
