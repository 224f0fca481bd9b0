"""cuDNN frontend's Kimi Delta Attention on Hopper (package nvidia-cudnn-frontend), as targets.

The operator takes tokens of all sequences in one row and states in [V,K] order; the functions here have the public
signature and only move axes. Every call names the engine it wants, and the library refuses the call where it has no
such engine, so that what ran is known.

The backward kernels take no fused gate, norm or sigmoid and no scale of their own, the forward kernel does: hence two
targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oracles.contract import Contract, operands16
from verikda.call import Call, Capabilities, Result
from verikda.targets.base import TargetError
from verikda.targets.torch_function import TorchFunction, import_torch

ENGINE = "kda_hopper_cuda"
DEVICE = "cuda"
CHUNK, BACKWARD_CHUNK = 16, 64
"""Rows per chunk of the forward kernel and of the backward kernels."""

LIMITS = {
    "k_sizes": "the Hopper kernels are built for K = V = 128",
    "dtypes": "the Hopper kernels take bfloat16",
    "beta_above_one": "the forward drops a state that has decayed, which it bounds for beta in (0, 1) only",
    "hard_reset": "the forward divides by exp of cumulative gates: g = -inf is not in its domain",
    "tail_padding": "rows that belong to no sequence are left as they were in memory",
    "empty": "empty sequences are not documented",
    "layouts": "inputs whose address is no multiple of 16 bytes end the CUDA context with 'misaligned address'",
}
LAYOUTS = ("contiguous", "sliced", "strided", "expanded")


def operator(target: str) -> tuple[Callable[..., Any], str, type[Exception]]:
    """The library's operator, what to call it, and the error with which it says that no engine takes a call.

    Raises
    ------
    TargetError
        When the package or torch is missing, or the package has no Kimi Delta Attention.
    """
    import_torch(target)
    try:
        import cudnn
        from cudnn.linear_attention.ops import kimi_delta_attention
    except Exception as error:  # without cuDNN's own library the import fails in any way
        raise TargetError(
            f"target {target} needs cuDNN frontend's Kimi Delta Attention, which cannot be imported "
            f"({type(error).__name__}: {error}): pip install 'nvidia-cudnn-frontend>=1.32', on a machine with cuDNN"
        ) from error
    return kimi_delta_attention, f"cudnn frontend {cudnn.__version__}", cudnn.cudnnGraphNotSupportedError


class CuDnn(TorchFunction):
    """A function around the operator; `Result.ran` names the engine."""

    def __init__(self, function: Callable[..., Any], name: str, ran: str, capabilities: Capabilities) -> None:
        super().__init__(function, name, capabilities=capabilities, contract=contract, device=DEVICE)
        self._ran = ran

    def run(self, call: Call) -> Result:
        """Make the call. See `Target.run`."""
        result = super().run(call)
        return replace(result, ran=f"{self._ran} on {result.ran.rpartition(' on ')[2]}")


def contract(call: Call) -> Contract:
    """16-bit products in chunks of 16 rows, all that the forward stores; with gradients in those of the backward."""
    return operands16("bfloat16", BACKWARD_CHUNK if call.backward else CHUNK)


def training() -> CuDnn:
    """Forward and backward: gate, norm and sigmoid have been applied, scale is K**-0.5.

    Raises
    ------
    TargetError
        See `operator`; and when torch finds no GPU.
    """
    name = "cudnn"
    call, library, no_engine = operator(name)
    supported = Capabilities(
        dtypes=("bfloat16",), chunk_sizes=(64,), rules=("kda",), gates=("log",), k_sizes=(128,), v_sizes=(128,),
        layouts=LAYOUTS,
        grouped=False, empty=False, tail_padding=False, scale=False, qk_l2norm=False, beta_sigmoid=False,
        allow_neg_eigval=False, safe_gate=False, recompute=False, hard_reset=False, shape_invariant=False,
        beta_above_one=False, g_dtypes=("float32",), beta_dtypes=("float32",), autograd=True,
        notes={**LIMITS, "scale": "the backward kernels have K**-0.5 built in", "grouped": "none in the backward"},
    )  # fmt: skip
    return CuDnn(unfused(call, no_engine), name, f"{library}, engine {ENGINE}", supported)


def forward() -> CuDnn:
    """The forward alone, with everything that its kernel fuses.

    Raises
    ------
    TargetError
        See `operator`; and when torch finds no GPU.
    """
    name = "cudnn:forward"
    call, library, no_engine = operator(name)
    supported = Capabilities(
        dtypes=("bfloat16",), chunk_sizes=(64,), rules=("kda",), gates=("log", "bounded"), k_sizes=(128,),
        layouts=LAYOUTS,
        v_sizes=(128,), empty=False, tail_padding=False, backward=False, dht=False, allow_neg_eigval=False,
        safe_gate=False, recompute=False, hard_reset=False, shape_invariant=False, beta_above_one=False,
        notes={**LIMITS, "backward": "target cudnn has it, without the fused parts"},
    )  # fmt: skip
    return CuDnn(fused(call, no_engine), name, f"{library}, engine {ENGINE}", supported)


def unfused(operator: Callable[..., Any], no_engine: type[Exception]) -> Callable[..., Any]:
    """`operator` with the part of the public signature that its backward has."""
    with_all = fused(operator, no_engine)

    def chunk_kda(
        q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None, output_final_state: bool = False,
        state_v_first: bool = False, cu_seqlens: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        o, ht = with_all(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state,
            state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return o, ht

    return chunk_kda


def fused(operator: Callable[..., Any], no_engine: type[Exception]) -> Callable[..., Any]:
    """`operator` with the part of the public signature that its forward has."""

    def chunk_kda(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float | None = None, initial_state: Any = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
        A_log: Any = None, dt_bias: Any = None, lower_bound: float | None = None,
        use_beta_sigmoid_in_kernel: bool = False, state_v_first: bool = False, cu_seqlens: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        import torch

        B, T, _, K = q.shape
        HV = v.shape[2]
        if cu_seqlens is None:
            cu_seqlens = torch.arange(B + 1, dtype=torch.int32, device=q.device) * T
        gate = {}
        if use_gate_in_kernel:
            if lower_bound is None:
                raise NotImplementedError("only the bounded gate is fused; give lower_bound")
            new = {"dtype": torch.float32, "device": q.device}
            gate = {
                "safe_gate": True,
                "gate_lower_bound": lower_bound,
                "a_log": torch.zeros(HV, **new) if A_log is None else A_log.reshape(HV),
                "dt_bias": torch.zeros(HV, K, **new) if dt_bias is None else dt_bias.reshape(HV, K),
            }
        if initial_state is not None and not state_v_first:
            initial_state = initial_state.mT
        try:
            o, ht = operator(
                *(one_row(x) for x in (q, k, v, g, beta)),
                cu_seqlens,
                scale=scale,
                initial_state=None if initial_state is None else initial_state.contiguous(),
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
                plan_name=ENGINE,
                **gate,
            )
        except no_engine as error:
            raise NotImplementedError(f"no engine takes this call: {error}") from error
        state = (ht if state_v_first else ht.mT) if output_final_state else None
        return o.reshape(B, T, *o.shape[1:]), state

    return chunk_kda


def one_row(x: Any) -> Any:
    """[B,T,...] as [B*T,...], contiguous: the kernels index packed rows."""
    return x.reshape(-1, *x.shape[2:]).contiguous()
