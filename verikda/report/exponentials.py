"""Claim: exp(Gamma) and exp(-Gamma) taken separately overflow under strong gates; from which gate on?

The naive form of the products inside a chunk, with every gate equal to -m and operands kept in a dtype:

    Aqk_ij = (q_i exp(Gamma_i)) . (k_j exp(-Gamma_j)),      Gamma_i = -m (i + 1)

exp(-Gamma) of the last row is exp(m C), which leaves the range of the dtype at m = ln(max) / C.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from oracles.problem import Array
from oracles.rounding import round_to
from verikda import counter
from verikda.case import DTYPES
from verikda.dtypes import format_of
from verikda.regimes import unit

CHUNKS = (16, 32, 64)
CHANNELS = 64


def frontier(dtype: str, chunk: int) -> float:
    """ln(max) / C, the gate in nats per token at which exp(-Gamma) leaves the range of `dtype`."""
    return math.log(format_of(dtype).largest) / chunk


def naive_error(m: float, dtype: str, chunk: int) -> float:
    """Relative error of the naive Aqk against float64, infinite where a value is not finite."""
    q, k = (round_to(unit(counter.normal(0, f"naive.{x}", (1, chunk, CHANNELS))[0]), dtype) for x in "qk")
    gamma = -m * np.arange(1.0, chunk + 1)[:, None]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        rows, columns = (
            round_to((x * np.exp(s * gamma).astype(np.float32)).astype(np.float32), dtype) for x, s in ((q, 1), (k, -1))
        )
        found = np.tril((rows.astype(np.float32) @ columns.astype(np.float32).T).astype(np.float64))
        wanted: Array = np.tril((q @ k.T) * np.exp(np.minimum(gamma - gamma.T, 0.0)))
    if not np.isfinite(found).all():
        return math.inf
    return float(np.sqrt(((found - wanted) ** 2).sum() / (wanted**2).sum()))


def first_overflow(dtype: str, chunk: int) -> float | None:
    """Smallest gate, to 0.1 percent, at which a value is not finite; None up to 100 nats per token."""
    low, high = 0.0, None
    for m in np.geomspace(0.01, 100.0, 81):
        if naive_error(float(m), dtype, chunk) == math.inf:
            high = float(m)
            break
        low = float(m)
    if high is None:
        return None
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if naive_error(middle, dtype, chunk) == math.inf else (middle, high)
    return float(f"{high:.4g}")


def exponential_lines() -> list[dict[str, Any]]:
    """The "claim" line: for each dtype and chunk size the frontier and the first overflow."""
    rows = [
        {
            "dtype": dtype, "chunk": chunk, "frontier": float(f"{frontier(dtype, chunk):.4g}"),
            "overflow": first_overflow(dtype, chunk),
        }
        for dtype in DTYPES for chunk in CHUNKS
    ]  # fmt: skip
    return [{"kind": "claim", "claim": "exponentials", "rows": rows}]
