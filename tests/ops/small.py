"""Small problems with every feature, and the public arguments that say the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from oracles.problem import Problem
from verikda.dtypes import NUMPY_DTYPES

CHUNK = 16
"""Tests share chunk size and K, V <= 16, so that few kernel instances are compiled."""

FLOAT32 = 2e-5
"""Of the largest element: sums of some 100 float32 terms, each within 2**-24, with room for their conditioning."""


def make(
    B: int = 1,
    T: int = 19,
    H: int = 1,
    HV: int = 2,
    K: int = 5,
    V: int = 3,
    gate: str = "log",
    offsets: list[int] | None = None,
    h0: bool = True,
    parameters: bool = False,
    dtype: str = "float32",
    **changes: Any,
) -> Problem:
    """A problem with values of `dtype`."""
    r = np.random.default_rng(3)

    def draw(*shape: int, scale: float = 1.0, kind: str = dtype) -> Any:
        return (scale * r.normal(size=shape)).astype(NUMPY_DTYPES[kind]).astype(np.float64)

    N = B if offsets is None else len(offsets) - 1
    p = Problem(
        q=draw(B, T, H, K), k=draw(B, T, H, K, scale=K**-0.5), v=draw(B, T, HV, V),
        g=None if gate == "none" else -np.abs(draw(B, T, HV, K, kind="float32")),
        beta=np.abs(draw(B, T, HV, scale=0.4, kind="float32")), scale=0.75, gate=gate,
        lower_bound=-5.0 if gate == "bounded" else None,
        h0=draw(N, HV, K, V, kind="float32") if h0 else None,
        cu_seqlens=None if offsets is None else np.array(offsets, np.int64),
        A_log=draw(HV, kind="float32") if parameters else None,
        dt_bias=draw(HV, K, kind="float32") if parameters else None,
        do=draw(B, T, HV, V), dht=draw(N, HV, K, V, kind="float32"),
    )  # fmt: skip
    return replace(p, **changes)


def arguments(p: Problem, convert: Callable[[str, np.ndarray], Any], v_first: bool = False) -> dict[str, Any]:
    """Keyword arguments of chunk_kda, or of chunk_delta_rule where there is no gate; `convert` makes each array."""

    def array(name: str, x: Any) -> Any:
        return None if x is None else convert(name, x)

    h0 = p.h0.swapaxes(-1, -2) if p.h0 is not None and v_first else p.h0
    given = {
        "q": array("q", p.q), "k": array("k", p.k), "v": array("v", p.v), "beta": array("beta", p.beta),
        "scale": p.scale, "initial_state": array("h0", h0), "output_final_state": True,
        "cu_seqlens": array("cu_seqlens", p.cu_seqlens), "use_qk_l2norm_in_kernel": p.qk_l2norm,
        "use_beta_sigmoid_in_kernel": p.beta_sigmoid, "allow_neg_eigval": p.allow_neg_eigval,
        "state_v_first": v_first, "chunk_size": CHUNK,
    }  # fmt: skip
    if p.gate == "none":
        return given
    bias = None if p.dt_bias is None else p.dt_bias.reshape(-1)
    return given | {
        "g": array("g", p.g), "use_gate_in_kernel": p.gate != "log", "lower_bound": p.lower_bound,
        "A_log": array("A_log", p.A_log), "dt_bias": array("dt_bias", bias),
    }  # fmt: skip


def in_numpy(dtype: str = "float32", **own: str) -> Callable[[str, np.ndarray], Any]:
    """Converter to NumPy arrays: q, k, v of `dtype`, others float32 or as named."""

    def convert(name: str, x: np.ndarray) -> Any:
        if x.dtype == np.int64:
            return x.astype(own.get(name, "int64"))
        kind = own.get(name, dtype if name in ("q", "k", "v", "do") else "float32")
        return np.ascontiguousarray(x, NUMPY_DTYPES[kind])

    return convert


def in_torch(dtype: str = "float32", grad: bool = True, **own: str) -> Callable[[str, np.ndarray], Any]:
    """Converter to torch tensors on the CPU that require gradients."""
    import torch

    numpy = in_numpy("float32")

    def convert(name: str, x: np.ndarray) -> Any:
        kind = own.get(name, dtype if name in ("q", "k", "v", "do") else "float32")
        t = torch.from_numpy(numpy(name, x).copy())
        if t.is_floating_point():
            t = t.to(getattr(torch, kind)).requires_grad_(grad and name not in ("do", "dht"))
        return t

    return convert


def close(found: Any, wanted: np.ndarray, tolerance: float = FLOAT32) -> None:
    """Equal to `tolerance` of the largest element, shapes included."""
    found = np.asarray(found, np.float64)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max(initial=0.0) <= tolerance * np.abs(wanted).max(initial=0.0)
