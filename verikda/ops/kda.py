"""KDA: `chunk_kda`, `recurrent_kda`, and forward and backward by themselves.

Signatures are those of flash-linear-attention, with what it reads from **kwargs spelled out. Semantics per token and
value head (S in R^{K x V}, scale multiplies q):

    S <- diag(exp g_t) S      S <- S + beta_t k_t (v_t - S^T k_t)^T      o_t = scale S^T q_t
"""

from __future__ import annotations

from typing import Any

from verikda.ops import engine
from verikda.ops.compiling import eager
from verikda.ops.engine import Ready
from verikda.ops.validate import Checked, check_call, check_like, check_state

_SAVED = {"w": "W", "qg": "Qg", "kg": "Kg", "v_new": "Vnew", "h": "S"}


@eager
def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    cp_context: None = None,
    *,
    A_log: Any = None,
    dt_bias: Any = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
) -> tuple[Any, ...]:
    """Kimi Delta Attention over whole sequences, in chunks.

    torch tensors on a GPU run there, on the current stream, without waiting and with all memory from torch, so that a
    call can be captured in a CUDA graph once an equal call has run (the first compiles the kernels). Tensors on the
    CPU run the same sources there, slowly. torch tensors have gradients. NumPy and CuPy arrays are computed likewise,
    forward only.

    Parameters
    ----------
    q, k : [B,T,H,K], float16, bfloat16 or float32; 1 <= K <= 256.
    v : [B,T,HV,V] of the same dtype; 1 <= V <= 256; HV a multiple of H, value head i reads key head i // (HV / H).
    g : [B,T,HV,K], float32 or the dtype of q. Natural logarithm of the decay, <= 0 (-inf forgets everything before
        the token); with use_gate_in_kernel the input of the gate.
    beta : [B,T,HV], float32 or the dtype of q.
    scale : multiplies q; None is K ** -0.5.
    initial_state : [N,HV,K,V], float32; None is zero. N is B, or the number of packed sequences.
    output_final_state : whether the final state is returned.
    use_qk_l2norm_in_kernel : q, k <- x / sqrt(sum x^2 + 1e-6).
    use_gate_in_kernel : without lower_bound g <- -exp(A_log) softplus(g + dt_bias), with it
        g <- lower_bound sigmoid(exp(A_log) (g + dt_bias)).
    use_beta_sigmoid_in_kernel, allow_neg_eigval : beta <- sigmoid(beta); 2 sigmoid(beta) with both.
    safe_gate : promises g in [lower_bound, 0). It is checked that a gate in the kernel keeps it, with lower_bound in
        [-5, 0); it changes no number, since these kernels form no positive exponent for any g <= 0.
    lower_bound : of the bounded gate, < 0.
    disable_recompute : keep the intermediates that the reverse needs, instead of computing them again to the same
        bits. Without gradients it changes nothing.
    return_intermediate_states : also return h, only where no gradient is recorded.
    state_v_first : states are [N,HV,V,K].
    cu_seqlens : [N+1], int32 or int64, offsets of packed sequences (then B = 1), from 0, never decreasing, the last
        <= T. Empty sequences are allowed; rows after the last offset give 0. On a GPU values are not checked.
    cu_seqlens_cpu : copy of cu_seqlens on the CPU, or None. It is checked, and makes the number of chunks known.
    cp_context : not supported, only None.
    A_log : [HV] (or any shape of HV elements); None is a factor of 1 with lower_bound. dt_bias : [HV*K]; None is 0.
    chunk_size : 16, 32 or 64. All compute the same; they differ in speed and rounding.
    transpose_state_layout : older name of state_v_first.

    Returns
    -------
    (o, final_state) : o [B,T,HV,V] of the dtype of q; final_state float32 like initial_state, or None.
    (o, final_state, h) : with return_intermediate_states; h [B,NT,HV,K,V] of the dtype of q, the state before each
        chunk. Of a pack NT counts all chunks if the offsets are on the CPU; otherwise it is T // chunk_size + N, and h
        is zero after the last chunk.

    Raises
    ------
    TypeError, ValueError
        For arguments outside of this; see `verikda.ops.validate`.
    kernels_cuda.host_build.CompileError
        On the CPU, where there is no C++ compiler.
    """
    call = check_call(
        q, k, v, g, beta, gated=True, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, safe_gate=safe_gate,
        lower_bound=lower_bound, disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context, A_log=A_log, dt_bias=dt_bias, chunk_size=chunk_size,
        transpose_state_layout=transpose_state_layout,
    )  # fmt: skip
    return run(call, bool(output_final_state), not disable_recompute, bool(return_intermediate_states))


def run(call: Checked, final_state: bool, recompute: bool, intermediate_states: bool = False) -> tuple[Any, ...]:
    """What `chunk_kda` and `chunk_delta_rule` return for a checked call."""
    if call.arrays.library == "torch":
        from verikda.ops import autograd

        if autograd.records(call):
            if intermediate_states:
                raise ValueError(
                    "return_intermediate_states=True gives an h without gradients, but gradients are recorded here: "
                    "call it under torch.no_grad() or torch.inference_mode()"
                )
            return autograd.apply(call, final_state, recompute)
    ready = Ready.of(call)
    out = engine.forward(ready, keep=("S",) if intermediate_states else (), final_state=final_state)
    answer = (out["o"], out.get("ht"))
    return (*answer, engine.states(ready, out["S"])) if intermediate_states else answer


@eager
def recurrent_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[Any, Any]:
    """KDA for decoding, one or a few tokens per sequence, with the signature of fused_recurrent_kda.

    It runs the kernels of `chunk_kda` with chunks of 16, not a kernel that goes token by token: of a single token 15
    of 16 rows are padding, and the state is rounded to the dtype of q where products read it (never where it is kept).
    Unlike the public function of that name it has gradients.

    Parameters, returns and errors are those of `chunk_kda`.
    """
    call = check_call(
        q, k, v, g, beta, gated=True, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound, state_v_first=state_v_first, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
        chunk_size=16, transpose_state_layout=transpose_state_layout,
    )  # fmt: skip
    o, ht = run(call, bool(output_final_state), True)
    return o, ht


@eager
def chunk_kda_fwd(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    chunk_indices: Any = None,
    chunk_size: int = 64,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Any = None,
    dt_bias: Any = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    cp_context: None = None,
    transpose_state_layout: bool | None = None,
    state_v_first: bool = False,
) -> tuple[Any, ...]:
    """Forward of `chunk_kda`, with its intermediates and without autograd.

    Parameters
    ----------
    As in `chunk_kda`; q, k and beta are taken as they are.
    chunk_indices : accepted and not read; the kernels make their own table of chunks from cu_seqlens.

    Returns
    -------
    (o, final_state, g, Aqk, Akk, w, u, qg, kg, v_new, h, initial_state), with the notes' symbols:
        g = Gamma / ln 2 [B,T,HV,K] float32, the sum of decays from the start of the chunk, in units of log2, each
        decay cut at -152 (where float32 is 0); None with use_gate_in_kernel unless disable_recompute.
        Aqk, Akk = A [B,T,HV,chunk_size]: column j is row j of the token's chunk. Aqk and qg contain the scale.
        w, qg, kg [B,T,HV,K], u, v_new [B,T,HV,V]: None unless disable_recompute.
        h [B,NT,HV,K,V] as in `chunk_kda`: None unless disable_recompute or return_intermediate_states.
        All but g have the dtype of q, and rows of no sequence are 0. initial_state is the argument.
    """
    call = check_call(
        q, k, v, g, beta, gated=True, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_gate_in_kernel=use_gate_in_kernel, safe_gate=safe_gate, lower_bound=lower_bound,
        disable_recompute=disable_recompute, return_intermediate_states=return_intermediate_states,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context,
        A_log=A_log, dt_bias=dt_bias, chunk_size=chunk_size, transpose_state_layout=transpose_state_layout,
    )  # fmt: skip
    keep = ["Aqk", "A"]
    if disable_recompute or not use_gate_in_kernel:
        keep.append("Gamma")
    if disable_recompute:
        keep += ["W", "U", "Qg", "Kg", "Vnew", "S"]
    elif return_intermediate_states:
        keep.append("S")
    ready = Ready.of(call)
    found = engine.forward(ready, keep=keep, final_state=bool(output_final_state))
    out = {
        name: found.get(name) if name in keep else None for name in ("Gamma", "Aqk", "A", "W", "U", "Qg", "Kg", "Vnew")
    }
    h = engine.states(ready, found["S"]) if "S" in keep else None
    return found["o"], found.get("ht"), *out.values(), h, initial_state


@eager
def chunk_kda_bwd(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    Aqk: Any,
    Akk: Any,
    scale: float | None = None,
    initial_state: Any = None,
    do: Any = None,
    dht: Any = None,
    g: Any = None,
    g_org: Any = None,
    cu_seqlens: Any = None,
    chunk_indices: Any = None,
    chunk_size: int = 64,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Any = None,
    dt_bias: Any = None,
    disable_recompute: bool = False,
    cp_context: None = None,
    transpose_state_layout: bool | None = None,
    state_v_first: bool = False,
    *,
    w: Any = None,
    u: Any = None,
    qg: Any = None,
    kg: Any = None,
    v_new: Any = None,
    h: Any = None,
) -> tuple[Any, ...]:
    """Backward of `chunk_kda`, without autograd.

    Parameters
    ----------
    As in `chunk_kda` and as returned by `chunk_kda_fwd`.
    Aqk, Akk : used as given.
    do : gradient of o, [B,T,HV,V] of the dtype of q; None is 0.
    dht : gradient of final_state, float32; None is 0.
    g_org : the g that `chunk_kda_fwd` was given, log decay or input of the gate. Required: the reverse sums it anew in
        short runs, and differences of its long sums would lose digits.
    g : what `chunk_kda_fwd` returned. Read with disable_recompute only, for the decay of whole chunks.
    w, qg, kg, v_new, h : what it returned, required with disable_recompute; otherwise computed again and not
        to be given. u is not read by the reverse.

    Returns
    -------
    (dq, dk, dv, db, dg, dh0, dA, dbias), each of the shape and dtype of its argument and None where that is not given.

    Raises
    ------
    TypeError, ValueError
        See `chunk_kda`; and where required intermediates are missing.
    """
    if g_org is None:
        raise TypeError(
            "g_org is None, but the reverse reads the g that chunk_kda_fwd was given (log decay, or input of the "
            "gate): pass that g as g_org"
        )
    call = check_call(
        q, k, v, g_org, beta, gated=True, scale=scale, initial_state=initial_state,
        use_gate_in_kernel=use_gate_in_kernel, safe_gate=safe_gate, lower_bound=lower_bound,
        disable_recompute=disable_recompute, state_v_first=state_v_first, cu_seqlens=cu_seqlens, cp_context=cp_context,
        A_log=A_log, dt_bias=dt_bias, chunk_size=chunk_size, transpose_state_layout=transpose_state_layout,
    )  # fmt: skip
    check_gradients(call, do, dht)
    for name, x in (("Aqk", Aqk), ("Akk", Akk)):
        check_like(call, name, x, call.shape("Aqk"), "[B,T,HV,chunk_size]")
    ready = Ready.of(call)
    saved = {"Aqk": Aqk, "A": Akk}
    given = {"w": w, "qg": qg, "kg": kg, "v_new": v_new, "h": h}
    if disable_recompute:
        saved |= _saved(ready, {"g": g, **given})
    elif extra := [name for name, x in given.items() if x is not None]:
        raise ValueError(f"{', '.join(extra)} given, but disable_recompute is False: set it, or leave them out")
    found = engine.backward(ready, do, dht, saved=saved)
    return tuple(found.get(name) for name in ("dq", "dk", "dv", "dbeta", "dg", "dh0", "dA_log", "ddt_bias"))


def check_gradients(call: Checked, do: Any, dht: Any) -> None:
    """Check the gradients that a backward starts from."""
    if do is None and dht is None:
        raise ValueError("do and dht are both None, so every gradient is 0; pass at least one")
    if do is not None:
        check_like(call, "do", do, call.shape("do"), "[B,T,HV,V]")
    if dht is not None:
        check_state(call, "dht", dht)


def _saved(ready: Ready, given: dict[str, Any]) -> dict[str, Any]:
    """Intermediates of the forward by the plan's names."""
    call = ready.call
    if missing := [name for name, x in given.items() if x is None]:
        raise TypeError(
            f"{', '.join(missing)} missing, but disable_recompute is True: pass what chunk_kda_fwd returned "
            "with it, or set it to False"
        )
    check_like(call, "g", given["g"], call.shape("Gamma"), "[B,T,HV,K]", "float32")
    for name in ("w", "qg", "kg"):
        check_like(call, name, given[name], call.shape("W"), "[B,T,HV,K]")
    check_like(call, "v_new", given["v_new"], call.shape("Vnew"), "[B,T,HV,V]")
    h = given["h"]
    check_like(call, "h", h, engine.states_shape(ready), f"[B,NT,HV,{'V,K' if call.plan.state_v_first else 'K,V'}]")
    if call.plan.state_v_first:
        h = h.swapaxes(-1, -2)
    saved = {_SAVED[name]: given[name] for name in ("w", "qg", "kg", "v_new")}
    return saved | {"S": h.reshape((-1, *h.shape[2:])), "decay": engine.last_decay(ready, given["g"])}
