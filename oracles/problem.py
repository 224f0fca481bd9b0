"""One call of a delta-rule operator, as plain float64 arrays.

Every reference in this package takes a `Problem` and returns a dictionary of
float64 arrays keyed by the names in `OUTPUTS` and `GRADIENTS`. The class holds
data only: no reference shares arithmetic with another through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Gate = Literal["none", "log", "softplus", "bounded"]

OUTPUTS = ("o", "ht")
"""Forward results: o [B,T,HV,V], ht [N,HV,K,V]."""

GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias")
"""Reverse results, each of the shape of the argument it belongs to."""

L2NORM_EPS = 1e-6
"""eps of q, k <- x / sqrt(sum x^2 + eps)."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Arguments of one call in the public layout, already rounded to their dtypes.

    Shapes: B batch, T tokens, H query/key heads, HV value heads (HV % H == 0,
    value head i reads query/key head i // (HV / H)), K and V channels, N states
    (N = B, or the number of packed sequences when `cu_seqlens` is given; then B = 1).

    Attributes
    ----------
    q, k : [B,T,H,K]
    v : [B,T,HV,V]
    g : [B,T,HV,K], or None for the ungated rule (`gate` = "none")
        Log decay (natural log) when `gate` is "log", otherwise the raw gate input.
    beta : [B,T,HV]
    scale : multiplies q.
    h0 : [N,HV,K,V] or None (zero state). Always in [K,V] order here.
    cu_seqlens : int64 [N+1], non-decreasing from 0, last <= T, or None.
        Rows at or after the last offset belong to no sequence: their outputs and gradients are 0.
    gate : "none" | "log" | "softplus" (g = -exp(A_log) softplus(x + dt_bias)) |
        "bounded" (g = lower_bound sigmoid(exp(A_log) (x + dt_bias))).
    lower_bound : in [-5, 0), for "bounded" only.
    A_log : [HV] or None (multiplier 1).    dt_bias : [HV,K] or None (0).
    qk_l2norm, beta_sigmoid, allow_neg_eigval : pre-activations inside the operator.
    do : [B,T,HV,V] or None (0).    dht : [N,HV,K,V] or None (0).
    """

    q: Array
    k: Array
    v: Array
    g: Array | None
    beta: Array
    scale: float
    h0: Array | None = None
    cu_seqlens: npt.NDArray[np.int64] | None = None
    gate: Gate = "log"
    lower_bound: float | None = None
    A_log: Array | None = None
    dt_bias: Array | None = None
    qk_l2norm: bool = False
    beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    do: Array | None = None
    dht: Array | None = None

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """(batch row, first token, one past the last token) of each of the N sequences."""
        if self.cu_seqlens is None:
            return [(b, 0, self.q.shape[1]) for b in range(self.q.shape[0])]
        ends = self.cu_seqlens.tolist()
        return [(0, a, b) for a, b in pairwise(ends)]
