"""Forward of the chunked algorithm under a rounding contract.

    Gamma = inclusive cumsum of g inside the chunk;  gC = its last row;  Q = scale q
    A = (I + diag(beta) L)^-1        U = A diag(beta) V        W = A diag(beta) (exp Gamma * K)
    Kg = exp(gC - Gamma) * K         Qg = exp Gamma * Q        Vnew = U - W S
    O = Qg S + Aqk Vnew              S <- diag(exp gC) S + Kg^T Vnew

Aqk and L are in `oracles.gated`. Sites round where `Operations.site` is called with their name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oracles.gated import GatedProducts
from oracles.layout import Layout
from oracles.operations import Operations, times
from oracles.preactivation import Activated
from oracles.problem import Problem
from oracles.rounding import Floats


@dataclass
class Blocks:
    """Operands and intermediates of the forward, one block per chunk, sequence and value head.

    Attributes
    ----------
    Q, K, V, beta : [.., X, C, K], [.., X, C, K], [X, C, V], [.., X, C, 1].
    Gamma, eGamma, eTail : [.., X, C, K] or None without a gate; exp Gamma and exp(gC - Gamma).
    decay : [.., X, K, 1] or None; exp gC.
    products : Aqk, L and their reverse.
    Aqk, L, A : [.., X, C, C].    betaV, betaK, U, W, Kg, Qg, Vnew : [.., X, C, .].
    S : [.., X, K, V], the copy of the state before each chunk that products read.
    o : [.., X, C, V].
    ht : [.., N*HV, K, V], sequences in the layout's order.
    """

    Q: Floats
    K: Floats
    V: Floats
    beta: Floats
    Gamma: Floats | None
    eGamma: Floats | None
    eTail: Floats | None
    decay: Floats | None
    products: GatedProducts
    Aqk: Floats
    L: Floats
    A: Floats
    betaV: Floats
    betaK: Floats
    U: Floats
    W: Floats
    Kg: Floats
    Qg: Floats
    Vnew: Floats
    S: Floats
    o: Floats
    ht: Floats


def forward(problem: Problem, layout: Layout, x: Activated, op: Operations) -> Blocks:
    """Forward of all blocks."""
    heads = problem.v.shape[2]
    Q, K, V, beta = (layout.blocks(y, heads) for y in (x.q, x.k, x.v, x.beta))
    Gamma = eGamma = eTail = decay = None
    if x.g is not None:
        Gamma = op.cumsum(layout.blocks(x.g, heads), exponent=True)
        eGamma, eTail = op.exp(Gamma), op.exp(Gamma[..., -1:, :] - Gamma)
        decay = np.swapaxes(eGamma[..., -1:, :], -1, -2)
    products = GatedProducts(op, Q, K, Gamma, layout.used(heads))
    Aqk, L = products.forward()
    A = op.site("A", inverse(beta * L, op))
    Aqk = op.site("Aqk", Aqk)
    betaV = op.site("betaV", beta * V)
    betaK = op.site("betaK", beta * times(K, eGamma))
    U, W = op.site("U", op.dot(A, betaV)), op.site("W", op.dot(A, betaK))
    Kg, Qg = op.site("Kg", times(K, eTail)), op.site("Qg", times(Q, eGamma))

    N, dk, dv = len(problem.spans), K.shape[-1], V.shape[-1]
    h0 = np.zeros((N, heads, dk, dv)) if problem.h0 is None else problem.h0
    state = op.state(h0[layout.order].reshape(-1, dk, dv))
    S, Vnew = op.empty(V.shape[0], dk, dv), op.empty(*V.shape)
    for at, running in op.steps(layout.slices(heads)):
        copy = op.site("S", state[..., :running, :, :])
        S[..., at, :, :] = copy
        Vnew[..., at, :, :] = op.site("Vnew", U[..., at, :, :] - op.dot(W[..., at, :, :], copy))
        added = op.dot(np.swapaxes(Kg[..., at, :, :], -1, -2), Vnew[..., at, :, :])
        kept = times(state[..., :running, :, :], None if decay is None else decay[..., at, :, :])
        state[..., :running, :, :] = op.wide(kept + added)
    o = op.dot(Qg, S) + op.dot(Aqk, Vnew)
    return Blocks(
        Q, K, V, beta, Gamma, eGamma, eTail, decay, products, Aqk, L, A, betaV, betaK, U, W, Kg, Qg, Vnew, S, o, state
    )


def inverse(N: Floats, op: Operations) -> Floats:
    """(I + N)^-1 for strictly lower N [.., X, C, C], by the contract's method.

    substitution : row by row inside 16 x 16 blocks, A_i = e_i - sum_{j<i} N_ij A_j, then blocks are merged,
        A_21 = -A_22 N_21 A_11, doubling their size.
    neumann : (I - N)(I + N^2)(I + N^4)..., exact because N^C = 0; loses digits when powers of N grow.
    """
    C = N.shape[-1]
    if op.contract.inverse == "substitution":
        return op.substituted(N)
    A, power, reach = np.eye(C, dtype=op.real) - N, N, 2
    while reach < C:
        power = op.dot(power, power)
        A, reach = op.wide(A + op.dot(A, power)), 2 * reach
    return A
