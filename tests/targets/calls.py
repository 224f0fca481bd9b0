"""Small calls with every feature, for the tests of the adapters."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracles.problem import Problem
from verikda.call import Call
from verikda.dtypes import NUMPY_DTYPES


def rounded(x: Any, dtype: str) -> np.ndarray:
    """Float64 values of `dtype`."""
    return np.asarray(x).astype(NUMPY_DTYPES[dtype]).astype(np.float64)


def make(
    dtype: str = "float32",
    g_dtype: str = "float32",
    beta_dtype: str = "float32",
    shape: tuple[int, int, int, int, int, int] = (2, 5, 1, 2, 3, 4),
    cu_seqlens: list[int] | None = None,
    offsets: str = "int64",
    h0: bool = True,
    dht: bool = True,
    do: bool = True,
    gate: str = "log",
    params: bool = False,
    problem: dict[str, Any] | None = None,
    **flags: Any,
) -> Call:
    """A call of shape (B, T, H, HV, K, V) with random values."""
    B, T, H, HV, K, V = shape
    r = np.random.default_rng(7)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    p = Problem(
        q=rounded(r.normal(size=(B, T, H, K)), dtype),
        k=rounded(r.normal(size=(B, T, H, K)) / K, dtype),
        v=rounded(r.normal(size=(B, T, HV, V)), dtype),
        g=None if gate == "none" else rounded(-r.random((B, T, HV, K)), g_dtype),
        beta=rounded(r.random((B, T, HV)), beta_dtype),
        scale=K**-0.5,
        h0=rounded(r.normal(size=(N, HV, K, V)), "float32") if h0 else None,
        cu_seqlens=None if cu_seqlens is None else np.array(cu_seqlens, np.int64),
        gate=gate,
        lower_bound=-5.0 if gate == "bounded" else None,
        A_log=rounded(r.normal(size=HV), "float32") if params else None,
        dt_bias=rounded(r.normal(size=(HV, K)), "float32") if params else None,
        do=rounded(r.normal(size=(B, T, HV, V)), dtype) if do else None,
        dht=rounded(r.normal(size=(N, HV, K, V)), "float32") if dht else None,
        **(problem or {}),
    )
    dtypes = dict.fromkeys(("q", "k", "v", "do"), dtype) | dict.fromkeys(("h0", "dht", "A_log", "dt_bias"), "float32")
    return Call(p, dtypes | {"g": g_dtype, "beta": beta_dtype, "cu_seqlens": offsets}, **flags)
