"""Products inside a chunk that carry a decay per channel.

    Aqk_ij = M_ij  sum_d Q_id K_jd exp(Gamma_id - Gamma_jd)        L_ij = M1_ij sum_d K_id K_jd exp(Gamma_id - Gamma_jd)
    left_i  = sum_j dL_ij K_j exp(Gamma_i - Gamma_j)
    right_j = sum_i (dAqk_ij Q_i + dL_ij K_i) exp(Gamma_i - Gamma_j)

The decay is formed pair by pair, never as exp(Gamma_i) exp(-Gamma_j): for g <= 0 no exponent that
is used is positive. Masked pairs get the exponent -inf before exp sees them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from oracles.anchored import anchored_products
from oracles.layout import Index
from oracles.noisy import FLUSH, UNIT
from oracles.operations import Operations, one_run
from oracles.rounding import Floats

_STRIP = 16
"""Rows done at once, so that half of the masked pairs are never formed."""
_SLAB_BYTES = 1 << 20
"""Decays held at once: about one second-level cache."""
_KEPT_BYTES = 1 << 24
"""Decays of all strips that the forward keeps for the backward; more of them are formed again."""


class GatedProducts:
    """The products of all blocks.

    Parameters
    ----------
    op : arithmetic.
    Q, K : [.., X, C, K].
    Gamma : [.., X, C, K], or None when there is no gate.
    used : [X], rows of each block that are tokens.
    """

    def __init__(self, op: Operations, Q: Floats, K: Floats, Gamma: Floats | None, used: Index) -> None:
        self.used = used
        self.op, self.Q, self.K, self.Gamma = op, Q, K, Gamma
        C = K.shape[-2]
        self.M, self.M1 = np.tri(C, dtype=op.real), np.tri(C, k=-1, dtype=op.real)
        self.exclude = np.where(self.M > 0, 0.0, -np.inf).astype(op.real)[..., None]
        self.gamma = None if Gamma is None else one_run(Gamma)
        self._may_flush = self.gamma is not None and not np.ptp(self.gamma, axis=-2).max(initial=0.0) <= -np.log(FLUSH)
        self.e: Floats | None = None
        if Gamma is not None and Gamma.ndim == 4:
            # Gamma differs between runs by roundings alone. With Gamma0 that of the first run,
            # exp(Gamma_i - Gamma_j) = exp(Gamma0_i - Gamma0_j) e_i / e_j, so the decays need no run axis.
            self.e = np.exp(np.clip(Gamma - self.gamma, -30.0, 30.0))
        strips = K.shape[-3] * C * C * K.shape[-1] * np.dtype(op.real).itemsize
        self._kept: dict[tuple[int, int], tuple[Floats, Floats | None]] | None = {} if strips <= _KEPT_BYTES else None
        self.Qi, self.Ki, self.Kj = Q, K, K
        if self.e is not None:
            self.Qi, self.Ki, self.Kj = Q * self.e, K * self.e, K / self.e

    def forward(self) -> tuple[Floats, Floats]:
        """Aqk [.., X, C, C] (diagonal included) and L (strictly lower)."""
        op, M = self.op, self.M
        if self.Gamma is not None and "QK" in op.contract.sites:
            return anchored_products(op, self.Q, self.K, self.Gamma)
        if self.gamma is None:
            KT = np.swapaxes(self.K, -1, -2)
            return op.dot(self.Q, KT) * M, op.dot(self.K, KT) * self.M1
        both = np.stack(np.broadcast_arrays(self.Qi, self.Ki), axis=-1)  # [.., X, C, K, 2]
        s = np.zeros((*both.shape[:-2], M.shape[0], 2), op.real)
        squares = np.zeros(s.shape[-4:], op.real)
        for at, i, j in self._strips():
            E, weight = self._decay(at, i, j)
            s[..., at, i, j, :] = op.product(E * self.Kj[..., at, None, j, :], both[..., at, i, :, :], 4)
            if weight is not None:
                k, qk = one_run(self.Kj)[at, None, j], one_run(both, 4)[at, i]
                squares[at, i, j] = np.matmul(weight * (k * k), qk * qk)
        Aqk = self._sum(s[..., 0], squares[..., 0], self.K.shape[-1])
        L = self._sum(s[..., 1], squares[..., 1], self.K.shape[-1])
        return Aqk * M, L * self.M1

    def backward(self, dAqk: Floats, dL: Floats) -> tuple[Floats, Floats, Floats]:
        """Return dQ, left and right, each [.., X, C, K].

        dAqk is used without its diagonal, whose terms cancel exactly in dGamma: the caller adds
        dAqk_ii K_i to dQ and dAqk_ii Q_i to dK.
        """
        op = self.op
        dAqk = dAqk * self.M1
        if self.gamma is None:
            return (
                op.dot(dAqk, self.K),
                op.dot(dL, self.K),
                op.dot(np.swapaxes(dAqk, -1, -2), self.Q) + op.dot(np.swapaxes(dL, -1, -2), self.K),
            )
        both = np.stack(np.broadcast_arrays(dAqk, dL), axis=-2)  # [.., X, i, 2, j]
        across = np.swapaxes(both, -1, -3)  # [.., X, j, 2, i]
        runs = np.broadcast_shapes(both.shape[:-4], self.Kj.shape[:-3])
        rows = np.zeros((*runs, *both.shape[-4:-1], self.K.shape[-1]), op.real)
        right = np.zeros((*runs, *self.K.shape[-3:]), op.real)
        row_squares, right_squares = np.zeros(rows.shape[-4:], op.real), np.zeros(right.shape[-3:], op.real)
        b0, a0 = one_run(both, 4) ** 2, one_run(across, 4) ** 2
        for at, i, j in self._strips():
            E, weight = self._decay(at, i, j)
            rows[..., at, i, :, :] = op.product(both[..., at, i, :, j], E * self.Kj[..., at, None, j, :], 4)
            by_q, by_k = (np.swapaxes(E * x[..., at, i, None, :], -2, -3) for x in (self.Qi, self.Ki))
            a = across[..., at, j, :, i]
            right[..., at, j, :] += (op.product(a[..., :1, :], by_q, 4) + op.product(a[..., 1:, :], by_k, 4))[..., 0, :]
            if weight is not None:
                k, q, kj = one_run(self.Ki)[at, i, None], one_run(self.Qi)[at, i, None], one_run(self.Kj)[at, None, j]
                row_squares[at, i] = np.matmul(b0[at, i, :, j], weight * (kj * kj))
                by_q, by_k = (np.swapaxes(weight * (x * x), -2, -3) for x in (q, k))
                a = a0[at, j, :, i]
                right_squares[at, j] += (np.matmul(a[:, :, :1], by_q) + np.matmul(a[:, :, 1:], by_k))[..., 0, :]
        terms = np.arange(self.M.shape[0], dtype=op.real)[:, None]
        dQ = self._sum(rows[..., 0, :], row_squares[..., 0, :], terms)
        left = self._sum(rows[..., 1, :], row_squares[..., 1, :], terms)
        right = self._sum(right, right_squares, 2 * terms[::-1])
        return (dQ, left, right) if self.e is None else (dQ * self.e, left * self.e, right / self.e)

    def _strips(self) -> Iterator[tuple[slice, slice, slice]]:
        """(blocks, rows i, rows j <= i) that cover the lower triangles of all blocks, up to their last token."""
        X, C, K = self.K.shape[-3:]
        size = max(1, _SLAB_BYTES // (_STRIP * C * K * np.dtype(self.op.real).itemsize * (self.op.runs or 1)))
        for first in range(0, X, size):
            at = slice(first, min(first + size, X))
            used = int(self.used[at].max())
            for i in range(0, used, _STRIP):
                end = min(i + _STRIP, used)
                yield at, slice(i, end), slice(0, end)

    def _decay(self, at: slice, i: slice, j: slice) -> tuple[Floats, Floats | None]:
        """E = exp(Gamma_i - Gamma_j) [x, i, j, K], and for noisy arithmetic E^2 (1 + x^2/4).

        The latter is the square of one exponential's deviation in units of u^2, see NoisyOperations. An E below
        F = 2^-126 that becomes 0 or F, as often as keeps its mean, adds E (F - E).
        """
        assert self.gamma is not None
        strip = at.start, i.start
        if self._kept is not None and strip in self._kept:
            return self._kept[strip]
        gamma = self.gamma[at]
        x = gamma[:, i, None, :] - gamma[:, None, j, :]
        x += self.exclude[i, j]
        E = np.exp(x)
        weight = None
        if self.op.noisy:
            weight = np.maximum(x, -200.0, out=x)
            weight *= 0.5
            weight *= weight
            weight += 1.0
            weight *= E
            weight *= E
            if self._may_flush:
                weight += np.where(E < FLUSH, E * (FLUSH - E) / UNIT**2, 0.0)
        if self._kept is not None:
            self._kept[strip] = E, weight
        return E, weight

    def _sum(self, s: Floats, squares: Floats, terms: Floats | float) -> Floats:
        """A sum of products with exponentials, each of relative deviation u."""
        return self.op.accumulated(s, squares, terms, squares) if self.op.noisy else s
