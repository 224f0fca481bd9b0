"""Hypothesis tries to find a small problem on which float64 and 50 digits disagree."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from oracles import multiprecision
from oracles.certify import LIMIT, errors
from oracles.problem import Problem

LEVELS = [0.0, -1e-300, -1e-9, -0.1, -5.0, -60.0, -745.0, -1e6, -np.inf]
RAW = [0.0, 1e-9, -0.5, 2.0, -9.0, 30.0, -40.0, 200.0, -745.0]
KEYS = ["unit", "same", "zero", "axis"]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Geometry, flags and regimes are drawn; the elements come from one seed."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    packed = draw(st.booleans())
    tail = draw(st.integers(0, 2)) if packed else 0
    B, T = (1, sum(lengths) + tail) if packed else (draw(st.integers(1, 2)), lengths[0])
    N = len(lengths) if packed else B
    H, G, K, V = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    HV = H * G
    gate = draw(st.sampled_from(["none", "log", "softplus", "bounded"]))
    inside = gate in ("softplus", "bounded")
    norm, sigmoid, keys = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from(KEYS))
    r = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def maybe(*shape: int) -> Any:
        return r.normal(size=shape) if draw(st.booleans()) else None

    k = r.normal(size=(B, T, H, K))
    if keys == "same":
        k = np.broadcast_to(np.ones(K), k.shape).copy()
    elif keys == "axis":
        k = np.eye(K)[r.integers(0, K, size=(B, T, H))]
    k /= np.maximum(np.sqrt((k * k).sum(-1, keepdims=True)), 1e-300)
    if keys == "zero":
        k *= 0
    levels = RAW if inside else draw(st.lists(st.sampled_from(LEVELS), min_size=1, max_size=3))
    event(f"gate {gate}")
    event(f"keys {keys}")
    return Problem(
        q=r.normal(size=(B, T, H, K)),
        k=k,
        v=r.normal(size=(B, T, HV, V)),
        g=None if gate == "none" else r.choice(levels, size=(B, T, HV, K)),
        beta=r.choice(RAW, size=(B, T, HV)) if sigmoid else r.choice([0.0, 0.3, 1.0, 1.9, 2.0], size=(B, T, HV)),
        scale=draw(st.sampled_from([1.0, 0.3, -2.0, 0.0])),
        h0=maybe(N, HV, K, V),
        cu_seqlens=np.cumsum([0, *lengths]) if packed else None,
        gate=gate,
        lower_bound=draw(st.sampled_from([-5.0, -0.01])) if gate == "bounded" else None,
        A_log=maybe(HV) if inside else None,
        dt_bias=maybe(HV, K) if inside else None,
        qk_l2norm=norm,
        beta_sigmoid=sigmoid,
        allow_neg_eigval=sigmoid and draw(st.booleans()),
        do=maybe(B, T, HV, V),
        dht=maybe(N, HV, K, V),
    )


def sixteen_digits(problem: Problem, exact: dict[str, Any]) -> dict[str, float]:
    """Relative error to expect of the definition in 16 digits, from runs in 11 to 14."""
    expected = dict.fromkeys(exact, 0.0)
    for digits in (11, 12, 13, 14):
        rough = multiprecision.forward_reverse(problem, digits)
        with mpmath.workdps(50):
            for name, x in exact.items():
                worst = max((abs(a - b) for a, b in zip(rough[name].flat, x.flat, strict=True)), default=0)
                scale = max(np.finfo(np.float64).tiny, *(abs(a) for a in x.flat), 0)
                expected[name] = max(expected[name], float(worst / scale) * 10.0 ** (digits - 16))
    return expected


@settings(max_examples=100)
@given(problems())
def test_any_small_problem_is_certified(problem: Problem) -> None:
    """Within the certificate's limit or, where large terms cancel in an output, what 16 digits can do."""
    found = errors(problem)
    wrong = {name for name, error in found.items() if not error <= LIMIT}
    if wrong:
        event("output by cancellation")
        expected = sixteen_digits(problem, multiprecision.forward_reverse(problem))
        for name in wrong:
            assert found[name] <= 30 * expected[name], (name, found[name], expected[name])
