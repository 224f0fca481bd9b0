"""Claim: a Neumann series with doubling is a faster way to (I + N)^-1 than substitution, and a less precise one.

Both are written here in NumPy as 16-bit kernels do them, every product summed in float32 and every result that is kept
rounded to the storage dtype:

    substitution   A_i = e_i - sum_{j<i} N_ij A_j                        row after row
    Neumann        (I - N)(I + N^2)(I + N^4) ...                         exact because N^C = 0
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from oracles.problem import Array
from oracles.rounding import Floats, round_to
from oracles.substitution import substitute
from verikda import counter
from verikda.case import DTYPES
from verikda.regimes import unit
from verikda.report.measure import relative, rounded

CHUNK, CHANNELS, MATRICES = 64, 64, 32
COSINES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
"""Cosine between any two keys of a chunk, on average; 1 repeats one key."""


def correlated(cosine: float, beta: float) -> Array:
    """N = beta tril(K K^T, -1) [MATRICES,C,C] for unit keys of this mean cosine and a beta for all rows.

    Keys have a common part of length sqrt(cosine) and an own one. No gate, so nothing decays.
    """
    shape = (MATRICES, CHUNK, CHANNELS)
    own, common = counter.normal(0, "inverse.own", shape), counter.normal(0, "inverse.common", (MATRICES, 1, CHANNELS))
    keys = unit(np.sqrt(cosine) * unit(common) + np.sqrt(1 - cosine) * unit(own))
    N: Array = np.tril(beta * keys @ np.swapaxes(keys, -1, -2), -1)
    return N


def substitution(N: Floats, dtype: str) -> Floats:
    """(I + N)^-1 row by row; float32 [.., C, C], each row rounded to `dtype`."""
    C = N.shape[-1]
    A = np.broadcast_to(np.eye(C, dtype=np.float32), N.shape).copy()
    for i in range(1, C):
        row = A[..., i, :] - np.matmul(N[..., i : i + 1, :i], A[..., :i, :])[..., 0, :]
        A[..., i, :] = round_to(row, dtype)
    return A


def neumann(N: Floats, dtype: str) -> Floats:
    """(I + N)^-1 by doubling; float32 [.., C, C], each power and product rounded to `dtype`."""
    eye = np.eye(N.shape[-1], dtype=np.float32)
    A, power, reach = round_to(eye - N, dtype), N, 2
    while reach < N.shape[-1]:
        power = round_to(np.matmul(power, power), dtype)
        A, reach = round_to(A + np.matmul(A, power), dtype), 2 * reach
    return A


def operations(C: int) -> dict[str, dict[str, int]]:
    """Multiply-adds of one matrix, and how many results wait for the one before them."""
    products = 2 * (C.bit_length() - 2)
    return {
        "substitution": {"multiply_adds": sum(i * (i - 1) // 2 for i in range(C)), "steps": C - 1},
        "neumann": {"multiply_adds": products * C**3, "steps": C.bit_length() - 1},
    }


def inverse_lines() -> list[dict[str, Any]]:
    """The "claim" line: relative errors of both by dtype and cosine (beta = 0.95), operations and times."""
    errors: dict[str, dict[str, list[float | None]]] = {}
    for dtype in DTYPES:
        errors[dtype] = {"substitution": [], "neumann": []}
        for cosine in COSINES:
            N = round_to(correlated(cosine, 0.95), dtype)
            wanted = substitute(N)
            for name, method in (("substitution", substitution), ("neumann", neumann)):
                errors[dtype][name].append(_error(method, N, dtype, wanted))
    N = correlated(0.5, 0.95).astype(np.float32)
    seconds = {"substitution": _seconds(substitution, N), "neumann": _seconds(neumann, N)}
    return [{
        "kind": "claim", "claim": "inverse", "chunk": CHUNK, "matrices": MATRICES, "cosines": list(COSINES),
        "errors": errors, "operations": operations(CHUNK), "seconds": seconds,
    }]  # fmt: skip


def _error(method: Callable[[Floats, str], Floats], N: Array, dtype: str, wanted: Array) -> float | None:
    """Relative error over all matrices, infinite where anything overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        A = method(N.astype(np.float32), dtype).astype(np.float64)
        return rounded(relative(A, wanted)) if np.isfinite(A).all() else np.inf


def _seconds(method: Callable[[Floats, str], Floats], N: Floats) -> float:
    """Shortest of five times of NumPy in float32 for all matrices."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        method(N, "float32")
        times.append(time.perf_counter() - started)
    return float(f"{min(times):.3g}")
