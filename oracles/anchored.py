"""Aqk and L as products of rounded operands, for contracts with the site "QK".

Tensor cores multiply 16-bit operands, so a kernel that forms Aqk and L on them splits each decay at an anchor row a
between j and i and rounds both factors (every exponent is <= 0 for g <= 0):

    Aqk_ij = sum_d QK(Q_i exp(Gamma_i - Gamma_a))_d QK(K_j exp(Gamma_a - Gamma_j))_d

Pairs in different 16-row blocks: a is the last row before the block of i. Pairs in one block, for s = 8, 4, 2, 1: a is
the last row of the lower s of 2s neighbours, where i lies in the upper s. The diagonal has no decay and is not rounded.
"""

from __future__ import annotations

import numpy as np

from oracles.operations import Operations
from oracles.rounding import Floats

_BLOCK = 16


def anchored_products(op: Operations, Q: Floats, K: Floats, Gamma: Floats) -> tuple[Floats, Floats]:
    """Aqk (diagonal included) and L (strictly lower), both [.., X, C, C].

    Parameters
    ----------
    op : arithmetic, under a contract with the site "QK".
    Q, K, Gamma : [.., X, C, K], Q already scaled.
    """
    C = K.shape[-2]
    size = -(-C // _BLOCK) * _BLOCK
    Q, K, Gamma = (_padded(x, size, mode) for x, mode in ((Q, "constant"), (K, "constant"), (Gamma, "edge")))
    Aqk, L = op.blank(*K.shape[-3:-1], size), op.blank(*K.shape[-3:-1], size)
    for first in range(_BLOCK, size, _BLOCK):
        i, j = slice(first, first + _BLOCK), slice(0, first)
        _pair(op, Q, K, Gamma, i, j, first - 1, Aqk, L)
    for s in (8, 4, 2, 1):
        for first in range(0, size, 2 * s):
            i, j = slice(first + s, first + 2 * s), slice(first, first + s)
            if first + s < C:
                _pair(op, Q, K, Gamma, i, j, first + s - 1, Aqk, L)
    diagonal = op.total(Q * K, -1) * np.eye(size, dtype=op.real)
    return (Aqk + diagonal)[..., :C, :C], L[..., :C, :C]


def _pair(
    op: Operations, Q: Floats, K: Floats, Gamma: Floats, i: slice, j: slice, a: int, Aqk: Floats, L: Floats
) -> None:
    """All pairs of rows i and columns j through the anchor row a."""
    anchor = Gamma[..., a : a + 1, :]
    rows = op.exp(Gamma[..., i, :] - anchor)
    columns = np.swapaxes(op.site("QK", K[..., j, :] * op.exp(anchor - Gamma[..., j, :])), -1, -2)
    Aqk[..., i, j] = op.dot(op.site("QK", Q[..., i, :] * rows), columns)
    L[..., i, j] = op.dot(op.site("QK", K[..., i, :] * rows), columns)


def _padded(x: Floats, size: int, mode: str) -> Floats:
    rows = [(0, 0)] * (x.ndim - 2) + [(0, size - x.shape[-2]), (0, 0)]
    return np.pad(x, rows, mode=mode)  # type: ignore[call-overload, no-any-return]
