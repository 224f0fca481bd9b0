"""How the inputs of a call lie in memory: layout, guard zones, poison, and whether they were left alone.

Every input is laid out in one flat NumPy buffer, so that array libraries differ only in how
they look at it: a `Block` gives shape, strides and offset in elements, and each adapter makes
its own strided view of a copy of the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from verikda.call import Call
from verikda.dtypes import FORMATS, NUMPY_DTYPES

Buffer = npt.NDArray[Any]

ALIGNMENT = 64
"""Bytes; the first element of every layout but "misaligned" starts on such a boundary."""

GUARD_ROWS = 64
"""A guard zone covers this many token rows: a full chunk written or read past the end stays inside it."""

TRANSPOSED = frozenset({"k", "g", "do", "h0"})
"""Inputs whose "strided" layout is a transposed storage order; the others get a last stride of 2."""

TOKEN_ROWS = frozenset({"q", "k", "v", "g", "beta", "do"})
"""Inputs with tokens on axis 1, hence with padding rows."""


@dataclass(frozen=True, eq=False)
class Block:
    """One input inside its buffer.

    Attributes
    ----------
    name : the input's name in `Problem`.
    buffer : 1-D, guard zones included, as it must be found again after the call.
    shape, strides, offset : the input inside the buffer, in elements.
    layout : what the input got; differs from what was asked for where its values or shape do not allow that.
    """

    name: str
    buffer: Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    layout: str

    def copy(self) -> Buffer:
        """An aligned copy of the buffer for the target to work on."""
        out = _aligned(self.buffer.size, self.buffer.dtype)
        out[:] = self.buffer
        return out

    def view(self, buffer: Buffer) -> Buffer:
        """The input as a strided array over `buffer` (a copy of this block's buffer)."""
        strides = tuple(s * buffer.itemsize for s in self.strides)
        return np.lib.stride_tricks.as_strided(buffer[self.offset :], self.shape, strides)

    def changes(self, after: Buffer) -> tuple[str, ...]:
        """What of the input, and of the memory around it, differs bitwise in `after`."""
        bits = f"u{self.buffer.itemsize}"
        differs = self.buffer.view(bits) != after.view(bits)
        if not differs.any():
            return ()
        inside = np.zeros(self.buffer.size, bool)
        self.view(inside)[...] = True
        parts = ((self.name, differs & inside), (f"memory around {self.name}", differs & ~inside))
        return tuple(text for text, where in parts if where.any())


def poison_value(poison: float | None, dtype: np.dtype[Any]) -> Any:
    """`poison` as a floating dtype; beyond its range the largest finite value, None is zero."""
    if poison is None:
        return dtype.type(0)
    limit = FORMATS[dtype.name].largest
    return dtype.type(max(-limit, min(limit, poison)) if math.isfinite(poison) else poison)


def place(
    name: str,
    values: npt.NDArray[Any],
    dtype: str,
    layout: str = "contiguous",
    poison: float | None = None,
    used_rows: int | None = None,
    integer_poison: int = 0,
) -> Block:
    """Lay one input out in a fresh buffer.

    Parameters
    ----------
    name : the input's name in `Problem`.
    values : float64 or integers, each representable in `dtype`.
    dtype : a key of `NUMPY_DTYPES`.
    layout : one of `verikda.case.LAYOUTS`.
    poison : fills guard zones, skipped elements and rows at or after `used_rows`; None leaves such rows as they
        are and fills the rest with zeros.
    used_rows : tokens (axis 1) that belong to a sequence; None for all.
    integer_poison : the same for an integer dtype. A value that is wrong but in range, since a target that reads
        it as an offset should give a wrong result and not bring the process down.

    Raises
    ------
    ValueError
        When a value is not representable in `dtype`, or the layout or dtype is not known.
    """
    kind = NUMPY_DTYPES.get(dtype)
    if kind is None:
        raise ValueError(f"{name}: dtype {dtype!r} is not one of {', '.join(NUMPY_DTYPES)}")
    typed = _exact(name, values, kind, dtype)
    filler = kind.type(integer_poison) if kind.kind == "i" else poison_value(poison, kind)
    if used_rows is not None and poison is not None:
        typed[:, used_rows:] = filler
    strides, start, extent, got = _strides(name, typed, layout)
    guard = _round_up(min(max(1024, GUARD_ROWS * math.prod(typed.shape[2:])), 1 << 16), ALIGNMENT)
    offset = guard + (1 if got == "misaligned" else 0)
    buffer = _aligned(offset + extent + guard, kind)
    buffer[:] = filler
    block = Block(name, buffer, typed.shape, strides, offset + start, got)
    block.view(buffer)[...] = typed
    return block


def place_call(call: Call, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Block]:
    """Lay out every array of a call under its memory conditions.

    Parameters
    ----------
    call : gives dtypes, layout and poison.
    arrays : by names of `Problem`, in the shapes that the target takes.
    """
    cu = call.problem.cu_seqlens
    tokens = call.problem.q.shape[1]
    used = None if cu is None else int(cu[-1])
    return {
        name: place(
            name,
            values,
            call.dtypes[name],
            call.layout,
            call.poison,
            used if name in TOKEN_ROWS else None,
            0 if call.poison is None else tokens,
        )
        for name, values in arrays.items()
    }


def _exact(name: str, values: npt.NDArray[Any], kind: np.dtype[Any], dtype: str) -> npt.NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        typed = np.array(values, dtype=kind, order="C")
    same = (typed.astype(values.dtype) == values) | (values != values)
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        raise ValueError(
            f"{name}{list(at)} = {values[at]!r} is not representable in {dtype}: round inputs to their dtype first"
        )
    return typed


def _strides(name: str, typed: npt.NDArray[Any], layout: str) -> tuple[tuple[int, ...], int, int, str]:
    """Strides, index of the first element and extent in elements, and the layout reached."""
    shape = typed.shape
    if layout in ("contiguous", "misaligned"):
        return _c_strides(shape), 0, math.prod(shape), layout
    if layout == "sliced":
        larger = tuple(n + 3 for n in shape)
        strides = _c_strides(larger)
        return strides, sum(strides), math.prod(larger), layout
    if layout == "strided":
        if name in TRANSPOSED and len(shape) >= 3:
            # h0 is stored with its last two axes swapped, the others as [B,heads,T,channels].
            a, b = (-1, -2) if name == "h0" else (1, 2)
            stored, order = list(shape), list(range(len(shape)))
            stored[a], stored[b] = stored[b], stored[a]
            order[a], order[b] = order[b], order[a]
            inner = _c_strides(tuple(stored))
            return tuple(inner[i] for i in order), 0, math.prod(shape), "strided: transposed"
        return tuple(2 * s for s in _c_strides(shape)), 0, 2 * math.prod(shape), "strided: step 2"
    if layout == "expanded":
        return _expanded(name, typed)
    raise ValueError(f"layout {layout!r} is not one of contiguous, sliced, strided, expanded, misaligned")


def _expanded(name: str, typed: npt.NDArray[Any]) -> tuple[tuple[int, ...], int, int, str]:
    """Stride 0 on every axis along which all values are bitwise equal."""
    bits = typed.view(f"u{typed.itemsize}")
    equal = [n > 1 and bool((bits == bits.take([0], axis)).all()) for axis, n in enumerate(typed.shape)]
    if typed.size == 0 or not any(equal):
        strides, start, extent, got = _strides(name, typed, "sliced")
        return strides, start, extent, f"{got}: no equal values to expand"
    kept = tuple(1 if same else n for n, same in zip(typed.shape, equal, strict=True))
    strides = tuple(0 if same else s for s, same in zip(_c_strides(kept), equal, strict=True))
    return strides, 0, math.prod(kept), "expanded"


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _aligned(size: int, dtype: np.dtype[Any]) -> Buffer:
    raw = np.empty(size * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size * dtype.itemsize].view(dtype)
