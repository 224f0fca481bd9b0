"""Which problems the references accept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from oracles.problem import Array, Problem

MAX_A_LOG = 700.0
"""exp(A_log) must be a float64; exp(709.8) is the last one."""


def check_problem(problem: Problem) -> None:
    """Refuse a problem whose shapes, offsets, flags or values have no meaning.

    Values in rows after the last offset belong to no sequence and are not looked at.

    Raises
    ------
    ValueError
        One sentence with what was seen and what is allowed.
    """
    p = problem
    B, T, H, HV, K, V, N = _check_sizes(p)
    _shape("k", p.k, (B, T, H, K))
    _shape("v", p.v, (B, T, HV, V))
    _shape("beta", p.beta, (B, T, HV))
    for name, array, shape in (
        ("g", p.g, (B, T, HV, K)),
        ("h0", p.h0, (N, HV, K, V)),
        ("A_log", p.A_log, (HV,)),
        ("dt_bias", p.dt_bias, (HV, K)),
        ("do", p.do, (B, T, HV, V)),
        ("dht", p.dht, (N, HV, K, V)),
    ):
        if array is not None:
            _shape(name, array, shape)
    _check_flags(p)
    _check_values(p)


def _shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; the other arguments ask for {shape}.")
    if array.dtype != np.float64:
        raise ValueError(f"{name} is {array.dtype}; the references take float64 arrays: convert the values first.")


def _check_sizes(p: Problem) -> tuple[int, int, int, int, int, int, int]:
    if p.q.ndim != 4 or p.v.ndim != 4:
        raise ValueError(f"q and v have {p.q.ndim} and {p.v.ndim} axes; both need 4: [B,T,heads,channels].")
    B, T, H, K = p.q.shape
    HV, V = p.v.shape[2:]
    _shape("q", p.q, (B, T, H, K))
    if min(B, H, HV, K, V) < 1:
        raise ValueError(f"q {p.q.shape} or v {p.v.shape} has an empty axis; only T may be 0.")
    if HV % H:
        raise ValueError(f"v has {HV} heads, which is no multiple of the {H} heads of q and k.")
    if p.cu_seqlens is None:
        return B, T, H, HV, K, V, B
    _check_offsets(p.cu_seqlens, B, T)
    return B, T, H, HV, K, V, len(p.cu_seqlens) - 1


def _check_offsets(offsets: npt.NDArray[np.int64], B: int, T: int) -> None:
    if offsets.ndim != 1 or len(offsets) < 2 or offsets.dtype.kind not in "iu":
        raise ValueError(
            f"cu_seqlens is {offsets.dtype} of shape {offsets.shape}; it must be a vector of at least 2 integers."
        )
    if B != 1:
        raise ValueError(f"cu_seqlens is given with batch size {B}; packed sequences need batch size 1.")
    if offsets[0] != 0 or offsets[-1] > T or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(
            f"cu_seqlens {offsets.tolist()} must start at 0, never decrease, and end at or before T = {T}."
        )


def _check_flags(p: Problem) -> None:
    if p.gate not in ("none", "log", "softplus", "bounded"):
        raise ValueError(f"gate is {p.gate!r}; it must be 'none', 'log', 'softplus' or 'bounded'.")
    if (p.gate == "none") != (p.g is None):
        seen = "missing" if p.g is None else "given"
        raise ValueError(f"g is {seen} with gate {p.gate!r}; gate is 'none' exactly when g is None.")
    if p.gate == "bounded":
        if p.lower_bound is None or not -5.0 <= p.lower_bound < 0.0:
            raise ValueError(f"lower_bound is {p.lower_bound}; the bounded gate needs it in [-5, 0).")
    elif p.lower_bound is not None:
        raise ValueError(f"lower_bound is {p.lower_bound} with gate {p.gate!r}; only the bounded gate has one.")
    if p.gate in ("none", "log") and (p.A_log is not None or p.dt_bias is not None):
        raise ValueError(f"A_log or dt_bias is given with gate {p.gate!r}; only a gate inside the operator uses them.")
    if p.allow_neg_eigval and not p.beta_sigmoid:
        raise ValueError("allow_neg_eigval is set without beta_sigmoid; it doubles the sigmoid, so it needs it.")
    if not np.isfinite(p.scale):
        raise ValueError(f"scale is {p.scale}; it must be finite.")


def _check_values(p: Problem) -> None:
    end = p.q.shape[1] if p.cu_seqlens is None else int(p.cu_seqlens[-1])
    for name in ("q", "k", "v", "g", "beta", "do"):
        array = getattr(p, name)
        if array is None:
            continue
        used = array[:, :end]
        if name == "g" and p.gate == "log":
            if bool((np.isnan(used) | (used == np.inf)).any()):
                raise ValueError("g holds NaN or +inf; a log decay must be a number or -inf (a hard reset).")
        elif not bool(np.isfinite(used).all()):
            raise ValueError(f"{name} holds a value that is not finite; every row of a sequence must be finite.")
    for name in ("h0", "dht", "A_log", "dt_bias"):
        array = getattr(p, name)
        if array is not None and not bool(np.isfinite(array).all()):
            raise ValueError(f"{name} holds a value that is not finite; it must be finite.")
    if p.A_log is not None and float(p.A_log.max()) > MAX_A_LOG:
        raise ValueError(f"A_log reaches {float(p.A_log.max())}; above {MAX_A_LOG:g} exp(A_log) is no float64.")
