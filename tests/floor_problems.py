"""A problem, a healthy result of it under the contract of its dtype, and what the floor says of a result."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracles.arithmetic import Nearest
from oracles.chunked import emulate
from oracles.contract import Contract, chunked32, storage16
from oracles.problem import Problem
from oracles.rounding import round_to
from verikda.floor import judge


def problem(seed: int = 0, lengths: tuple[int, ...] = (40, 0, 9), tail: int = 3, H: int = 1, HV: int = 2, K: int = 8,
            V: int = 8, dtype: str = "bfloat16", decay: float = 1.0) -> Problem:  # fmt: skip
    rng = np.random.default_rng(seed)
    T, N = sum(lengths) + tail, len(lengths)

    def normal(*shape: int) -> np.ndarray:
        return round_to(rng.standard_normal(shape), dtype)

    k = normal(1, T, H, K)
    return Problem(
        q=normal(1, T, H, K),
        k=round_to(0.9 * k / np.sqrt((k * k).sum(-1, keepdims=True)), dtype),
        v=normal(1, T, HV, V),
        g=-decay * np.abs(normal(1, T, HV, K)),
        beta=round_to(rng.uniform(0, 1, (1, T, HV)), dtype),
        scale=K**-0.5,
        h0=normal(N, HV, K, V),
        cu_seqlens=np.cumsum([0, *lengths]),
        do=normal(1, T, HV, V),
        dht=normal(N, HV, K, V),
    )


def contract_for(dtype: str) -> Contract:
    return chunked32(16) if dtype == "float32" else storage16(dtype, 16)  # type: ignore[arg-type]


def dtypes_for(dtype: str) -> dict[str, str]:
    return dict.fromkeys(("o", "dq", "dk", "dv"), dtype) | dict.fromkeys(
        ("ht", "dh0", "dg", "dbeta", "dA_log", "ddt_bias"), "float32"
    )


def healthy(p: Problem, dtype: str) -> dict[str, np.ndarray]:
    return emulate(p, contract_for(dtype), Nearest(), output_dtypes=dtypes_for(dtype)).outputs


def verdict(p: Problem, outputs: dict[str, np.ndarray], dtype: str = "bfloat16", **options: Any) -> Any:
    return judge(outputs, dtypes_for(dtype), p, contract_for(dtype), **options)


DTYPES = ["bfloat16", "float16", "float32"]
