"""NumPy, torch and CuPy arrays as the launch plans see them: addresses on one device, and new buffers there.

No library is imported before a caller hands over one of its arrays, and nothing here waits for a GPU.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import numpy as np

from verikda.dtypes import NUMPY_DTYPES

ALIGNMENT = 16
"""Bytes; what the launch plans ask of a new buffer."""

_EMPTY = ALIGNMENT
"""Address of an array without elements: nothing is read there, and 0 would mean that it is absent."""


class Arrays(Protocol):
    """One array library on one device.

    Attributes
    ----------
    library : "numpy", "torch" or "cupy".
    place : the device, as messages call it.
    backend : where kernels run on these arrays.
    """

    library: str
    place: str
    backend: Literal["cuda", "host"]

    def dtype(self, x: Any) -> str:
        """Name of the dtype of `x`, as NumPy writes it."""
        ...

    def contiguous(self, x: Any, dtype: str | None = None) -> Any:
        """`x` itself where it is contiguous and of `dtype`, else a copy."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A new contiguous buffer."""
        ...

    def address(self, x: Any) -> int:
        """Address of the first element; not 0."""
        ...

    def stream(self) -> int:
        """Address of the caller's current stream; 0 where there is none."""
        ...

    def current(self) -> AbstractContextManager[Any]:
        """A context in which the device of the arrays is the current one."""
        ...

    def exp2(self, x: Any) -> Any:
        """Elementwise."""
        ...


class NumpyArrays:
    """NumPy arrays; bfloat16 is that of ml_dtypes."""

    library, place = "numpy", "the CPU"
    backend: Literal["cuda", "host"] = "host"

    def dtype(self, x: Any) -> str:
        """See `Arrays`."""
        return str(x.dtype.name if x.dtype.isnative else x.dtype.str)

    def contiguous(self, x: Any, dtype: str | None = None) -> Any:
        """See `Arrays`."""
        return np.ascontiguousarray(x, None if dtype is None else NUMPY_DTYPES[dtype]).reshape(x.shape)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """See `Arrays`."""
        kind = NUMPY_DTYPES[dtype]
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        raw = np.full(size + ALIGNMENT, 0xFF, np.uint8)  # NaN in every floating dtype, until a kernel writes it
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + size].view(kind).reshape(shape)

    def address(self, x: Any) -> int:
        """See `Arrays`."""
        return int(x.ctypes.data) if x.size else _EMPTY

    def stream(self) -> int:
        """See `Arrays`."""
        return 0

    def current(self) -> AbstractContextManager[Any]:
        """See `Arrays`."""
        return nullcontext()

    def exp2(self, x: Any) -> Any:
        """See `Arrays`."""
        return np.exp2(x)


class TorchArrays:
    """torch tensors on the CPU or on one GPU."""

    library = "torch"

    def __init__(self, device: Any) -> None:
        self.device = device
        self.place = str(device)
        self.backend: Literal["cuda", "host"] = "cuda" if device.type == "cuda" else "host"
        self._torch = sys.modules["torch"]

    def dtype(self, x: Any) -> str:
        """See `Arrays`."""
        return str(x.dtype).removeprefix("torch.")

    def contiguous(self, x: Any, dtype: str | None = None) -> Any:
        """See `Arrays`."""
        x = x.detach().resolve_neg()
        return (x if dtype is None else x.to(getattr(self._torch, dtype))).contiguous()

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """See `Arrays`."""
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=self.device)

    def address(self, x: Any) -> int:
        """See `Arrays`."""
        return int(x.data_ptr()) or _EMPTY

    def stream(self) -> int:
        """See `Arrays`."""
        return int(self._torch.cuda.current_stream(self.device).cuda_stream) if self.backend == "cuda" else 0

    def current(self) -> AbstractContextManager[Any]:
        """See `Arrays`."""
        context: AbstractContextManager[Any] = nullcontext()
        if self.backend == "cuda":
            context = self._torch.cuda.device(self.device)
        return context

    def exp2(self, x: Any) -> Any:
        """See `Arrays`."""
        return self._torch.exp2(x)


class CupyArrays:
    """CuPy arrays on one GPU; bfloat16 is that of ml_dtypes."""

    library = "cupy"
    backend: Literal["cuda", "host"] = "cuda"

    def __init__(self, device: int) -> None:
        self.device = device
        self.place = f"cuda:{device}"
        self._cupy: Any = sys.modules["cupy"]

    def dtype(self, x: Any) -> str:
        """See `Arrays`."""
        return str(x.dtype.name)

    def contiguous(self, x: Any, dtype: str | None = None) -> Any:
        """See `Arrays`."""
        return self._cupy.ascontiguousarray(x, None if dtype is None else NUMPY_DTYPES[dtype]).reshape(x.shape)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """See `Arrays`."""
        return self._cupy.empty(shape, NUMPY_DTYPES[dtype])

    def address(self, x: Any) -> int:
        """See `Arrays`."""
        return int(x.data.ptr) or _EMPTY

    def stream(self) -> int:
        """See `Arrays`."""
        return int(self._cupy.cuda.get_current_stream().ptr)

    def current(self) -> AbstractContextManager[Any]:
        """See `Arrays`."""
        context: AbstractContextManager[Any] = self._cupy.cuda.Device(self.device)
        return context

    def exp2(self, x: Any) -> Any:
        """See `Arrays`."""
        return self._cupy.exp2(x)


def arrays_of(x: Any, name: str) -> Arrays:
    """The library and device of one array.

    Raises
    ------
    TypeError
        If `x` is no array of the three libraries, or lies where no kernel can read it.
    """
    if isinstance(x, np.ndarray):
        return NumpyArrays()
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        if x.layout is not torch.strided:
            raise TypeError(f"{name} is a {x.layout} tensor; only strided ones are read: convert it with to_dense()")
        if x.device.type not in ("cpu", "cuda"):
            raise TypeError(f"{name} is on device {x.device}; kernels run on cuda and cpu tensors: move it with .to()")
        return TorchArrays(x.device)
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        return CupyArrays(x.device.id)
    raise TypeError(f"{name} is a {type(x).__name__}; pass a torch tensor, a NumPy array or a CuPy array")
