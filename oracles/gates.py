"""What happens to q, k, g and beta before the recurrence, and its reverse (float64).

softplus:  g = -exp(A_log) softplus(x + dt_bias)
bounded:   g = lower_bound sigmoid(exp(A_log) (x + dt_bias))
norm:      x / sqrt(sum x^2 + 1e-6)
beta:      sigmoid(x), or 2 sigmoid(x) with allow_neg_eigval
"""

from __future__ import annotations

import numpy as np

from oracles.problem import L2NORM_EPS, Array, Problem


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow, relatively exact on both sides."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def _times(dy: Array, slope: Array) -> Array:
    """Return dy * slope, and 0 where dy is 0: a hard reset has dg = 0 and an unbounded slope."""
    with np.errstate(invalid="ignore"):
        return np.where(dy == 0, 0.0, dy * slope)


def l2norm(x: Array) -> Array:
    """Return x / sqrt(sum x^2 + eps) over the last axis."""
    y: Array = x / np.sqrt((x * x).sum(-1, keepdims=True) + L2NORM_EPS)
    return y


def l2norm_reverse(x: Array, dy: Array) -> Array:
    """Gradient of x from that of y = l2norm(x): (dy - y (y . dy)) / n with n^2 = |x|^2 + eps.

    Written as (across + along eps / n^2) / n with dy split into the parts across and along x: where dy lies
    along x (always, with one channel) the first form leaves 1e-6 of dy and loses six digits. The
    second projection removes what rounding leaves of the first.
    """
    squared = (x * x).sum(-1, keepdims=True)
    across = dy
    for _ in range(2):
        inner = (x * across).sum(-1, keepdims=True)
        across = across - x * np.divide(inner, squared, out=np.zeros_like(inner), where=squared > 0)
    n2 = squared + L2NORM_EPS
    dx: Array = (across + (dy - across) * (L2NORM_EPS / n2)) / np.sqrt(n2)
    return dx


def write_strength(problem: Problem, x: Array) -> Array:
    """Beta as the recurrence uses it, from the caller's x."""
    if not problem.beta_sigmoid:
        return x
    return sigmoid(x) * (2.0 if problem.allow_neg_eigval else 1.0)


def write_strength_reverse(problem: Problem, x: Array, dbeta: Array) -> Array:
    """Gradient of the caller's x from that of beta."""
    if not problem.beta_sigmoid:
        return dbeta
    return dbeta * (sigmoid(x) * sigmoid(-x) * (2.0 if problem.allow_neg_eigval else 1.0))


def log_decay(problem: Problem, x: Array | None) -> Array | None:
    """Log decay g as the recurrence uses it, from the caller's x [B,T,HV,K]; None for the ungated rule."""
    if x is None or problem.gate == "log":
        return x
    with np.errstate(over="ignore"):
        z, e = _shifted(problem, x)
        if problem.gate == "softplus":
            return -(e * np.logaddexp(0.0, z))
        assert problem.lower_bound is not None
        return problem.lower_bound * sigmoid(e * z)


def log_decay_reverse(problem: Problem, x: Array, dg: Array) -> dict[str, Array]:
    """Gradients "dg" of the caller's x, and "dA_log" [HV], "ddt_bias" [HV,K] where those are given."""
    if problem.gate == "log":
        return {"dg": dg}
    with np.errstate(over="ignore"):
        z, e = _shifted(problem, x)
        if problem.gate == "softplus":
            dlog = _times(dg, -(e * np.logaddexp(0.0, z)))
            dx = _times(dg, -(e * sigmoid(z)))
        else:
            assert problem.lower_bound is not None
            y = e * z
            dy = dg * (problem.lower_bound * sigmoid(y) * sigmoid(-y))
            dlog = _times(dy, y)
            dx = dy * e
    gradients = {"dg": dx}
    if problem.A_log is not None:
        gradients["dA_log"] = dlog.sum((0, 1, 3))
    if problem.dt_bias is not None:
        gradients["ddt_bias"] = dx.sum((0, 1))
    return gradients


def _shifted(problem: Problem, x: Array) -> tuple[Array, Array]:
    """Return x + dt_bias, and exp(A_log) shaped to multiply it."""
    z = x if problem.dt_bias is None else x + problem.dt_bias
    e = np.ones((1, 1)) if problem.A_log is None else np.exp(problem.A_log)[:, None]
    return z, e
