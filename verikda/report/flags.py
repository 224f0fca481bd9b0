"""verikda's own kernels built with other compiler flags than theirs, as targets: what do they cost in precision?

On a GPU only: on the CPU another compiler makes the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels_cuda import backward as backward_plan
from kernels_cuda import forward as forward_plan
from kernels_cuda.build import NUMERICS
from kernels_cuda.modules import Backend, load
from kernels_cuda.sources import source_hash
from oracles.contract import Contract
from oracles.problem import Array
from verikda.call import Call, Capabilities, Result
from verikda.ops.arrays import NUMPY_DTYPES
from verikda.ops.engine import Ready
from verikda.ops.validate import check_call
from verikda.targets.base import Target
from verikda.targets.contracts import contract_of
from verikda.targets.own import gpu_missing

FLAGS: Mapping[str, tuple[str, ...]] = {
    "as shipped": NUMERICS,
    "no fused multiply-add": ("--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=false"),
    "subnormals flushed": ("--ftz=true", "--prec-div=true", "--prec-sqrt=true", "--fmad=true"),
    "fast division and root": ("--ftz=false", "--prec-div=false", "--prec-sqrt=false", "--fmad=true"),
    "fast math": ("--use_fast_math",),
}
"""Sets of flags by what a report calls them."""

_PLAIN = Capabilities(
    rules=("kda",), gates=("log",), layouts=("contiguous",), packed=False, empty=False, tail_padding=False,
    qk_l2norm=False, beta_sigmoid=False, allow_neg_eigval=False, state_v_first=False,
)  # fmt: skip


class FlagBuild:
    """The kernels on one backend, for plain calls: log gates, no packing, no flags.

    Parameters
    ----------
    label : of the flags.
    backend : whose kernels were built with them.
    """

    def __init__(self, label: str, backend: Backend) -> None:
        self._label, self._backend = label, backend

    @property
    def name(self) -> str:
        """Name of the target and of the flags."""
        return f"verikda, {self._label}"

    @property
    def capabilities(self) -> Capabilities:
        """Plain calls only."""
        return _PLAIN

    def contract(self, call: Call) -> Contract:
        """That of verikda."""
        return contract_of("operands16", call)

    def run(self, call: Call) -> Result:
        """Forward and backward of a call."""
        x = arguments(call, self._backend.name == "cuda")
        do, dht = x.pop("do", None), x.pop("dht", None)
        ready = Ready.of(check_call(**x, gated=True, scale=call.problem.scale, chunk_size=call.chunk_size))
        arrays, made, held = ready.call.arrays, dict[str, Any](), []

        def allocate(name: str, shape: tuple[int, ...], dtype: str) -> int:
            made[name] = arrays.empty(shape, dtype)
            held.append(made[name])  # until the stream is done with it
            return arrays.address(made[name])

        with arrays.current():
            plan, options = ready.plan(), ready.launch_options()
            forward_plan.forward(self._backend, plan, allocate, final_state=True, **options)
            if call.backward:
                backward_plan.backward(
                    self._backend, plan, allocate, do=arrays.address(do),
                    dht=0 if dht is None else arrays.address(dht), **options,
                )  # fmt: skip
        like = {"o": call.problem.v, **{f"d{n}": getattr(call.problem, n) for n in ("q", "k", "v", "g", "beta", "h0")}}
        found = {n: read_back(made[n]).reshape(y.shape) for n, y in like.items() if n in made and y is not None}
        found["ht"] = read_back(made["ht"])
        dtypes = {n: str(np.dtype(made[n].dtype).name) for n in found}
        return Result(found, dtypes, ran=f"kernels_cuda {source_hash()}, {self._label}, {self._backend.name}")


def flag_targets() -> list[Target]:
    """One target for each set of flags; none without a GPU."""
    if gpu_missing() is not None:
        return []
    return [FlagBuild(label, load("cuda", flags=flags)) for label, flags in FLAGS.items()]


def arguments(call: Call, on_gpu: bool) -> dict[str, Any]:
    """Arrays of a plain call by the names of `check_call`, do and dht with them, where the kernels run."""
    names = {"h0": "initial_state"}
    found = {}
    for name, dtype in call.dtypes.items():
        value = getattr(call.problem, name)
        x: Any = np.ascontiguousarray(value, NUMPY_DTYPES[dtype])
        if on_gpu:
            import cupy

            x = cupy.asarray(x)
        found[names.get(name, name)] = x
    return found


def read_back(x: Any) -> Array:
    """An array of the kernels as float64 on the CPU."""
    return np.asarray(x.get() if hasattr(x, "get") else x).astype(np.float64)
