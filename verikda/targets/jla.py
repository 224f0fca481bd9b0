"""jax-linear-attention's Pallas kernels for Hopper GPUs (package jla), as targets: Kimi Delta Attention and DeltaNet.

Arrays are handed to JAX from the host, which makes them contiguous, and gradients come from `jax.vjp`. Every call asks
for the implementation "mosaic_gpu" by name, which raises where it does not support a call, so that what ran is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from oracles.contract import Contract, operands16, storage16
from verikda.call import Call, Capabilities, Result
from verikda.targets.base import TargetError
from verikda.targets.numpy_function import NumpyFunction

KERNELS = "mosaic_gpu"
CHUNK = 64
LIMITS = {
    "layouts": "arrays are copied to the GPU, which makes them contiguous",
    "packed": "packed documents have no states of their own there (segment_ids), and a call asks for them",
    "k_sizes": "the kernels are built for 64 and 128 channels, with H K a multiple of 128",
}
NARROW = Capabilities(
    chunk_sizes=(CHUNK,), gates=("log",), layouts=("contiguous",), v_sizes=(64, 128), grouped=False, packed=False,
    empty=False, tail_padding=False, beta_sigmoid=False, allow_neg_eigval=False, safe_gate=False, state_v_first=False,
    recompute=False, shape_invariant=False, notes=LIMITS,
)  # fmt: skip


class Jla(NumpyFunction):
    """A function around the operator; `Result.ran` names the library and the device."""

    def __init__(
        self, function: Callable[..., Any], name: str, ran: str, capabilities: Capabilities, contract: Any
    ) -> None:
        super().__init__(function, name, capabilities=capabilities, contract=contract)
        self._ran = ran

    def run(self, call: Call) -> Result:
        """Make the call. See `Target.run`."""
        return replace(super().run(call), ran=self._ran)

    def synchronize(self) -> None:
        """See `FunctionTarget`."""
        import jax

        jax.device_get(jax.device_put(np.zeros(1)))


def library(target: str) -> tuple[Callable[..., Any], str]:
    """The library's operator, and which library on which GPU it is.

    Raises
    ------
    TargetError
        When jla or JAX is missing, or JAX finds no Hopper GPU.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch targets share the GPU's memory
    try:
        import jax
        import jla
        from jla.ops import linear_attention
    except Exception as error:  # a version of JAX that does not fit can fail in any way
        raise TargetError(
            f"target {target} needs jax-linear-attention, which cannot be imported ({type(error).__name__}: {error}): "
            "pip install jax-linear-attention 'jax[cuda13]==0.11.2', with Python 3.12 or newer"
        ) from error
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        raise TargetError(f"target {target} needs a Hopper GPU (compute capability 9.0), but JAX finds {device}")
    return linear_attention, f"jla {jla.__version__}, {KERNELS}, JAX {jax.__version__} on {device.device_kind}"


def kda() -> Jla:
    """Kimi Delta Attention; exact for any gate, by exponents that are never positive.

    Raises
    ------
    TargetError
        See `library`.
    """
    operator, ran = library("jla")
    supported = replace(NARROW, dtypes=("bfloat16",), rules=("kda",), k_sizes=(128,), hard_reset=False)
    return Jla(with_decay(operator), "jla", ran, supported, kda_contract)


def delta() -> Jla:
    """DeltaNet: the kernels of Gated DeltaNet without a gate.

    Raises
    ------
    TargetError
        See `library`.
    """
    operator, ran = library("jla:delta")
    supported = replace(NARROW, dtypes=("bfloat16", "float16"), rules=("delta",), gates=(), k_sizes=(64, 128))
    return Jla(without_decay(operator), "jla:delta", ran, supported, delta_contract)


def kda_contract(call: Call) -> Contract:
    """16-bit operands on the tensor cores, decayed rows included."""
    return operands16("bfloat16", CHUNK)


def delta_contract(call: Call) -> Contract:
    """Without a decay the operands of Aqk and L are q and k themselves."""
    return storage16("float16" if call.dtypes["q"] == "float16" else "bfloat16", CHUNK)


def with_decay(operator: Callable[..., Any], kernels: str = KERNELS) -> Callable[..., Mapping[str, Any]]:
    """Forward and reverse of "kda" on NumPy arrays."""

    def chunk_kda(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float | None = None, initial_state: Any = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, do: Any = None, dht: Any = None,
    ) -> Mapping[str, Any]:  # fmt: skip
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "h0": initial_state}
        options = {"scale": scale, "output_final_state": output_final_state, "use_qk_l2norm": use_qk_l2norm_in_kernel}
        return both_ways(operator, "kda", kernels, inputs, options, do, dht)

    return chunk_kda


def without_decay(operator: Callable[..., Any], kernels: str = KERNELS) -> Callable[..., Mapping[str, Any]]:
    """Forward and reverse of "deltanet" on NumPy arrays."""

    def chunk_delta_rule(
        q: Any, k: Any, v: Any, beta: Any, scale: float | None = None, initial_state: Any = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, do: Any = None, dht: Any = None,
    ) -> Mapping[str, Any]:  # fmt: skip
        inputs = {"q": q, "k": k, "v": v, "beta": beta, "h0": initial_state}
        options = {"scale": scale, "output_final_state": output_final_state, "use_qk_l2norm": use_qk_l2norm_in_kernel}
        return both_ways(operator, "deltanet", kernels, inputs, options, do, dht)

    return chunk_delta_rule


def both_ways(
    operator: Callable[..., Any],
    kind: str,
    kernels: str,
    inputs: Mapping[str, Any],
    options: Mapping[str, Any],
    do: Any,
    dht: Any,
) -> dict[str, Any]:
    """{"o", "final_state"} and, where a gradient comes in, those of the inputs that are given."""
    import jax

    forward, reverse = compiled(operator, kind, kernels, tuple(options.items()))
    given = {n: jax.device_put(x) for n, x in inputs.items() if x is not None}
    if do is None and dht is None:
        o, state = jax.device_get(forward(given))
        return {"o": o, "final_state": state}
    incoming = {n: jax.device_put(x) for n, x in (("do", do), ("dht", dht)) if x is not None}
    o, state, gradients = jax.device_get(reverse(given, incoming))
    return {"o": o, "final_state": state, **{f"d{n}": x for n, x in gradients.items()}}


@cache
def compiled(
    operator: Callable[..., Any], kind: str, kernels: str, options: tuple[tuple[str, Any], ...]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward, and forward with reverse, as JAX compiles them: once for each set of shapes, which takes seconds."""
    import jax

    def forward(given: Mapping[str, Any]) -> Any:
        q, k, v = (given[n] for n in ("q", "k", "v"))
        rest = {n: x for n, x in given.items() if n not in ("q", "k", "v", "h0")}
        return operator(kind, q, k, v, impl=kernels, initial_state=given.get("h0"), **rest, **dict(options))

    def reverse(given: Mapping[str, Any], incoming: Mapping[str, Any]) -> Any:
        (o, state), pull = jax.vjp(forward, given)
        cotangents = tuple(
            None if x is None else incoming.get(name, jax.numpy.zeros_like(x))  # no state, where none was asked for
            for name, x in (("do", o), ("dht", state))
        )
        return o, state, pull(cotangents)[0]

    return jax.jit(forward), jax.jit(reverse)
