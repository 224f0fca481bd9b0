"""flash-linear-attention's `chunk_kda` (package fla-core), as a target. It needs a GPU that Triton supports."""

from __future__ import annotations

from dataclasses import replace

from verikda.targets.base import TargetError
from verikda.targets.signature import read
from verikda.targets.torch_function import TorchFunction, import_torch

FROM_KWARGS = ("A_log", "dt_bias", "chunk_size")
"""Parameters that chunk_kda reads from its `**kwargs`."""


def chunked() -> TorchFunction:
    """`fla.ops.kda.chunk_kda`.

    Raises
    ------
    TargetError
        When fla-core or torch is missing.
    """
    import_torch("fla")
    try:
        from fla.ops.kda import chunk_kda
    except ImportError as error:
        raise TargetError(
            f"target fla needs flash-linear-attention, which cannot be imported ({error}): pip install fla-core"
        ) from error
    capabilities = replace(
        read(chunk_kda, "fla", FROM_KWARGS).capabilities(),
        dtypes=("float16", "bfloat16"),
        chunk_sizes=(32, 64),
        max_k=256,
        hard_reset=False,
        shape_invariant=True,
        notes={
            "dtypes": "float32 inputs run through TF32 products, which is no float32 contract",
            "chunk_sizes": "chunk_kda accepts 32 and 64",
            "hard_reset": "differences of cumulative gates: g = -inf gives inf - inf",
        },
    )
    return TorchFunction(chunk_kda, "fla", capabilities=capabilities, contract="storage16", swallowed=FROM_KWARGS)
