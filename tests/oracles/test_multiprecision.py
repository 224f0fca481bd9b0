"""The float64 recurrence agrees with 50 digits in every regime, and the 50 digits with themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest

from oracles import certify, multiprecision, recurrence
from oracles.certify import LIMIT, REGIMES, errors, relative_error
from oracles.problem import Problem


@pytest.mark.parametrize("regime", REGIMES)
def test_float64_is_certified(regime: str) -> None:
    found = errors(REGIMES[regime]())
    assert found
    assert max(found.values()) <= LIMIT, found


def test_the_regimes_cover_every_output() -> None:
    problem = REGIMES["packed, everything fused"]()
    assert set(recurrence.forward_reverse(problem)) == {
        *("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias")
    }


@pytest.mark.parametrize("name", ["o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias"])
def test_an_error_of_1e_11_in_any_output_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = recurrence.forward_reverse

    def wrong(problem: Problem) -> dict[str, Any]:
        results = right(problem)
        array = results[name].copy()
        array.flat[np.abs(array).argmax()] *= 1 + 1e-11
        return results | {name: array}

    monkeypatch.setattr(recurrence, "forward_reverse", wrong)
    found = errors(REGIMES["packed, everything fused"]())
    assert found[name] > LIMIT
    assert max(error for other, error in found.items() if other != name) <= LIMIT


def test_command_reports_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(certify, "REGIMES", {"one token": REGIMES["one token"]})
    assert certify.main([]) == 0
    assert "certified" in capsys.readouterr().out
    monkeypatch.setattr(certify, "LIMIT", 0.0)
    assert certify.main([]) == 1
    assert "NOT certified" in capsys.readouterr().out


def test_relative_error_sees_what_it_must() -> None:
    exact = np.array([mpmath.mpf(2), mpmath.mpf(-1)], dtype=object)
    assert relative_error(np.array([2.0, -1.0]), exact) == 0
    assert relative_error(np.array([2.0, 1.0]), exact) == 1
    assert relative_error(np.array([2.0, np.nan]), exact) == np.inf
    assert relative_error(np.array([np.inf, -1.0]), exact) == np.inf
    assert relative_error(np.array([1e-30, 0.0]), 0 * exact) > 1
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(np.zeros(3), exact)


DERIVED = {
    "q": "dq",
    "k": "dk",
    "v": "dv",
    "g": "dg",
    "beta": "dbeta",
    "h0": "dh0",
    "A_log": "dA_log",
    "dt_bias": "ddt_bias",
}
BITS = 20
"""Inputs are multiples of 2^-BITS, so that x +- 2^-BITS is exact in float64."""


@pytest.mark.parametrize("bound", [None, -3.0], ids=["softplus", "bounded"])
def test_gradients_are_differences(bound: float | None) -> None:
    """Richardson's central differences in random directions: error of order 2^-80."""
    r = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return np.round(np.ldexp(r.normal(size=shape), BITS)) / 2**BITS

    problem = Problem(
        q=draw(1, 6, 1, 2),
        k=draw(1, 6, 1, 2),
        v=draw(1, 6, 2, 3),
        g=draw(1, 6, 2, 2),
        beta=draw(1, 6, 2),
        scale=0.625,
        h0=draw(2, 2, 2, 3),
        cu_seqlens=np.array([0, 2, 5]),
        gate="softplus" if bound is None else "bounded",
        lower_bound=bound,
        A_log=draw(2),
        dt_bias=draw(2, 2),
        qk_l2norm=True,
        beta_sigmoid=True,
        allow_neg_eigval=True,
        do=draw(1, 6, 2, 3),
        dht=draw(2, 2, 2, 3),
    )
    exact = multiprecision.forward_reverse(problem, 60)

    def loss(shifted: Problem) -> Any:
        f = multiprecision.forward(shifted, 60)
        return sum(a * mpmath.mpf(b) for a, b in zip(f["o"][:, :5].flat, problem.do[:, :5].flat, strict=True)) + sum(
            a * mpmath.mpf(b) for a, b in zip(f["ht"].flat, problem.dht.flat, strict=True)
        )

    with mpmath.workdps(60):
        for argument, gradient in DERIVED.items():
            x = getattr(problem, argument)
            direction = r.integers(-3, 4, size=x.shape).astype(float)

            def difference(steps: int, argument: str = argument, x: Any = x, direction: Any = direction) -> Any:
                h = steps / 2**BITS
                up, down = (loss(replace(problem, **{argument: x + s * h * direction})) for s in (1, -1))
                return (up - down) / (2 * mpmath.mpf(h))

            numeric = (4 * difference(1) - difference(2)) / 3
            analytic = sum(a * mpmath.mpf(b) for a, b in zip(exact[gradient].flat, direction.flat, strict=True))
            assert abs(numeric - analytic) < mpmath.mpf(10) ** -19 * max(1, abs(analytic)), argument
            assert abs(analytic) > 1e-3, f"{argument}: nothing was tested"


def test_digits_are_used() -> None:
    problem = REGIMES["softplus"]()
    few, many = multiprecision.forward_reverse(problem, 25), multiprecision.forward_reverse(problem, 60)
    for name in few:
        with mpmath.workdps(60):
            worst = max(abs(a - b) for a, b in zip(few[name].flat, many[name].flat, strict=True))
            assert 0 < worst < mpmath.mpf(10) ** -20, name


def test_precision_of_the_caller_is_left_alone() -> None:
    before = mpmath.mp.dps
    multiprecision.forward(REGIMES["one token"](), 77)
    assert mpmath.mp.dps == before
