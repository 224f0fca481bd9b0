"""Inverse of a unit lower triangular matrix by forward substitution, in the precision of its argument."""

from __future__ import annotations

import numpy as np

from oracles.rounding import Floats


def substitute(N: Floats) -> Floats:
    """(I + N)^-1 for strictly lower N [.., C, C].

    Row by row inside 16 x 16 blocks, A_i = e_i - sum_{j<i} N_ij A_j; blocks are merged by A_21 = -A_22 N_21 A_11.
    """
    C = N.shape[-1]
    A = np.zeros_like(N)
    if C <= 16:
        A[...] = np.eye(C, dtype=N.dtype)
        for i in range(1, C):
            A[..., i, :i] = -np.matmul(N[..., i : i + 1, :i], A[..., :i, :i])[..., 0, :]
        return A
    h = 16 * max(1, (C + 15) // 32)  # a whole number of 16-row blocks
    first, last = substitute(N[..., :h, :h]), substitute(N[..., h:, h:])
    A[..., :h, :h], A[..., h:, h:] = first, last
    A[..., h:, :h] = -np.matmul(last, np.matmul(N[..., h:, :h], first))
    return A
