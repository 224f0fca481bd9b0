"""The recurrence in arbitrary precision, for certifying the float64 one on small shapes.

Only the definition is written here:

    S~_t = diag(exp g_t) S_{t-1}          r_t = v_t - S~_t^T k_t
    S_t  = S~_t + beta_t k_t r_t^T        o_t = scale * S_t^T q_t

Gradients are not: every scalar operation is recorded and differentiated by the chain rule, so
that a slip in the hand-derived reverse of `recurrence` cannot be repeated here. Nothing but
`Problem` is shared with the float64 code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt

from oracles.problem import L2NORM_EPS, Array, Problem

__all__ = ["forward", "forward_reverse"]

MpArray = npt.NDArray[Any]
"""An array of mpmath numbers (or, inside this file, of recorded scalars)."""


class _Scalar:
    """A number that remembers what it was computed from."""

    __slots__ = ("adjoint", "parents", "tape", "value")

    def __init__(self, tape: list[_Scalar], value: Any, *parents: tuple[_Scalar, Any]) -> None:
        self.tape, self.value, self.parents, self.adjoint = tape, value, parents, mpmath.mpf(0)
        tape.append(self)

    def __add__(self, other: _Scalar) -> _Scalar:
        return _Scalar(self.tape, self.value + other.value, (self, 1), (other, 1))

    def __sub__(self, other: _Scalar) -> _Scalar:
        return _Scalar(self.tape, self.value - other.value, (self, 1), (other, -1))

    def __mul__(self, other: _Scalar) -> _Scalar:
        return _Scalar(self.tape, self.value * other.value, (self, other.value), (other, self.value))


def _chain(tape: list[_Scalar]) -> None:
    """Adjoints of everything, from those already set; a value is recorded after its parents."""
    for node in reversed(tape):
        if node.adjoint:
            for parent, slope in node.parents:
                parent.adjoint += node.adjoint * slope


def _function(value: Callable[[Any], Any], slope: Callable[[Any], Any]) -> Callable[[MpArray], MpArray]:
    def apply(x: Any) -> Any:
        if isinstance(x, _Scalar):
            return _Scalar(x.tape, value(x.value), (x, slope(x.value)))
        return value(x)

    lifted: Callable[[MpArray], MpArray] = np.frompyfunc(apply, 1, 1)
    return lifted


def _sigmoid_of(x: Any) -> Any:
    return 1 / (1 + mpmath.exp(-x))


_exp = _function(mpmath.exp, mpmath.exp)
_softplus = _function(lambda x: mpmath.log1p(mpmath.exp(x)), _sigmoid_of)
_sigmoid = _function(_sigmoid_of, lambda x: _sigmoid_of(x) * _sigmoid_of(-x))
_rsqrt = _function(lambda x: 1 / mpmath.sqrt(x), lambda x: -1 / (2 * x * mpmath.sqrt(x)))


@dataclass
class _Inputs:
    """Arguments of a problem as arrays of scalars, and how a constant is made into one."""

    arrays: dict[str, MpArray]
    constant: Callable[[Any], Any]


def _lift(problem: Problem, tape: list[_Scalar] | None) -> _Inputs:
    def constant(x: Any) -> Any:
        number = mpmath.mpf(float(x))
        return number if tape is None else _Scalar(tape, number)

    lift = np.frompyfunc(constant, 1, 1)
    arrays = {}
    for name in ("q", "k", "v", "g", "beta", "h0", "A_log", "dt_bias"):
        given = getattr(problem, name)
        if given is not None:
            with np.errstate(invalid="ignore"):  # rows outside every sequence may hold NaN
                arrays[name] = np.asarray(lift(given), dtype=object).reshape(given.shape)
    return _Inputs(arrays, constant)


def _unit(x: MpArray, constant: Callable[[Any], Any]) -> MpArray:
    """One vector over sqrt(sum x^2 + eps)."""
    inverse = np.array([_rsqrt(x @ x + constant(L2NORM_EPS))], dtype=object)
    y: MpArray = x * inverse
    return y


def _log_decay(problem: Problem, inputs: _Inputs, row: tuple[int, int, int]) -> MpArray | None:
    """Log decay g of one token and value head, [K]."""
    x = inputs.arrays.get("g")
    if x is None:
        return None
    z: MpArray = x[row]
    head, one = row[2], inputs.constant(1)
    if problem.gate == "log":
        return z
    if problem.dt_bias is not None:
        z = z + inputs.arrays["dt_bias"][head]
    multiplier = one if problem.A_log is None else _exp(inputs.arrays["A_log"][head])
    if problem.gate == "softplus":
        g: MpArray = _softplus(z) * (inputs.constant(-1) * multiplier)
    else:
        g = _sigmoid(z * multiplier) * inputs.constant(problem.lower_bound)
    return g


def _outputs(problem: Problem, inputs: _Inputs) -> tuple[MpArray, MpArray]:
    """(o, ht); o of a row outside every sequence is 0."""
    x, constant = inputs.arrays, inputs.constant
    q, k, v, beta = x["q"], x["k"], x["v"], x["beta"]
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    spans, zero, scale = problem.spans, constant(0), constant(problem.scale)
    o = np.full(v.shape, zero, dtype=object)
    ht = np.full((len(spans), HV, K, V), zero, dtype=object)
    for n, (b, first, last) in enumerate(spans):
        for head in range(HV):
            shared = head // (HV // H)
            S = ht[n, head] if problem.h0 is None else x["h0"][n, head]
            for t in range(first, last):
                qt, kt, write = q[b, t, shared], k[b, t, shared], beta[b, t, head]
                if problem.qk_l2norm:
                    qt, kt = _unit(qt, constant), _unit(kt, constant)
                if problem.beta_sigmoid:
                    write = _sigmoid(write) * constant(2 if problem.allow_neg_eigval else 1)
                g = _log_decay(problem, inputs, (b, t, head))
                if g is not None:
                    S = _exp(g)[:, None] * S
                r = v[b, t, head] - kt @ S
                S = S + np.outer(kt * write, r)
                o[b, t, head] = (qt @ S) * scale
            ht[n, head] = S
    return o, ht


def _seed(nodes: MpArray, gradient: Array) -> None:
    for node, value in zip(nodes.flat, gradient.flat, strict=True):
        node.adjoint += mpmath.mpf(float(value))


def forward(problem: Problem, digits: int = 50) -> dict[str, MpArray]:
    """Outputs with `digits` significant decimal digits in every operation.

    Parameters
    ----------
    problem : small; the cost is about 20 us for every token, head, key and value channel.
    digits : working precision, at least 15.

    Returns
    -------
    dict
        "o" [B,T,HV,V] and "ht" [N,HV,K,V], object arrays of `mpmath.mpf`.
    """
    with mpmath.workdps(digits):
        o, ht = _outputs(problem, _lift(problem, None))
    return {"o": o, "ht": ht}


def forward_reverse(problem: Problem, digits: int = 50) -> dict[str, MpArray]:
    """Outputs and gradients of the loss <do, o> + <dht, ht>.

    Parameters
    ----------
    problem, digits : as for `forward`; about ten times its cost.

    Returns
    -------
    dict
        The keys of `oracles.recurrence.forward_reverse`, object arrays of `mpmath.mpf`.
    """
    with mpmath.workdps(digits):
        tape: list[_Scalar] = []
        inputs = _lift(problem, tape)
        o, ht = _outputs(problem, inputs)
        if problem.do is not None:
            for b, first, last in problem.spans:
                _seed(o[b, first:last], problem.do[b, first:last])
        if problem.dht is not None:
            _seed(ht, problem.dht)
        _chain(tape)
        values = np.frompyfunc(lambda node: node.value, 1, 1)
        adjoints = np.frompyfunc(lambda node: node.adjoint, 1, 1)
        results = {"o": values(o), "ht": values(ht)}
        for name, array in inputs.arrays.items():
            results["d" + name] = adjoints(array)
    return results
