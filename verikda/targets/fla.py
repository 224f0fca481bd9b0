"""flash-linear-attention's Triton kernels (package fla-core), as targets. They need a GPU that Triton supports.

The library decorates its functions: some decorators make inputs contiguous, which is part of what users call, another
can send a call to kernels of other packages. That choice is switched off before the library is first imported, so that
the file and line in `Result.ran` are of the code that ran.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oracles.contract import Contract, operands16, storage16
from verikda.call import Call, Refused, Result
from verikda.targets.base import TargetError
from verikda.targets.loading import describe, short
from verikda.targets.signature import read
from verikda.targets.torch_function import TorchFunction, import_torch

FROM_KWARGS = ("A_log", "dt_bias", "chunk_size")
"""Parameters that chunk_kda reads from its `**kwargs`."""

NO_FLOAT32 = "float32 inputs run through TF32 products, which is no float32 contract"
TAIL_ROWS = "gradients behind the last offset are left as they were in memory"

SAFE_GATE_K = 9
"""Smallest K that chunk_kda takes with safe_gate: its diagonal blocks are products of Triton over all of K, in one tile
of the next power of two, which must be 16 at least. Below, the kernel does not compile."""


class Fla(TorchFunction):
    """A function of the library; `Result.ran` has the file and line inside its decorators, and whose configs it ran."""

    def run(self, call: Call) -> Result:
        """Make the call; one whose kernel is known not to compile is declined. See `Target.run`."""
        K = call.problem.q.shape[-1]
        if call.safe_gate and self.signature.has("safe_gate") and K < SAFE_GATE_K:
            raise Refused(
                f"safe_gate with K = {K}: this kernel of fla takes K from {SAFE_GATE_K} on, below it does not compile "
                "(Triton's products need a tile of 16)"
            )
        result = super().run(call)
        where = result.ran.rpartition(", torch ")[2]
        return replace(result, ran=f"{describe(undecorated(self.function))}{_configs()}, torch {where}")


def _configs() -> str:
    """Where the library takes configs of its kernels from; nothing if it tunes them all."""
    # not from the environment: the library reads the mode when it is imported
    mode = getattr(getattr(sys.modules.get("fla.ops.utils.cache"), "FLA_CACHE_MODE", None), "value", "disabled")
    if mode == "disabled":
        return ""
    folder = os.environ.get("FLA_CONFIG_DIR")
    return f", configs of {short(folder) if folder else 'the library'} (FLA_CACHE_MODE={mode})"


def undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """What the decorators of torch and of the library are around."""
    while inner := getattr(function, "_torchdynamo_orig_callable", None) or getattr(function, "__wrapped__", None):
        function = inner
    return function


def library_function(module: str, name: str, target: str) -> Callable[..., Any]:
    """The function `name` of `fla.ops.module`, as users call it, with the library's own kernels.

    Raises
    ------
    TargetError
        When fla-core or torch is missing, the library may send calls to other packages' kernels, or the function is
        not of its own file.
    """
    import_torch(target)
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    place = f"fla.ops.{module}"
    try:
        decorated = getattr(importlib.import_module(place), name)
    except Exception as error:  # without a GPU, Triton or a matching torch the import fails in any way
        raise TargetError(
            f"target {target} needs flash-linear-attention, and {place} cannot be imported "
            f"({type(error).__name__}: {error}): pip install fla-core einops, on a machine with a GPU"
        ) from error
    backends = sys.modules.get("fla.backends")
    if backends is not None and not getattr(backends, "_DISPATCH_DISABLED", False):
        raise TargetError(
            f"target {target}: fla was imported before its choice of other packages' kernels could be switched off; "
            "set FLA_DISABLE_BACKEND_DISPATCH=1 before anything imports it"
        )
    function: Callable[..., Any] = decorated
    own = undecorated(function)
    code = getattr(own, "__code__", None)
    if code is None or code.co_name != name or not own.__module__.startswith(place):
        raise TargetError(f"{place}.{name} could not be unwrapped to the library's own code (found {own!r})")
    return function


def chunked() -> Fla:
    """`chunk_kda`. A call with safe_gate takes its path of dense diagonal blocks, others the path pair by pair.

    Raises
    ------
    TargetError
        See `library_function`.
    """
    function = library_function("kda", "chunk_kda", "fla")
    capabilities = replace(
        read(function, "fla", FROM_KWARGS).capabilities(),
        dtypes=("float16", "bfloat16"),
        chunk_sizes=(32, 64),
        max_k=256,
        hard_reset=False,
        tail_padding=False,
        notes={
            "tail_padding": f"{TAIL_ROWS}, and those of a gate in the kernel are summed into dA_log and ddt_bias",
            "dtypes": NO_FLOAT32,
            "chunk_sizes": "chunk_kda accepts 32 and 64",
            "hard_reset": "differences of cumulative gates: g = -inf gives inf - inf",
        },
    )
    return Fla(function, "fla", capabilities=capabilities, contract=kda_contract, swallowed=FROM_KWARGS)


def kda_contract(call: Call) -> Contract:
    """Intermediates in the dtype of q; the products of decayed rows run in TF32.

    TF32 has the 11 significant bits of float16, so those operands count as rounded there; in bfloat16, with 8, they
    are finer than anything that is rounded anyway.
    """
    if call.dtypes["q"] == "float16":
        return operands16("float16", call.chunk_size)
    return storage16("bfloat16", call.chunk_size)


def recurrent() -> Fla:
    """`fused_recurrent_kda`: token by token in float32, forward only.

    Raises
    ------
    TargetError
        See `library_function`.
    """
    name = "fla:recurrent"
    function = library_function("kda", "fused_recurrent_kda", name)
    capabilities = replace(
        read(function, name).capabilities(),
        backward=False,
        dht=False,
        notes={"backward": "the library's function has none"},
    )
    return Fla(function, name, capabilities=capabilities, contract="recurrent32")


def delta() -> Fla:
    """`chunk_delta_rule`: DeltaNet, without a decay.

    Raises
    ------
    TargetError
        See `library_function`.
    """
    name = "fla:delta"
    function = library_function("delta_rule", "chunk_delta_rule", name)
    swallowed = ("chunk_size",)
    capabilities = replace(
        read(function, name, swallowed).capabilities(),
        dtypes=("float16", "bfloat16"),
        tail_padding=False,
        notes={
            "dtypes": "chunk_delta_rule refuses float32",
            "tail_padding": f"{TAIL_ROWS}, and so is o",
        },
    )
    return Fla(function, name, capabilities=capabilities, contract="storage16", swallowed=swallowed)
