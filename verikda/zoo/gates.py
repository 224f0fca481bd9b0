"""What an operator does to q, k, g and beta before the recurrence, with gradients.

Formulas (oracles/EQUATIONS.md): q, k <- x / sqrt(sum x^2 + 1e-6);
g = -exp(A_log) softplus(x + dt_bias)  or  g = lower_bound sigmoid(exp(A_log) (x + dt_bias));
beta <- sigmoid(x) or 2 sigmoid(x).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from verikda.zoo.faults import Fault

Array = npt.NDArray[Any]
"""float32 throughout the zoo; `Any` because NumPy's stubs widen most products."""

NORM_EPS = np.float32(1e-6)


@dataclass(frozen=True)
class Flags:
    """The switches of one call, by the names of the public signature."""

    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    lower_bound: float | None
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    safe_gate: bool
    fault: Fault


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) with an exponent that is never positive."""
    e = np.exp(-np.abs(x))
    y: Array = np.where(x >= 0, 1, e) / (1 + e)
    return y


def l2norm(x: Array, flags: Flags) -> Array:
    """Divide by sqrt(sum x^2 + eps) over the last axis."""
    square = np.sum(x * x, axis=-1, keepdims=True)
    if flags.fault is Fault.L2NORM_EPS_OUTSIDE:
        return np.asarray(x / (np.sqrt(square) + NORM_EPS), np.float32)
    y: Array = x / np.sqrt(square + NORM_EPS)
    return y


def l2norm_gradient(x: Array, dy: Array, flags: Flags) -> Array:
    """Gradient of `l2norm` at x: (dy - y (y . dy)) / sqrt(sum x^2 + eps)."""
    if flags.fault is Fault.L2NORM_GRADIENT_MISSING:
        return dy
    square = np.sum(x * x, axis=-1, keepdims=True)
    norm = np.sqrt(square if flags.fault is Fault.L2NORM_ZERO_ROW else square + NORM_EPS)
    y = x / norm
    dx: Array = (dy - y * np.sum(y * dy, axis=-1, keepdims=True)) / norm
    return dx


def log_gate(x: Array, A_log: Array | None, dt_bias: Array | None, flags: Flags) -> Array:
    """The log decay [B,T,HV,K] from the raw gate x; A_log [HV], dt_bias [HV,K]."""
    z, rate = _biased(x, A_log, dt_bias, flags)
    if flags.fault is Fault.BOUNDED_BY_CLAMP and flags.lower_bound is not None:
        return np.asarray(np.maximum(-rate * _softplus(z, flags), np.float32(flags.lower_bound)), np.float32)
    if flags.lower_bound is None or flags.fault is Fault.LOWER_BOUND_IGNORED:
        return -rate * _softplus(z, flags)
    return np.float32(flags.lower_bound) * sigmoid(rate * z)


def log_gate_gradient(
    x: Array, A_log: Array | None, dt_bias: Array | None, dg: Array, flags: Flags
) -> tuple[Array, Array, Array]:
    """Gradients (dx, dA_log [HV], ddt_bias [HV,K]) of `log_gate`."""
    z, rate = _biased(x, A_log, dt_bias, flags)
    if flags.lower_bound is None:
        dx = _times(dg, -rate * sigmoid(z))
        dlog = _times(dg, -rate * _softplus(z, flags))
    else:
        s = sigmoid(rate * z)
        dz = np.float32(flags.lower_bound) * s * (1 - s) * dg
        dx, dlog = _times(dz, rate), _times(dz, rate * z)
    if flags.fault is Fault.GATE_GRADIENT_MISSING:
        dx = dg
    if flags.fault is Fault.DA_LOG_FIRST_BLOCK:
        dlog = dlog[:, :64]
    bias = _sum_tokens(dx)
    if flags.fault is Fault.DDT_BIAS_HEADS_MIXED:
        bias = np.broadcast_to(bias.sum(axis=0), bias.shape)
    return dx, _sum_tokens(dlog).sum(axis=-1), bias


def beta_gate(x: Array, flags: Flags) -> Array:
    """sigmoid(x), or 2 sigmoid(x) with allow_neg_eigval."""
    twice = flags.fault is Fault.SIGMOID_TWICE or (flags.fault is Fault.SIGMOID_TWICE_IN_DECODE and x.shape[1] == 1)
    return _strength(flags) * sigmoid(sigmoid(x) if twice else x)


def beta_gate_gradient(x: Array, dbeta: Array, flags: Flags) -> Array:
    """Gradient of `beta_gate`."""
    s = sigmoid(x)
    dx: Array = dbeta * s * (1 - s) * _strength(flags)
    return dx


def _strength(flags: Flags) -> np.float32:
    return np.float32(2 if flags.allow_neg_eigval and flags.fault is not Fault.NEG_EIGVAL_IGNORED else 1)


def _softplus(x: Array, flags: Flags) -> Array:
    y: Array = np.logaddexp(np.float32(0), x)
    return np.where(x > 3, x, y) if flags.fault is Fault.SOFTPLUS_THRESHOLD else y


def _times(dy: Array, slope: Array) -> Array:
    """Return dy * slope, and 0 where dy is 0: at a closed gate dg is 0 and the slope may be infinite."""
    return np.where(dy == 0, 0, dy * np.where(dy == 0, 0, slope))


def _biased(x: Array, A_log: Array | None, dt_bias: Array | None, flags: Flags) -> tuple[Array, Array]:
    if dt_bias is not None and flags.fault is Fault.DT_BIAS_PER_HEAD:
        dt_bias = np.broadcast_to(dt_bias[:, :1], dt_bias.shape)
    z = x if dt_bias is None else x + dt_bias
    if A_log is None:
        return z, np.ones((1, 1), np.float32)
    return z, (A_log if flags.fault is Fault.A_LOG_NOT_EXP else np.exp(A_log))[:, None]


def _sum_tokens(x: Array) -> Array:
    """[B,T,HV,K] summed to [HV,K], pairwise: a running sum would lose digits at long T."""
    rows: Array = np.ascontiguousarray(np.moveaxis(x, (2, 3), (0, 1)).reshape(x.shape[2], x.shape[3], -1))
    return np.asarray(rows.sum(axis=-1), np.float32)
