"""Calls for the tests of the zoo, written out knob by knob."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from oracles.problem import Problem
from verikda.call import Call
from verikda.dtypes import NUMPY_DTYPES

Array = npt.NDArray[np.float64]


def make_call(
    lengths: tuple[int, ...] = (37, 0, 21),
    *,
    packed: bool = True,
    tail: int = 3,
    H: int = 1,
    G: int = 2,
    K: int = 8,
    V: int = 6,
    dtype: str = "float32",
    g_dtype: str = "float32",
    chunk: int = 16,
    gate: str = "log",
    magnitude: float = 0.3,
    lower_bound: float | None = None,
    A_log: bool = True,
    l2norm: bool = False,
    sigmoid: bool = False,
    neg_eigval: bool = False,
    safe_gate: bool = False,
    v_first: bool = False,
    recompute: bool = True,
    h0: bool = True,
    dht: bool = True,
    scale: float | None = None,
    layout: str = "contiguous",
    poison: float | None = None,
    seed: int = 0,
    edit: Callable[[dict[str, Array]], None] | None = None,
) -> Call:
    """Random values: keys of unit norm unless `l2norm`, beta in (0, 1) unless `sigmoid`, gates -magnitude Exp(1).

    `edit` changes the float64 arrays by name before they are rounded to their dtypes.
    """
    rng = np.random.default_rng(seed)
    N, HV = len(lengths), H * G
    B, T = (1, sum(lengths) + tail) if packed else (N, lengths[0])
    raw_gate = gate in ("softplus", "bounded")
    a: dict[str, Array] = {n: rng.normal(size=(B, T, H, K)) for n in ("q", "k")}
    if not l2norm:
        a["k"] /= np.linalg.norm(a["k"], axis=-1, keepdims=True)
    a["v"] = rng.normal(size=(B, T, HV, V))
    a["beta"] = rng.normal(size=(B, T, HV)) if sigmoid else rng.uniform(0.1, 0.9, (B, T, HV))
    a["do"] = rng.normal(size=(B, T, HV, V))
    if gate != "none":
        a["g"] = rng.normal(size=(B, T, HV, K)) if raw_gate else -magnitude * rng.exponential(size=(B, T, HV, K))
    if raw_gate:
        a["dt_bias"] = rng.normal(size=(HV, K))
    if raw_gate and A_log:
        a["A_log"] = 0.5 * rng.normal(size=HV)
    if h0:
        a["h0"] = rng.normal(size=(N, HV, K, V))
    if dht:
        a["dht"] = rng.normal(size=(N, HV, K, V))
    if edit is not None:
        edit(a)
    dtypes = {n: dtype if n in ("q", "k", "v", "do") else g_dtype if n == "g" else "float32" for n in a}
    a = {n: x.astype(NUMPY_DTYPES[dtypes[n]]).astype(np.float64) for n, x in a.items()}
    more: dict[str, Any] = {}
    if packed:
        more["cu_seqlens"] = np.cumsum([0, *lengths], dtype=np.int64)
        dtypes["cu_seqlens"] = "int64"
    problem = Problem(
        **({"g": None} | a),
        scale=K**-0.5 if scale is None else scale,
        gate=gate,
        lower_bound=lower_bound,
        qk_l2norm=l2norm,
        beta_sigmoid=sigmoid,
        allow_neg_eigval=neg_eigval,
        **more,
    )
    return Call(
        problem,
        dtypes,
        chunk_size=chunk,
        safe_gate=safe_gate,
        state_v_first=v_first,
        recompute=recompute,
        layout=layout,
        poison=poison,
    )
