"""Run the forward kernels on NumPy arrays, on the host backend, with guards around every buffer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from kernels_cuda.forward import Forward, forward
from kernels_cuda.modules import Backend
from verikda.call import Call
from verikda.dtypes import NUMPY_DTYPES

GUARD = 64
FILL = 0x7F


class Arena:
    """Arrays between guard bytes; outputs start as NaN, so that an element nobody writes is seen.

    Parameters
    ----------
    offset : bytes by which inputs miss 16-byte alignment.
    """

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.arrays: dict[str, np.ndarray] = {}
        self._raw: list[tuple[np.ndarray, int, int]] = []
        self._inputs: list[tuple[str, np.ndarray, bytes]] = []

    def _new(self, shape: tuple[int, ...], dtype: str, offset: int) -> np.ndarray:
        size = int(np.prod(shape)) * NUMPY_DTYPES[dtype].itemsize
        raw = np.full(size + 2 * GUARD + 32, FILL, np.uint8)
        start = -raw.ctypes.data % 16 + GUARD + offset
        self._raw.append((raw, start, start + size))
        raw[start : start + size] = 0xFF
        array = raw[start : start + size].view(NUMPY_DTYPES[dtype]).reshape(shape)
        return array

    def put(self, name: str, values: np.ndarray, dtype: str) -> int:
        """Address of a copy of `values` in `dtype`."""
        array = self._new(values.shape, dtype, self.offset)
        array[...] = values.astype(NUMPY_DTYPES[dtype])
        self._inputs.append((name, array, array.tobytes()))
        return array.ctypes.data if array.size else 0

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        """Address of an output full of NaN."""
        array = self._new(shape, dtype, 0)
        self.arrays[name] = array
        return array.ctypes.data

    def check(self) -> None:
        """Every guard byte and every input is as it was."""
        for name, array, before in self._inputs:
            assert array.tobytes() == before, f"{name} was changed"
        for raw, begin, end in self._raw:
            guards = np.concatenate([raw[:begin], raw[end:]])
            assert (guards == FILL).all(), "a byte outside the tensors was written"


def describe(call: Call, arena: Arena) -> Forward:
    """The call as the launch plan takes it, its inputs copied into the arena."""
    p, types = call.problem, call.dtypes
    put: dict[str, int] = {}
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias"):
        x = getattr(p, name)
        put[name] = 0 if x is None else arena.put(name, x, types[name])
    h0 = p.h0.swapaxes(-1, -2) if p.h0 is not None and call.state_v_first else p.h0
    B, T, H, K = p.q.shape
    HV, V = p.v.shape[2:]
    return Forward(
        dtype=types["q"], B=B, T=T, N=len(p.spans), H=H, HV=HV, K=K, V=V, chunk=call.chunk_size, scale=p.scale,
        h0=0 if h0 is None else arena.put("h0", h0, "float32"),
        cu_seqlens=0 if p.cu_seqlens is None else arena.put("cu_seqlens", p.cu_seqlens, types["cu_seqlens"]),
        g_float32=types.get("g") == "float32", beta_float32=types["beta"] == "float32",
        offsets_int64=types.get("cu_seqlens") == "int64", gate=p.gate, lower_bound=p.lower_bound or 0.0,
        qk_l2norm=p.qk_l2norm, beta_sigmoid=p.beta_sigmoid, allow_neg_eigval=p.allow_neg_eigval,
        state_v_first=call.state_v_first, **put,
    )  # fmt: skip


def run_forward(
    backend: Backend, call: Call, *, keep: Collection[str] = (), offset: int = 0, **options: Any
) -> dict[str, np.ndarray]:
    """Results and kept intermediates as float64; ht in [N,HV,K,V]."""
    arena = Arena(offset)
    forward(backend, describe(call, arena), arena.allocate, keep=keep, **options)
    arena.check()
    found = {name: arena.arrays[name].astype(np.float64) for name in ("o", "ht", *keep) if name in arena.arrays}
    if call.state_v_first and "ht" in found:
        found["ht"] = found["ht"].swapaxes(-1, -2)
    return found
