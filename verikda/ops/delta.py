"""The delta rule of DeltaNet: `chunk_delta_rule`, and forward and backward by themselves.

S <- S + beta_t k_t (v_t - S^T k_t)^T      o_t = scale S^T q_t
"""

from __future__ import annotations

from typing import Any

from verikda.ops import engine
from verikda.ops.compiling import eager
from verikda.ops.engine import Ready
from verikda.ops.kda import check_gradients, run
from verikda.ops.validate import check_call, check_like


@eager
def chunk_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    *,
    chunk_size: int = 64,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    disable_recompute: bool = False,
    state_v_first: bool = False,
) -> tuple[Any, ...]:
    """The delta rule over whole sequences, in chunks; like `verikda.ops.chunk_kda` without a decay.

    Parameters
    ----------
    q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu,
    chunk_size : as in `chunk_kda`, grouped heads and float32 included.
    use_beta_sigmoid_in_kernel, allow_neg_eigval, disable_recompute, state_v_first : as in `chunk_kda`; these are no
        parameters of the public function elsewhere.

    Returns
    -------
    (o, final_state) : as in `chunk_kda`.

    Raises
    ------
    TypeError, ValueError, kernels_cuda.host_build.CompileError
        As in `chunk_kda`.
    """
    call = check_call(
        q, k, v, None, beta, gated=False, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        disable_recompute=disable_recompute, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, chunk_size=chunk_size,
    )  # fmt: skip
    return run(call, bool(output_final_state), not disable_recompute)


@eager
def chunk_delta_rule_fwd(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    chunk_indices: Any = None,
    chunk_size: int = 64,
) -> tuple[Any, Any, Any]:
    """Forward of `chunk_delta_rule`, without autograd.

    Parameters
    ----------
    As in `chunk_delta_rule`; q, k and beta are taken as they are.
    chunk_indices : accepted and not read; the kernels make their own table of chunks from cu_seqlens.

    Returns
    -------
    (o, A, final_state) : A = (I + diag(beta) tril(K K^T, -1))^-1, [B,T,HV,chunk_size] of the dtype of q; column j is
        row j of the token's chunk.
    """
    call = check_call(
        q, k, v, None, beta, gated=False, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, chunk_size=chunk_size,
    )  # fmt: skip
    out = engine.forward(Ready.of(call), keep=("A",), final_state=bool(output_final_state))
    return out["o"], out["A"], out.get("ht")


@eager
def chunk_delta_rule_bwd(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    A: Any,
    scale: float | None = None,
    initial_state: Any = None,
    do: Any = None,
    dht: Any = None,
    cu_seqlens: Any = None,
    chunk_indices: Any = None,
    chunk_size: int = 64,
) -> tuple[Any, Any, Any, Any, Any]:
    """Backward of `chunk_delta_rule`, without autograd.

    Parameters
    ----------
    As in `chunk_delta_rule` and as returned by `chunk_delta_rule_fwd`; A is used as given, the other intermediates
    are computed again.
    do, dht : gradients of o (dtype of q) and of final_state (float32); None is 0.

    Returns
    -------
    (dq, dk, dv, db, dh0), each of the shape and dtype of its argument; dh0 None without initial_state.
    """
    call = check_call(
        q, k, v, None, beta, gated=False, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )  # fmt: skip
    check_gradients(call, do, dht)
    check_like(call, "A", A, call.shape("A"), "[B,T,HV,chunk_size]")
    found = engine.backward(Ready.of(call), do, dht, saved={"A": A})
    return found["dq"], found["dk"], found["dv"], found["dbeta"], found.get("dh0")
