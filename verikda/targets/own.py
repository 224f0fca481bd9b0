"""verikda's own kernels, as targets: on a GPU, or the same sources on the CPU.

On the CPU they work on NumPy arrays. On a GPU they are called through torch and its autograd, as users do; where torch
is missing, through CuPy with gradients from the backward by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from kernels_cuda.host_build import CompileError, compiler
from kernels_cuda.modules import Backend
from kernels_cuda.sources import source_hash
from oracles.contract import Contract
from verikda.call import Call, Capabilities, Result
from verikda.ops import chunk_delta_rule, chunk_kda, engine
from verikda.ops.engine import Ready
from verikda.ops.validate import check_call
from verikda.targets.base import Target, TargetError
from verikda.targets.contracts import contract_of
from verikda.targets.numpy_function import NumpyFunction
from verikda.targets.torch_function import TorchFunction

ADVICE = "to try the checks without kernels use the target 'emulator'"
EVERYTHING = Capabilities()
FUNCTIONS = (chunk_kda, chunk_delta_rule)


class Own:
    """The kernels on one device.

    Parameters
    ----------
    name : of the target.
    functions : what answers calls with a decay, and calls without one.
    where : library and device, for the record.
    capabilities : of both.
    """

    def __init__(
        self, name: str, functions: Sequence[Target], where: str, capabilities: Capabilities = EVERYTHING
    ) -> None:
        self._name, self._capabilities = name, capabilities
        self._kda, self._delta = functions
        self._ran = f"kernels_cuda {source_hash()}, {where}"

    @property
    def name(self) -> str:
        """The name under which it was made."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """Everything that a Call can say; equal bits whatever the shape around them."""
        return self._capabilities

    def contract(self, call: Call) -> Contract:
        """Intermediates in the dtype of q, decayed rows of q and k in TF32, everything else in float32."""
        return contract_of("operands_tf32", call)

    def run(self, call: Call) -> Result:
        """Make the call. See `Target.run`; `Result.ran` has the hash of the kernel sources and the device."""
        inner = self._delta if call.problem.g is None else self._kda
        return replace(inner.run(call), ran=self._ran)


class ThroughCupy(NumpyFunction):
    """A function on NumPy arrays that computes on the current GPU."""

    def synchronize(self) -> None:
        """See `FunctionTarget`."""
        import cupy

        cupy.cuda.runtime.deviceSynchronize()


def best() -> Own:
    """On the GPU if there is one, else on the CPU.

    Raises
    ------
    TargetError
        When there is neither a GPU nor a C++ compiler.
    """
    if gpu_missing() is None:
        return cuda("verikda")
    try:
        return host("verikda")
    except TargetError as error:
        raise TargetError(f"target verikda finds no GPU ({gpu_missing()}), and {error}") from None


def host(name: str = "verikda:host") -> Own:
    """On the CPU.

    Raises
    ------
    TargetError
        When there is no C++ compiler.
    """
    try:
        compiler()
    except CompileError as error:
        raise TargetError(f"{error}; {ADVICE}") from None
    return Own(name, [NumpyFunction(_with_reverse(f), name) for f in FUNCTIONS], "NumPy on the CPU")


def cuda(name: str = "verikda:cuda") -> Own:
    """On the current GPU.

    Raises
    ------
    TargetError
        When there is none, or CuPy is missing.
    """
    if reason := gpu_missing():
        raise TargetError(f"target {name} needs a GPU: {reason}; use verikda:host for the same sources on the CPU")
    import cupy

    device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode()
    if _torch_has_gpu():
        through = [TorchFunction(f, name, capabilities=EVERYTHING, device="cuda") for f in FUNCTIONS]
        return Own(name, through, f"torch on {device}", replace(EVERYTHING, autograd=True))
    copied = [ThroughCupy(_with_reverse(f, on_gpu=True), name) for f in FUNCTIONS]
    notes = {"layouts": "arrays are copied to the GPU, which makes them contiguous; with torch every layout is made"}
    return Own(name, copied, f"CuPy on {device}", replace(EVERYTHING, layouts=("contiguous",), notes=notes))


def on(kernels: Backend, name: str, capabilities: Capabilities = EVERYTHING) -> Own:
    """On NumPy arrays, through a backend of one's own, such as one of changed sources."""
    on_gpu = kernels.name == "cuda"
    kind = ThroughCupy if on_gpu else NumpyFunction
    functions = [kind(_with_reverse(f, on_gpu=on_gpu, kernels=kernels), name) for f in FUNCTIONS]
    return Own(name, functions, f"changed, on the {'GPU' if on_gpu else 'CPU'}", capabilities)


def gpu_missing() -> str | None:
    """Why kernels cannot run on a GPU here, None where they can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): pip install 'verikda[cuda13]' (or cuda12)"
    return None if cupy.cuda.is_available() else "CuPy finds no CUDA device"


def _torch_has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _with_reverse(
    function: Callable[..., Any], on_gpu: bool = False, kernels: Backend | None = None
) -> Callable[..., Mapping[str, Any]]:
    """`function` on NumPy arrays with do and dht as further parameters, answering forward and reverse at once.

    The reverse gets what autograd would have saved.
    """

    def answer(do: Any = None, dht: Any = None, **arguments: Any) -> Mapping[str, Any]:
        if on_gpu:
            do, dht = _to_gpu(do), _to_gpu(dht)
            arguments = {name: _to_gpu(x) for name, x in arguments.items()}
        with _poisoned() if on_gpu else nullcontext():
            found = both_ways(do, dht, arguments)
        return {name: x.get() if on_gpu and x is not None else x for name, x in found.items()}

    def both_ways(do: Any, dht: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        final_state, save = arguments["output_final_state"], arguments["disable_recompute"]
        ready = Ready.of(check_call(**{"g": None, **arguments}, gated="g" in arguments))
        keep = engine.needed(ready) if save else ()
        out = engine.forward(ready, keep=keep, final_state=final_state, kernels=kernels)
        found = {"o": out["o"], "final_state": out.get("ht")}
        if do is not None or dht is not None:
            saved = {name: out[name] for name in (*keep, "decay") if name in out} if save else None
            found |= engine.backward(ready, do, dht, saved=saved, kernels=kernels)
        return found

    known = inspect.signature(function).parameters.values()
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ("do", "dht")]
    answer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=p.KEYWORD_ONLY) for p in known] + more
    )
    return answer


def _poisoned() -> AbstractContextManager[Any]:
    """A context in which new CuPy arrays hold NaN, as new NumPy arrays do in `verikda.ops`."""
    import cupy

    def allocate(size: int) -> Any:
        memory = cupy.get_default_memory_pool().malloc(size)
        if size:
            memory.memset_async(0xFF, size)
        return memory

    context: AbstractContextManager[Any] = cupy.cuda.using_allocator(allocate)
    return context


def _to_gpu(x: Any) -> Any:
    import cupy

    return cupy.asarray(x) if isinstance(x, np.ndarray) else x
