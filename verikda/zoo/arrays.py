"""From the caller's arrays to the zoo's float32 arrays and back: sequences, padding rows, state order, storage."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from verikda.zoo.faults import HISTORY, Fault
from verikda.zoo.forward import Span
from verikda.zoo.gates import Array

STORAGE: dict[str | None, Any] = {
    None: np.float32,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


def sequences(cu_seqlens: npt.NDArray[Any] | None, B: int, T: int, fault: Fault) -> list[Span]:
    """(batch row, first token, one past the last token) of each sequence.

    Raises
    ------
    ValueError
        When B > 1 with offsets, or offsets do not rise from 0 to at most T.
    """
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    ends = [int(e) for e in cu_seqlens]
    if B != 1:
        raise ValueError(f"cu_seqlens needs B = 1, got B = {B}: lay the sequences end to end.")
    if len(ends) < 2 or ends[0] != 0 or ends[-1] > T or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens must start at 0, never decrease and end at or before T = {T}; got {ends}.")
    if fault is Fault.PACK_OFFSETS_CACHED:
        ends = [min(e, T) for e in HISTORY.offsets.setdefault(len(ends), ends)]
    if fault is Fault.PACK_LENGTHS_EVEN:
        return [(0, a, b - (b - a) % 2) for a, b in pairwise(ends)]
    return [(0, a, b) for a, b in pairwise(ends)]


class Loader:
    """Reads arguments as contiguous float32; of rows behind `end`, the last offset, nothing is read."""

    def __init__(self, end: int, dtype: Any, fault: Fault) -> None:
        self.end = end
        self.fault = fault
        if fault is Fault.DTYPE_CACHED:
            HISTORY.dtype = HISTORY.dtype or np.dtype(dtype).name
        self.dtype = STORAGE.get(HISTORY.dtype) if fault is Fault.DTYPE_CACHED else None

    def __call__(self, name: str, a: npt.NDArray[Any]) -> Array:
        """Rows 0..end of a [B,T,...]."""
        if self.fault is Fault.STRIDES_IGNORED and name == "q":
            a = behind(a, 0, a.size).reshape(a.shape)
        if self.dtype is not None and name in ("q", "k", "v", "do"):
            a = a.astype(self.dtype)
        x: Array = np.array(a[:, : self.end], np.float32, order="C")
        if self.fault is Fault.READS_ROWS_BEHIND and name == "v" and 0 < self.end < a.shape[1]:
            x[:, -1] += np.float32(1e-30) * a[:, self.end].astype(np.float32)
        if self.fault is Fault.READS_PAST_END and name == "g" and x.size and a.shape[-1] & (a.shape[-1] - 1):
            last = (np.array(a.shape) - 1) @ (np.array(a.strides) // a.itemsize)
            x.flat[-1] += np.float32(1e-30) * behind(a, int(last) + 1, 1).astype(np.float32)[0]
        return x


def behind(a: npt.NDArray[Any], first: int, count: int) -> npt.NDArray[Any]:
    """`count` elements of memory, `first` of them after the array's first; wraps round at the end of its buffer."""
    owner, base = a, a.base
    while base is not None:
        owner = base if isinstance(base, np.ndarray) else owner
        base = getattr(base, "base", None)
    memory = owner.reshape(-1).view(np.uint8)
    start = a.ctypes.data - owner.ctypes.data + first * a.itemsize
    index = (start + np.arange(count * a.itemsize)) % memory.size
    return memory[index].view(a.dtype)


def load_state(h: npt.NDArray[Any] | None, shape: tuple[int, ...], v_first: bool, fault: Fault) -> Array:
    """A state [N,HV,K,V] in float32, zeros for None."""
    if h is None:
        return np.zeros(shape, np.float32)
    if v_first:
        h = h.reshape(shape) if fault is Fault.STATE_V_FIRST_NOT_READ else h.swapaxes(-1, -2)
    return np.array(h, np.float32, order="C")


def store_state(h: Array, v_first: bool, fault: Fault) -> Array:
    """A state [N,HV,K,V] in the caller's order."""
    if v_first:
        h = h.reshape(_swapped(h)) if fault is Fault.STATE_V_FIRST_NOT_WRITTEN else h.swapaxes(-1, -2)
    if fault is Fault.STATE_TRANSPOSED:
        h = h.swapaxes(-1, -2).reshape(h.shape)
    return np.array(h, np.float32, order="C")


def store_rows(a: Array, T: int, dtype: Any, fault: Fault) -> npt.NDArray[Any]:
    """Rows as [B,T,...] in `dtype`, zero behind the last offset."""
    out = np.full((a.shape[0], T, *a.shape[2:]), 7 if fault is Fault.PACK_ROWS_BEHIND_STALE else 0, dtype)
    out[:, : a.shape[1]] = a.astype(dtype)
    return out


def storing(storage: str | None, fault: Fault) -> Callable[[Array], Array]:
    """Rounding to the dtype of the stored intermediates.

    Raises
    ------
    ValueError
        When `storage` is no dtype of the zoo.
    """
    if storage not in STORAGE:
        raise ValueError(f"storage must be None, 'float32', 'float16' or 'bfloat16', got {storage!r}.")
    dtype = STORAGE[storage]

    def store(a: Array) -> Array:
        y: Array = a.astype(dtype).astype(np.float32)
        return np.where(np.abs(y) < 2.0**-14, 0, y) if fault is Fault.SMALL_FLUSHED else y

    return store


def _swapped(h: Array) -> tuple[int, ...]:
    return (*h.shape[:-2], h.shape[-1], h.shape[-2])
