"""KDA and DeltaNet, chunked, in NumPy: a healthy implementation in which faults can be switched on.

Nothing here is shared with `oracles`: the two are checked against each other.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from verikda.zoo import gates
from verikda.zoo.backward import backward
from verikda.zoo.faults import Fault
from verikda.zoo.forward import Settings, Span, forward
from verikda.zoo.gates import Array, Flags

STORAGE: dict[str | None, Any] = {
    None: np.float32,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


def chunk_kda(
    q: npt.NDArray[Any],
    k: npt.NDArray[Any],
    v: npt.NDArray[Any],
    g: npt.NDArray[Any] | None,
    beta: npt.NDArray[Any],
    *,
    scale: float | None = None,
    initial_state: npt.NDArray[np.float32] | None = None,
    cu_seqlens: npt.NDArray[Any] | None = None,
    output_final_state: bool = True,
    do: npt.NDArray[Any] | None = None,
    dht: npt.NDArray[Any] | None = None,
    chunk_size: int = 64,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: npt.NDArray[Any] | None = None,
    dt_bias: npt.NDArray[Any] | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    state_v_first: bool = False,
    disable_recompute: bool = False,
    storage: str | None = None,
    fault: Fault = Fault.NONE,
) -> dict[str, npt.NDArray[Any]]:
    """KDA (or DeltaNet, g None) forward, and backward when `do` or `dht` is given.

    Parameters
    ----------
    q, k : [B,T,H,K]. v : [B,T,HV,V], HV a multiple of H. float16, bfloat16 or float32, any strides.
    g : [B,T,HV,K], log decay <= 0 (-inf closes the channel), or the raw gate with `use_gate_in_kernel`.
    beta : [B,T,HV].
    scale : multiplies q; None is K**-0.5.
    initial_state, dht : [N,HV,K,V], or [N,HV,V,K] with `state_v_first`.
    cu_seqlens : integer [N+1] from 0, non-decreasing, last <= T; needs B = 1. Rows behind the last offset give 0.
    do : [B,T,HV,V].
    A_log : [HV]. dt_bias : HV*K elements. lower_bound : None is the softplus gate.
    storage : dtype name to which the stored intermediates are rounded; None is float32.
    fault : the planted fault.

    Returns
    -------
    dict
        o (dtype of q), final_state (float32) and with `do` or `dht`: dq, dk, dv, dg, dbeta in their argument's
        dtype, dh0, dA_log, ddt_bias in float32, each present if its argument is.

    Raises
    ------
    ValueError
        When shapes or flags do not fit together.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    _validate(q, k, v, g, beta, chunk_size)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel=True.")
    spans = _spans(cu_seqlens, B, T)
    end = T if cu_seqlens is None else spans[-1][2]

    def load(a: npt.NDArray[Any]) -> Array:
        """Rows of some sequence as contiguous float32; nothing behind the last offset is read."""
        return np.array(a[:, :end], np.float32, order="C")

    flags = Flags(
        use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        safe_gate, fault,
    )  # fmt: skip
    dtype = STORAGE[storage]
    s = Settings(chunk_size, lambda a: np.asarray(a.astype(dtype), np.float32), fault)
    factor = np.float32(K**-0.5 if scale is None else scale)
    a_log = None if A_log is None else np.array(A_log, np.float32).reshape(HV)
    bias = None if dt_bias is None else np.array(dt_bias, np.float32).reshape(HV, K)

    raw = {"q": load(q), "k": load(k), "v": load(v), "beta": load(beta)}
    raw["g"] = np.zeros((B, end, HV, K), np.float32) if g is None else load(g)
    x = dict(raw)
    if use_qk_l2norm_in_kernel:
        x["q"], x["k"] = (s.store(gates.l2norm(raw[name], flags)) for name in ("q", "k"))
    if use_gate_in_kernel and g is not None:
        x["g"] = gates.log_gate(raw["g"], a_log, bias, flags)
    if use_beta_sigmoid_in_kernel:
        x["beta"] = gates.beta_gate(raw["beta"], flags)
    head = np.arange(HV) // (HV // H)
    x["q"], x["k"] = factor * x["q"][:, :, head], x["k"][:, :, head]

    h0 = np.zeros((len(spans), HV, K, V), np.float32)
    if initial_state is not None:
        h0 += _t(initial_state) if state_v_first else initial_state
    o, ht, chunks = forward(x, spans, h0, s)
    out: dict[str, npt.NDArray[Any]] = {"o": _rows(o, T, q.dtype)}
    if output_final_state:
        out["final_state"] = np.array(_t(ht) if state_v_first else ht, np.float32, order="C")
    if do is None and dht is None:
        return out

    if not disable_recompute:
        _, _, chunks = forward(x, spans, h0, s)
    dS = np.zeros_like(h0)
    if dht is not None:
        dS += _t(dht) if state_v_first else dht
    d = backward(chunks, spans, np.zeros_like(o) if do is None else load(do), dS, x, s)
    d["q"] *= factor
    for name in ("q", "k"):
        d[name] = d[name].reshape(B, end, H, HV // H, K).sum(axis=3)
        if use_qk_l2norm_in_kernel:
            d[name] = gates.l2norm_gradient(raw[name], d[name], flags)
    if use_gate_in_kernel and g is not None:
        d["g"], d["A_log"], d["dt_bias"] = gates.log_gate_gradient(raw["g"], a_log, bias, d["g"], flags)
    if use_beta_sigmoid_in_kernel:
        d["beta"] = gates.beta_gate_gradient(raw["beta"], d["beta"], flags)

    out |= {"d" + name: _rows(d[name], T, a.dtype) for name, a in (("q", q), ("k", k), ("v", v), ("beta", beta))}
    if g is not None:
        out["dg"] = _rows(d["g"], T, g.dtype)
    if initial_state is not None:
        out["dh0"] = np.array(_t(d["h0"]) if state_v_first else d["h0"], np.float32, order="C")
    if use_gate_in_kernel and A_log is not None:
        out["dA_log"] = d["A_log"].reshape(A_log.shape)
    if use_gate_in_kernel and dt_bias is not None:
        out["ddt_bias"] = d["dt_bias"].reshape(dt_bias.shape)
    return out


def _rows(a: Array, T: int, dtype: Any) -> npt.NDArray[Any]:
    """A as [B,T,...] in `dtype`, zero behind the last offset."""
    out = np.zeros((a.shape[0], T, *a.shape[2:]), dtype)
    out[:, : a.shape[1]] = a.astype(dtype)
    return out


def _t(a: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return a.swapaxes(-1, -2)


def _spans(cu_seqlens: npt.NDArray[Any] | None, B: int, T: int) -> list[Span]:
    """(batch row, first token, one past the last token) of each sequence."""
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    ends = [int(e) for e in cu_seqlens]
    if B != 1:
        raise ValueError(f"cu_seqlens needs B = 1, got B = {B}: lay the sequences end to end.")
    if len(ends) < 2 or ends[0] != 0 or ends[-1] > T or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens must start at 0, never decrease and end at or before T = {T}; got {ends}.")
    return [(0, a, b) for a, b in pairwise(ends)]


def _validate(
    q: npt.NDArray[Any],
    k: npt.NDArray[Any],
    v: npt.NDArray[Any],
    g: npt.NDArray[Any] | None,
    beta: npt.NDArray[Any],
    chunk_size: int,
) -> None:
    B, T, H, K = q.shape
    HV = v.shape[2]
    if HV % H:
        raise ValueError(f"v has {HV} heads, which is not a multiple of the {H} heads of q.")
    wanted = {"k": (k, (B, T, H, K)), "beta": (beta, (B, T, HV))} | ({} if g is None else {"g": (g, (B, T, HV, K))})
    for name, (a, shape) in wanted.items():
        if a.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {a.shape}.")
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size must be 16, 32 or 64, got {chunk_size}.")
