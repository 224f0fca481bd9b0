"""The triangular inverse A = (I + diag(beta) L)^-1."""

from __future__ import annotations

import numpy as np

from verikda.zoo.decay import tf32
from verikda.zoo.faults import Fault
from verikda.zoo.gates import Array


def inverse(N: Array, fault: Fault) -> Array:
    """(I + N)^-1 of strictly lower N [HV,C,C] by forward substitution."""
    C = N.shape[-1]
    eye = np.eye(C, dtype=np.float32)
    if fault is Fault.INVERSE_FIRST_ORDER:
        return eye - N
    if fault is Fault.INVERSE_TRUNCATED:
        return np.asarray((eye - N) @ (eye + N @ N) @ (eye + N @ N @ N @ N))
    if fault is Fault.INVERSE_FP16_NEUMANN:
        return _neumann16(N)
    if fault is Fault.INVERSE_BLOCKS_NOT_MERGED:
        N = N * np.kron(np.eye(C // 16), np.ones((16, 16))).astype(np.float32)
    if fault is Fault.INVERSE_LAST_MERGE_DROPPED and C == 64:
        N = N * np.kron(np.eye(2), np.ones((32, 32))).astype(np.float32)
    if fault is Fault.INVERSE_TF32:
        N = tf32(N)
    A = np.zeros_like(N)
    for i in range(C):
        A[:, i] = eye[i] - (N[:, i, None, :i] @ A[:, :i])[:, 0]
        if fault is Fault.MASK_L_INCLUSIVE:
            A[:, i] /= 1 + N[:, i, i, None]
    return A


def _neumann16(N: Array) -> Array:
    """(I - N)(I + N^2)(I + N^4)... with every power and product rounded to float16."""

    def half(x: Array) -> Array:
        return np.asarray(x.astype(np.float16), np.float32)

    eye = np.eye(N.shape[-1], dtype=np.float32)
    A, power = half(eye - N), half(N)
    for _ in range(int(np.log2(N.shape[-1])) - 1):
        power = half(power @ power)
        A = half(A @ (eye + power))
    return A
