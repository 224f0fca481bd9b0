"""Run a test kernel on a backend with NumPy arrays in and out."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kernels_cuda.modules import Backend, Host, load

HERE = Path(__file__).resolve().parent
CONFORMANCE = HERE / "conformance.cu"

Array = npt.NDArray[Any]
DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "float": np.dtype(np.float32)}


FORMS = ("NN", "NT", "TN", "TT")
SHAPES = ((16, 8, 16), (32, 24, 48), (16, 64, 64))
INSTANCES = (
    "position", "integers", "reduce", "vectors", "copies", "math", "product<tf32,16,8,32,NT>",
    *(f"exchange<{x}>" for x in ("float", "u32", "i32")),
    *(f"matrices<{n},{t}>" for n in (2, 4) for t in ("false", "true")),
    *(f"multiply<{x}>" for x in ("f16", "bf16", "tf32")),
    *(f"widen<{x}>" for x in ("f16", "bf16")),
    *(f"{kernel}<{x}>" for kernel in ("convert", "elements", "chain", "tile") for x in DTYPES),
    *(f"product<{x},{m},{n},{k},{form}>" for x in DTYPES for m, n, k in SHAPES for form in FORMS),
)  # fmt: skip


@dataclass(frozen=True)
class At:
    """An array passed as a pointer to its element `first`."""

    array: Array
    first: int


def cuda_available() -> bool:
    """Whether there is a CUDA device to run on."""
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


def backends() -> dict[str, Backend]:
    """The processor under three thread orders, and the GPU where there is one."""
    found: dict[str, Backend] = {
        "host": Host(source=CONFORMANCE, instances=INSTANCES),
        "host-reverse": Host(source=CONFORMANCE, instances=INSTANCES, order="reverse"),
        "host-shuffled": Host(source=CONFORMANCE, instances=INSTANCES, order="shuffled", seed=7),
    }
    if cuda_available():
        found["cuda"] = load("cuda", source=CONFORMANCE)
    return found


def launch(
    backend: Backend,
    kernel: str,
    *args: Any,
    threads: int = 32,
    grid: tuple[int, int, int] = (1, 1, 1),
    shared: int = 0,
) -> list[Array]:
    """Launch with arrays (changed in place) and ctypes scalars; returns the arrays after the kernel."""
    views = [At(a, 0) if isinstance(a, np.ndarray) else a for a in args]
    arrays = [v.array for v in views if isinstance(v, At)]
    if backend.name == "host":
        bases = {id(a): a.ctypes.data for a in arrays}
    else:
        import cupy

        # As bytes: CuPy has no bfloat16 of its own.
        device = {id(a): cupy.asarray(a.reshape(-1).view(np.uint8)) for a in arrays}
        bases = {key: value.data.ptr for key, value in device.items()}

    def value(v: Any) -> Any:
        return ctypes.c_void_p(bases[id(v.array)] + v.first * v.array.itemsize) if isinstance(v, At) else v

    values = [value(v) for v in views]
    if backend.name == "host":
        backend.launch(kernel, grid, threads, shared, values)
    else:
        stream = cupy.cuda.get_current_stream()
        backend.launch(kernel, grid, threads, shared, values, stream.ptr)
        stream.synchronize()
        for a in arrays:
            a.reshape(-1).view(np.uint8)[:] = device[id(a)].get()
    return arrays
