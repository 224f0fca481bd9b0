"""MoonshotAI's FlashKDA (package flash_kda, built from its repository), as a target: forward only.

The call is the one that flash-linear-attention makes of it: o and the final state are written into given tensors,
states are [V,K], and gate, norm and sigmoid are always in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oracles.contract import Contract, operands16
from verikda.call import Call, Capabilities
from verikda.targets.base import TargetError
from verikda.targets.signature import read
from verikda.targets.torch_function import TorchFunction, import_torch

DEVICE = "cuda"
CHUNK = 16
ALWAYS = {
    "qk_l2norm": "always in the kernel",
    "beta_sigmoid": "always in the kernel",
    "gates": "the bounded gate, always in the kernel",
    "k_sizes": "the kernels are built for K = V = 128",
    "tail_padding": "rows that belong to no sequence are left as they were in memory",
}


def forward() -> TorchFunction:
    """`flash_kda.fwd`.

    Raises
    ------
    TargetError
        When the package or torch is missing; and when torch finds no GPU.
    """
    name = "flashkda"
    import_torch(name)
    try:
        from flash_kda import fwd
    except Exception as error:  # a build for another torch fails in any way
        raise TargetError(
            f"target {name} needs FlashKDA, which cannot be imported ({type(error).__name__}: {error}): "
            "build it from github.com/MoonshotAI/FlashKDA on a machine with a Hopper GPU"
        ) from error
    function = public(fwd)
    supported: Capabilities = replace(
        read(function, name).capabilities(),
        dtypes=("bfloat16",), chunk_sizes=(64,), gates=("bounded",), k_sizes=(128,), v_sizes=(128,), grouped=False,
        empty=False, tail_padding=False, backward=False, dht=False, hard_reset=False, g_dtypes=("same",),
        beta_dtypes=("same",), required=("qk_l2norm", "beta_sigmoid"), notes=ALWAYS,
    )  # fmt: skip
    return TorchFunction(function, name, capabilities=supported, contract=contract, device=DEVICE)


def contract(call: Call) -> Contract:
    """16-bit products in chunks of 16 rows; the state between chunks is 16 bits wide too, which S says."""
    return operands16("bfloat16", CHUNK)


def public(fwd: Callable[..., Any]) -> Callable[..., Any]:
    """`fwd`, which writes into tensors, with the part of the public signature that it has."""

    def chunk_kda(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float | None = None, initial_state: Any = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = True, use_gate_in_kernel: bool = True,
        A_log: Any = None, dt_bias: Any = None, lower_bound: float | None = None,
        use_beta_sigmoid_in_kernel: bool = True, state_v_first: bool = False, cu_seqlens: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        import torch

        if not (use_qk_l2norm_in_kernel and use_gate_in_kernel and use_beta_sigmoid_in_kernel) or lower_bound is None:
            raise NotImplementedError("norm, bounded gate and sigmoid are always in the kernel")
        (B, _, H, K), V = q.shape, v.shape[-1]
        new = {"dtype": torch.float32, "device": q.device}
        o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
        sequences = B if cu_seqlens is None else len(cu_seqlens) - 1
        state = torch.empty(sequences, H, V, K, **new) if output_final_state else None
        if initial_state is not None and not state_v_first:
            initial_state = initial_state.mT
        fwd(
            *(x.contiguous() for x in (q, k, v, g, beta)),
            K**-0.5 if scale is None else scale,
            o,
            A_log=torch.zeros(H, **new) if A_log is None else A_log.contiguous(),
            dt_bias=torch.zeros(H, K, **new) if dt_bias is None else dt_bias.reshape(H, K),
            lower_bound=lower_bound,
            initial_state=None if initial_state is None else initial_state.contiguous(),
            final_state=state,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.long().contiguous(),
        )
        return o, state if state is None or state_v_first else state.mT

    return chunk_kda
