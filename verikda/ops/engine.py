"""A checked call on its way through the launch plans: arrays in, arrays out, one stream, no waiting."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from kernels_cuda import backward as backward_plan
from kernels_cuda import forward as forward_plan
from kernels_cuda.modules import Backend, load
from verikda.ops.arrays import Arrays
from verikda.ops.validate import Checked

FLOAT_PARAMETERS = ("A_log", "dt_bias")
"""Read as float32; other floating dtypes are widened first."""

_RESULTS = {"dq": "q", "dk": "k", "dv": "v", "dg": "g", "dbeta": "beta", "dh0": "h0", "dA_log": "A_log",
            "ddt_bias": "dt_bias"}  # fmt: skip


@cache
def backend(name: Literal["cuda", "host"]) -> Backend:
    """Where kernels of this process run.

    Raises
    ------
    ImportError, kernels_cuda.modules.LaunchError
        For "cuda" without CuPy or without a device.
    """
    if name == "cuda":
        try:
            return load("cuda")
        except ImportError as error:
            raise ImportError(
                f"kernels are loaded on a GPU through CuPy, which cannot be imported ({error}): "
                "pip install 'verikda[cuda13]' (or cuda12)"
            ) from error
    return load("host")


@cache
def _limits(device: str) -> tuple[int, int]:
    """Bytes of shared memory that a block may have, and multiprocessors of the current device."""
    import cupy

    attributes = cupy.cuda.Device().attributes
    return int(attributes["MaxSharedMemoryPerBlockOptin"]), int(attributes["MultiProcessorCount"])


class _Memory:
    """New buffers of one run by name; all of them live as long as this does."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.named: dict[str, Any] = {}
        self._older: list[Any] = []

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        if name in self.named:
            self._older.append(self.named[name])
        self.named[name] = self.arrays.empty(shape, dtype)
        return self.arrays.address(self.named[name])


@dataclass(frozen=True)
class Ready:
    """A call with its arrays in the form that kernels read: contiguous, gate parameters in float32.

    Attributes
    ----------
    call : as checked.
    inputs : by their names in `Forward`.
    """

    call: Checked
    inputs: Mapping[str, Any]

    @classmethod
    def of(cls, call: Checked) -> Ready:
        """Make arrays contiguous where they are not."""
        with call.arrays.current():
            inputs = {
                name: call.arrays.contiguous(x, "float32" if name in FLOAT_PARAMETERS else None)
                for name, x in call.given.items()
            }
        return cls(call, inputs)

    def plan(self) -> forward_plan.Forward:
        """The call with addresses. Valid as long as `inputs` is."""
        addresses: dict[str, Any] = {name: self.call.arrays.address(x) for name, x in self.inputs.items()}
        return replace(self.call.plan, **addresses)

    def launch_options(self) -> dict[str, Any]:
        """Stream and device limits; the CPU runs the plan of an H200, its defaults."""
        arrays = self.call.arrays
        if arrays.backend == "host":
            return {}
        shared, processors = _limits(arrays.place)
        return {"stream": arrays.stream(), "shared_limit": shared, "processors": processors}


def forward(
    ready: Ready, *, keep: Collection[str] = (), final_state: bool = True, kernels: Backend | None = None
) -> dict[str, Any]:
    """Run the forward.

    Parameters
    ----------
    kernels : what runs them, in place of the shipped ones.
    keep : intermediates that must be complete, see `kernels_cuda.forward.forward`.
    final_state : whether ht is computed.

    Returns
    -------
    arrays by name: o, ht, what `keep` names, and "decay" (exp gC) of a gated call.
    """
    arrays = ready.call.arrays
    memory = _Memory(arrays)
    with arrays.current():
        forward_plan.forward(
            kernels or backend(arrays.backend), ready.plan(), memory.allocate, keep=keep, final_state=final_state,
            **ready.launch_options(),
        )  # fmt: skip
    return {name: x for name, x in memory.named.items() if name in ("o", "ht", "decay") or name in keep}


def backward(
    ready: Ready, do: Any, dht: Any = None, *, saved: Mapping[str, Any] | None = None, keep: Collection[str] = (),
    kernels: Backend | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run the backward.

    Parameters
    ----------
    kernels : what runs them, in place of the shipped ones.
    do, dht : gradients of o and ht; None is 0.
    saved : intermediates of the forward that are used as given, by name; what is missing is computed again.
    keep : intermediates of the backward to return, see `kernels_cuda.backward.backward`.

    Returns
    -------
    arrays by name: those of `_RESULTS` whose arguments are given, in their shapes and dtypes, and what `keep` names.
    """
    call, arrays = ready.call, ready.call.arrays
    memory = _Memory(arrays)
    if saved and not set(needed(ready)) <= set(saved):  # the plan takes all of them or none
        saved = forward(ready, keep=needed(ready), final_state=False, kernels=kernels) | dict(saved)
    with arrays.current():
        do = zeros(arrays, call.shape("do"), call.plan.dtype) if do is None else arrays.contiguous(do)
        dht = None if dht is None else arrays.contiguous(dht)
        saved = {name: arrays.contiguous(x) for name, x in (saved or {}).items()}
        backward_plan.backward(
            kernels or backend(arrays.backend), ready.plan(), memory.allocate, do=arrays.address(do),
            dht=0 if dht is None else arrays.address(dht),
            saved={name: arrays.address(x) for name, x in saved.items()}, keep=keep, **ready.launch_options(),
        )  # fmt: skip
        found = {}
        for name, argument in _RESULTS.items():
            if name in memory.named and argument in call.given:
                like, x = call.given[argument], memory.named[name]
                # A_log and dt_bias come in any shape and floating dtype; their gradients go back the same way.
                found[name] = arrays.contiguous(x.reshape(like.shape), arrays.dtype(like))
    return found | {name: memory.named[name] for name in keep}


def needed(ready: Ready) -> tuple[str, ...]:
    """Names of what the backward reads of the forward, apart from "decay"."""
    return tuple(name for name in backward_plan.needed(ready.plan()) if name != "decay")


def zeros(arrays: Arrays, shape: tuple[int, ...], dtype: str) -> Any:
    """A buffer of zeros."""
    x = arrays.empty(shape, dtype)
    x[...] = 0
    return x


def states_shape(ready: Ready) -> tuple[int, ...]:
    """Shape of the public h: [B,NT,HV,K,V], or [..,V,K] with state_v_first.

    NT is the number of chunks of a row; of a pack all of them where the offsets are known on the CPU, else the upper
    bound T // chunk_size + N, with zeros after the last.
    """
    call, plan = ready.call, ready.call.plan
    total = ready.plan().chunks if call.chunks is None else call.chunks
    order = (plan.V, plan.K) if plan.state_v_first else (plan.K, plan.V)
    return plan.B, total // max(1, plan.B), plan.HV, *order


def states(ready: Ready, S: Any) -> Any:
    """S [chunks,HV,K,V] as the public h, a view."""
    batch, chunks = states_shape(ready)[:2]
    h = S[: batch * chunks].reshape((batch, chunks, *S.shape[1:]))
    return h.swapaxes(-1, -2) if ready.call.plan.state_v_first else h


def last_decay(ready: Ready, Gamma: Any) -> Any:
    """Decay exp gC [chunks,HV,K] from Gamma [B,T,HV,K] in units of log2: its row at the end of each chunk."""
    call, arrays = ready.call, ready.call.arrays
    plan, memory = ready.plan(), _Memory(ready.call.arrays)
    with arrays.current():
        if plan.chunks == 0 or plan.tokens == 0:
            return arrays.empty(call.shape("decay"), "float32")
        options = ready.launch_options()
        forward_plan.chunk_table(backend(arrays.backend), plan, memory.allocate, options.get("stream", 0))
        table = memory.named["chunks"]  # 64-bit words (token, rows + sequence << 32)
        last = (table[:, 0] + (table[:, 1] & 0xFFFFFFFF) - 1).clip(0)
        return arrays.exp2(Gamma.reshape((plan.tokens, plan.HV, plan.K))[last])
