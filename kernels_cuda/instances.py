"""Every kernel instance that the launch plans can ask for.

The plans run on a backend that only takes notes, so there is no list to keep: a new kernel, tile size or template
argument in a plan is here at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, product
from typing import Any, Literal, NamedTuple

from kernels_cuda.backward import INTERMEDIATES as BACKWARD_INTERMEDIATES
from kernels_cuda.backward import backward
from kernels_cuda.forward import INTERMEDIATES as FORWARD_INTERMEDIATES
from kernels_cuda.forward import SHARED_LIMIT, Forward, forward
from kernels_cuda.modules import Dims

DTYPES = ("bfloat16", "float16", "float32")
CHUNKS = (16, 32, 64)


class Notebook:
    """A backend that runs nothing and remembers each kernel with the most shared memory it was to get."""

    name: Literal["cuda", "host"] = "cuda"

    def __init__(self) -> None:
        self.shared: dict[str, int] = {}

    @property
    def ready(self) -> frozenset[str]:
        """See `kernels_cuda.modules.Backend.ready`."""
        return frozenset(self.shared)

    def launch(self, kernel: str, grid: Dims, block: int, shared: int, args: Sequence[Any], stream: int = 0) -> None:
        """See `kernels_cuda.modules.Backend.launch`."""
        self.shared[kernel] = max(shared, self.shared.get(kernel, 0))


def _calls(dtypes: Sequence[str], chunks: Sequence[int], channels: Sequence[int]) -> Iterator[Forward]:
    """Calls that together need every template argument; addresses are placeholders, nothing is read."""
    for dtype, C, K, gate, N, packed in product(
        dtypes, chunks, channels, ("none", "log", "softplus", "bounded"), (1, 16, 256), (False, True)
    ):
        plain = Forward(
            dtype=dtype, B=1 if packed else N, T=1024, N=N, H=1, HV=1, K=K, V=K, chunk=C, scale=1.0,
            q=16, k=16, v=16, beta=16, g=0 if gate == "none" else 16, gate=gate, cu_seqlens=16 if packed else 0, h0=16,
        )  # fmt: skip
        yield plain
        yield replace(plain, K=K - 1, V=K - 1)  # rows that are no whole number of 16 bytes
        given = 16 if gate in ("softplus", "bounded") else 0
        yield replace(plain, HV=2, qk_l2norm=True, beta_sigmoid=True, A_log=given, dt_bias=given,
                      g_float32=False, beta_float32=False)  # fmt: skip


class Found(NamedTuple):
    """What the plans ask for: kernels with the most shared memory each is given, and why calls were refused."""

    kernels: dict[str, int]
    refused: tuple[str, ...]


def instances(
    arch: str,
    *,
    dtypes: Sequence[str] = DTYPES,
    chunks: Sequence[int] = CHUNKS,
    channels: Sequence[int] = (64, 128, 256),
) -> Found:
    """Kernel instances of forward and backward on one architecture.

    Parameters
    ----------
    arch : for example "sm_90a"; its shared memory decides tile sizes.
    dtypes, chunks, channels : which part of the space; `channels` are values of K = V.
    """
    notebook = Notebook()
    refused: dict[str, None] = {}
    limit = SHARED_LIMIT[arch]
    for call in _calls(dtypes, chunks, channels):
        address = count(16, 16)

        def allocate(name: str, shape: tuple[int, ...], dtype: str, address: count[int] = address) -> int:
            return next(address)

        try:
            out, table = forward(notebook, call, allocate, keep=FORWARD_INTERMEDIATES, shared_limit=limit)
            for saved in (out, None):
                backward(
                    notebook, call, allocate, do=16, dht=16, saved=saved, table=table, keep=BACKWARD_INTERMEDIATES,
                    shared_limit=limit,
                )  # fmt: skip
        except ValueError as error:
            refused[f"{call.dtype}: {error}"] = None
    return Found(notebook.shared, tuple(refused))
