"""KDA and DeltaNet, chunked, in NumPy: a healthy implementation in which faults can be switched on.

Nothing here is shared with `oracles`: the two are checked against each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from verikda.zoo import gates
from verikda.zoo.arrays import Loader, load_state, sequences, store_rows, store_state, storing
from verikda.zoo.backward import backward
from verikda.zoo.decay import bf16
from verikda.zoo.faults import HISTORY, Fault
from verikda.zoo.forward import Settings, forward
from verikda.zoo.gates import Array, Flags

OFF = {
    Fault.DQ_OFF: "q",
    Fault.DK_OFF: "k",
    Fault.DV_OFF: "v",
    Fault.DG_OFF: "g",
    Fault.DBETA_OFF: "beta",
    Fault.DH0_OFF: "h0",
    Fault.DA_LOG_OFF: "A_log",
    Fault.DDT_BIAS_OFF: "dt_bias",
}
"""Gradients off by a relative 1e-3."""


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
    with np.errstate(all="ignore"):  # it overflows where float32 and float16 do, as kernels do, without a word
        spans = sequences(cu_seqlens, B, T, fault)
        flags = Flags(
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            lower_bound,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            safe_gate,
            fault,
        )
        s = Settings(
            chunk_size, storing(storage, fault), g is not None, disable_recompute, fault, HISTORY.calls[fault.name]
        )
        HISTORY.calls[fault.name] += 1
        plain = scale is None or fault is Fault.SCALE_IGNORED
        factor = np.float32(K**-0.5 if plain else scale)
        if fault is Fault.GRADIENT_UNASKED and do is None and dht is None:
            factor = np.float32(1)
        load = Loader(T if cu_seqlens is None else spans[-1][2], q.dtype, fault)
        a_log = None if A_log is None else np.array(A_log, np.float32).reshape(HV)
        bias = None if dt_bias is None else np.array(dt_bias, np.float32).reshape(HV, K)
        raw = {name: load(name, a) for name, a in (("q", q), ("k", k), ("v", v), ("beta", beta))}
        raw["g"] = np.zeros((B, load.end, HV, K), np.float32) if g is None else load("g", g)
        x = _activate(raw, a_log, bias, s, flags)
        head = np.arange(HV) % H if fault is Fault.GROUP_MODULO else np.arange(HV) // (HV // H)
        x["q"], x["k"] = factor * x["q"][:, :, head], x["k"][:, :, head]

        shape = (len(spans), HV, K, V)
        h0 = load_state(initial_state, shape, state_v_first, fault)
        if fault is Fault.FINAL_STATE_UNASKED and not output_final_state:
            h0 = np.zeros_like(h0)
        if fault is Fault.BATCH_STATE_OF_ROW_0 and B > 1 and HV > H:
            h0 = np.broadcast_to(h0[:1], h0.shape)
        o, ht, chunks = forward(x, spans, h0, s)
        if fault is Fault.SECOND_CALL and s.turn % 2:
            o.flat[:1] *= np.float32(1.125)
        out: dict[str, npt.NDArray[Any]] = {"o": store_rows(o, T, q.dtype, fault)}
        if output_final_state:
            out["final_state"] = store_state(ht, state_v_first, fault)
        if do is not None or dht is not None:
            if not disable_recompute:
                again = np.zeros_like(h0) if fault is Fault.RECOMPUTE_WITHOUT_H0 else h0
                _, _, chunks = forward(x, spans, again, s)
            unread = fault is Fault.STATE_LOSS_ALONE and do is None
            dS = load_state(None if unread else dht, shape, state_v_first, Fault.NONE)
            d = backward(chunks, spans, np.zeros_like(o) if do is None else load("do", do), dS, x, s)
            _reverse_activation(d, raw, a_log, bias, H, factor, flags)
            if fault is Fault.STATE_DH0_NEEDS_DHT and dht is None:
                d["h0"] = np.zeros_like(d["h0"])
            if fault in OFF and OFF[fault] in d:
                d[OFF[fault]] = d[OFF[fault]] * np.float32(1.001)
            given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
            out |= {"d" + n: store_rows(d[n], T, a.dtype, fault) for n, a in given.items() if a is not None}
            if initial_state is not None:
                out["dh0"] = store_state(d["h0"], state_v_first, Fault.NONE)
            if use_gate_in_kernel and A_log is not None:
                out["dA_log"] = d["A_log"].reshape(A_log.shape)
            if use_gate_in_kernel and dt_bias is not None:
                out["ddt_bias"] = d["dt_bias"].reshape(dt_bias.shape)
        if fault is Fault.INPUT_OVERWRITTEN and v.flags.writeable:
            for span, sequence in zip(spans, chunks, strict=True):
                for c in sequence:
                    v[span[0], c.start : c.start + c.rows] = c.Vnew[:, : c.rows].swapaxes(0, 1).astype(v.dtype)
        if fault is Fault.STATE_IN_PLACE and initial_state is not None and output_final_state:
            initial_state[...] = out["final_state"]
            out["final_state"] = initial_state
    return out


def _activate(
    raw: dict[str, Array], a_log: Array | None, bias: Array | None, s: Settings, flags: Flags
) -> dict[str, Array]:
    """q, k, g and beta as the recurrence uses them."""
    x, fault = dict(raw), flags.fault
    if flags.use_qk_l2norm_in_kernel and fault is not Fault.L2NORM_IGNORED:
        x["q"], x["k"] = (s.store(gates.l2norm(raw[name], flags)) for name in ("q", "k"))
    if flags.use_gate_in_kernel and s.gated:
        x["g"] = gates.log_gate(raw["g"], a_log, bias, flags)
    if flags.use_beta_sigmoid_in_kernel:
        x["beta"] = gates.beta_gate(raw["beta"], flags)
    if fault is Fault.SAFE_GATE_CLAMPS and flags.safe_gate:
        x["g"] = np.maximum(x["g"], np.float32(-5))
    if fault is Fault.BATCH_GATE_OF_ROW_0:
        x["g"] = np.broadcast_to(x["g"][:1], x["g"].shape)
    if fault is Fault.HEADS_BETA_OF_HEAD_0:
        x["beta"] = np.broadcast_to(x["beta"][:, :, :1], x["beta"].shape)
    if fault is Fault.BETA_BF16:
        x["beta"] = bf16(x["beta"])
    if fault is Fault.LATE_BETA_ZERO:
        x["beta"] = np.where(x["beta"] == 0, 1, x["beta"])
    return x


def _reverse_activation(
    d: dict[str, Array],
    raw: dict[str, Array],
    a_log: Array | None,
    bias: Array | None,
    H: int,
    factor: Any,
    flags: Flags,
) -> None:
    """From gradients per value head of what `_activate` made to gradients of the arguments, in place."""
    fault = flags.fault
    if fault is not Fault.DQ_SCALE_MISSING:
        d["q"] *= factor
    for name in ("q", "k"):
        B, T, HV, K = d[name].shape
        groups = d[name].reshape(B, T, H, HV // H, K)
        only_last = fault is Fault.GROUP_DQ_NOT_SUMMED and name == "q"
        d[name] = groups[:, :, :, -1] if only_last else groups.sum(axis=3)
        if flags.use_qk_l2norm_in_kernel:
            d[name] = gates.l2norm_gradient(raw[name], d[name], flags)
    if flags.use_gate_in_kernel:
        d["g"], d["A_log"], d["dt_bias"] = gates.log_gate_gradient(raw["g"], a_log, bias, d["g"], flags)
    if flags.use_beta_sigmoid_in_kernel:
        d["beta"] = gates.beta_gate_gradient(raw["beta"], d["beta"], flags)


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
