"""Launch kernels, on a GPU or on the processor, through one interface.

    backend = load("cuda")                     # or load("host")
    backend.launch("prepare<bf16,64>", grid=(8, 1, 1), block=128, shared=65536, args=[c_void_p(q), c_int32(n)])

An instance is compiled when first launched and cached by content. Arguments are ctypes values, so that each has exactly
the bytes that the kernel reads; the host checks their number and sizes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from kernels_cuda import build as _cuda_build
from kernels_cuda import host_build

Dims = tuple[int, int, int]
ORDERS = ("forward", "reverse", "shuffled")
NAN_POISON = 0x7FFF7FFF  # NaN as float16, bfloat16 and float32


class LaunchError(RuntimeError):
    """A kernel could not run, or ran into an error that the host runtime detects."""


class Backend(Protocol):
    """Where kernels run."""

    name: Literal["cuda", "host"]

    @property
    def ready(self) -> frozenset[str]:
        """Name expressions of the instances that are compiled and loaded, as every launched one is."""
        ...

    def launch(self, kernel: str, grid: Dims, block: int, shared: int, args: Sequence[Any], stream: int = 0) -> None:
        """Run one kernel.

        Parameters
        ----------
        kernel : name expression, for example "prepare<bf16,64>".
        grid : blocks in x, y, z. An empty grid (a zero) does nothing.
        block : threads per block, a multiple of 32.
        shared : bytes of dynamic shared memory.
        args : ctypes values (c_void_p for pointers, c_int32, c_int64, c_float, Structures by value).
        stream : address of the CUDA stream; ignored by the host, which has finished when this returns.

        Raises
        ------
        LaunchError, kernels_cuda.host_build.CompileError
        """
        ...


def _pack(kernel: str, args: Sequence[Any]) -> Any:
    """An array of pointers to the arguments' values, as cuLaunchKernel takes it."""
    for i, value in enumerate(args):
        if not isinstance(value, (ctypes._SimpleCData, ctypes.Structure)):
            kind = type(value).__name__
            raise TypeError(f"argument {i} of {kernel} is a {kind}; pass a ctypes value, for example ctypes.c_int32(3)")
    return (ctypes.c_void_p * max(1, len(args)))(*(ctypes.addressof(value) for value in args))


class _Options(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("late_copies", ctypes.c_uint32),
        ("poison", ctypes.c_uint32),
    )


class Host:
    """The processor: one block at a time, CUDA threads as fibers.

    Parameters
    ----------
    order : in which order threads run between barriers, and blocks in the grid: "forward", "reverse" or "shuffled".
    seed : of the order "shuffled".
    late_copies : cp.async data arrives at its wait, and poison until then; False: at once.
    poison : 32-bit pattern that fills shared memory before each block.
    sanitize : "address" for the address sanitizer's build.
    source : .cu file with the kernels, by default those of this package.
    instances : kernels of `source` to compile together, into one library; any other is compiled when first launched.
    defines : macros for the compiler.
    """

    name: Literal["cuda", "host"] = "host"

    def __init__(
        self,
        *,
        order: str = "forward",
        seed: int = 0,
        late_copies: bool = True,
        poison: int = NAN_POISON,
        sanitize: str | None = None,
        source: Path | None = None,
        instances: Sequence[str] = (),
        defines: Sequence[str] = (),
    ) -> None:
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}; allowed: {', '.join(ORDERS)}")
        self._options = _Options(ORDERS.index(order), seed, int(late_copies), poison)
        self._sanitize, self._source, self._defines = sanitize, source, tuple(defines)
        self._together = tuple(instances)
        self._kernels: dict[str, tuple[Any, int]] = {}

    def launch(self, kernel: str, grid: Dims, block: int, shared: int, args: Sequence[Any], stream: int = 0) -> None:
        """See `Backend.launch`."""
        if kernel not in self._kernels:
            self._compile(self._together if kernel in self._together else (kernel,))
        pointers = _pack(kernel, args)
        if 0 in grid:
            return
        sizes = (ctypes.c_uint * max(1, len(args)))(*(ctypes.sizeof(value) for value in args))
        launch, address = self._kernels[kernel]
        error = launch(
            ctypes.c_void_p(address),
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(block, 1, 1),
            ctypes.c_ulonglong(shared),
            pointers,
            sizes,
            len(args),
            ctypes.byref(self._options),
        )
        if error is not None:
            raise LaunchError(f"{kernel}: {error.decode()}")

    @property
    def ready(self) -> frozenset[str]:
        """Instances that were launched, or compiled together with one that was."""
        return frozenset(self._kernels)

    def _compile(self, kernels: Sequence[str]) -> None:
        library = host_build.build(kernels, source=self._source, sanitize=self._sanitize, defines=self._defines)
        launch, kernel = ctypes.CDLL(str(library.runtime)).vk_launch, ctypes.CDLL(str(library.path)).vk_kernel
        launch.restype, kernel.restype = ctypes.c_char_p, ctypes.c_void_p
        self._kernels |= {name: (launch, kernel(i)) for i, name in enumerate(library.instances)}


class Cuda:
    """The current CUDA device. Kernels are cubins of `build`, loaded as CuPy modules.

    Parameters
    ----------
    source : .cu file with the kernels, by default those of this package.
    flags : the compiler flags that change values.
    """

    name: Literal["cuda", "host"] = "cuda"

    def __init__(self, *, source: Path | None = None, flags: Sequence[str] = _cuda_build.NUMERICS) -> None:
        import cupy

        if not cupy.cuda.is_available():
            raise LaunchError("no CUDA device is available; use load('host') to run the kernels on the CPU")
        self._cupy = cupy
        self._driver = import_module("cupy_backends.cuda.api.driver")
        self._source, self._flags = source, tuple(flags)
        self._kernels: dict[tuple[str, int], tuple[Any, int]] = {}
        self._thread = threading.local()

    @property
    def ready(self) -> frozenset[str]:
        """Instances that were launched."""
        return frozenset(name for name, _ in self._kernels)

    def arch(self) -> str:
        """Architecture of the current device as the compiler names it, for example "sm_90a"."""
        capability: str = self._cupy.cuda.Device().compute_capability
        return f"sm_{capability}" + ("a" if capability == "90" else "")

    def kernel(self, name: str, shared: int = 0) -> Any:
        """The cupy.RawKernel of an instance on the current device, allowed `shared` bytes of dynamic shared memory."""
        device = self._cupy.cuda.runtime.getDevice()
        if getattr(self._thread, "device", None) != device:
            # A driver call needs a current context, which a new thread (autograd's, say) may not have yet.
            self._cupy.cuda.runtime.setDevice(device)
            self._thread.device = device
        key = (name, device)
        if key not in self._kernels:
            cubin = _cuda_build.build(name, self.arch(), source=self._source, flags=self._flags)
            raw = self._cupy.RawModule(path=str(cubin.path)).get_function(cubin.symbol)
            self._kernels[key] = raw, 48 * 1024  # what every device grants without asking
        raw, granted = self._kernels[key]
        if shared > granted:
            raw.max_dynamic_shared_size_bytes = shared
            self._kernels[key] = raw, shared
        return raw

    def launch(self, kernel: str, grid: Dims, block: int, shared: int, args: Sequence[Any], stream: int = 0) -> None:
        """See `Backend.launch`. The stream is the one given: 0 is the legacy default stream, not CuPy's current."""
        pointers = _pack(kernel, args)
        if 0 in grid:
            return
        function = self.kernel(kernel, shared).kernel.ptr
        try:
            self._driver.launchKernel(function, *grid, block, 1, 1, shared, stream, ctypes.addressof(pointers), 0)
        except self._driver.CUDADriverError as error:
            raise LaunchError(f"{kernel}: {error} (grid {grid}, block {block}, {shared} bytes shared)") from error


def load(backend: Literal["cuda", "host"], **options: Any) -> Backend:
    """The backend of this name, with its options.

    Raises
    ------
    LaunchError
        If `backend` is "cuda" and there is no device.
    ValueError
        If the name or an option is unknown.
    """
    if backend == "cuda":
        return Cuda(**options)
    if backend == "host":
        return Host(**options)
    raise ValueError(f"backend is {backend!r}; allowed: 'cuda', 'host'")
