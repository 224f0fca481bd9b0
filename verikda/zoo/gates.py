"""What an operator does to q, k, g and beta before the recurrence, with gradients.

Formulas (equations.md, "Gates"): q, k <- x / sqrt(sum x^2 + 1e-6);
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
    y: Array = x / np.sqrt(square + NORM_EPS)
    return y


def l2norm_gradient(x: Array, dy: Array, flags: Flags) -> Array:
    """Gradient of `l2norm` at x: (dy - y (y . dy)) / sqrt(sum x^2 + eps)."""
    square = np.sum(x * x, axis=-1, keepdims=True)
    norm = np.sqrt(square + NORM_EPS)
    y = x / norm
    dx: Array = (dy - y * np.sum(y * dy, axis=-1, keepdims=True)) / norm
    return dx


def log_gate(x: Array, A_log: Array | None, dt_bias: Array | None, flags: Flags) -> Array:
    """The log decay [B,T,HV,K] from the raw gate x; A_log [HV], dt_bias [HV,K]."""
    z, rate = _biased(x, A_log, dt_bias, flags)
    if flags.lower_bound is None:
        return -rate * np.logaddexp(np.float32(0), z)
    return np.float32(flags.lower_bound) * sigmoid(rate * z)


def log_gate_gradient(
    x: Array, A_log: Array | None, dt_bias: Array | None, dg: Array, flags: Flags
) -> tuple[Array, Array, Array]:
    """Gradients (dx, dA_log [HV], ddt_bias [HV,K]) of `log_gate`; rows past the last offset hold dg = 0."""
    z, rate = _biased(x, A_log, dt_bias, flags)
    if flags.lower_bound is None:
        g = -rate * np.logaddexp(np.float32(0), z)
        dx = -rate * sigmoid(z) * dg
        dlog = np.where(dg == 0, 0, dg * g)  # 0 * inf at a hard reset is 0
    else:
        s = sigmoid(rate * z)
        dz = np.float32(flags.lower_bound) * s * (1 - s) * dg
        dx = rate * dz
        dlog = np.where(dz == 0, 0, dz * rate * z)
    return dx, _sum_tokens(dlog).sum(axis=-1), _sum_tokens(dx)


def beta_gate(x: Array, flags: Flags) -> Array:
    """sigmoid(x), or 2 sigmoid(x) with allow_neg_eigval."""
    return sigmoid(x) * np.float32(2 if flags.allow_neg_eigval else 1)


def beta_gate_gradient(x: Array, dbeta: Array, flags: Flags) -> Array:
    """Gradient of `beta_gate`."""
    s = sigmoid(x)
    dx: Array = dbeta * s * (1 - s) * np.float32(2 if flags.allow_neg_eigval else 1)
    return dx


def _biased(x: Array, A_log: Array | None, dt_bias: Array | None, flags: Flags) -> tuple[Array, Array]:
    z = x if dt_bias is None else x + dt_bias
    rate: Array = np.ones((1, 1), np.float32) if A_log is None else np.exp(A_log)[:, None]
    return z, rate


def _sum_tokens(x: Array) -> Array:
    """[B,T,HV,K] summed to [HV,K], pairwise: a running sum would lose digits at long T."""
    rows: Any = np.ascontiguousarray(np.moveaxis(x, (2, 3), (0, 1)).reshape(x.shape[2], x.shape[3], -1))
    return np.asarray(rows.sum(axis=-1), np.float32)
