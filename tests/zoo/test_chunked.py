"""The healthy chunked implementation against the token recurrence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from zoo_calls import make_call

from oracles.gates import log_decay
from oracles.recurrence import forward_reverse
from verikda.call import Call, Refused
from verikda.zoo.target import ZooTarget

HEALTHY = ZooTarget()

GRID: dict[str, dict[str, Any]] = {
    "pack": {"lengths": (37, 0, 70, 1, 16)},
    "leading and trailing empties": {"lengths": (0, 5, 0, 33, 0), "tail": 0},
    "only empties": {"lengths": (0, 0)},
    "batch": {"lengths": (75, 75), "packed": False, "H": 2, "G": 1},
    "one token": {"lengths": (1,), "packed": False, "K": 1, "V": 1},
    "no token": {"lengths": (0, 0), "packed": False},
    "wide": {"lengths": (150,), "packed": False, "K": 48, "V": 80, "G": 1},
    "grouped": {"H": 2, "G": 3},
    "no gate": {"gate": "none"},
    "all gates at the bound": {"magnitude": 0.0, "edit": lambda a: a["g"].fill(-5.0), "lengths": (130,)},
    "strong gates": {"magnitude": 50.0, "lengths": (130,)},
    "hard resets": {"lengths": (130,), "edit": lambda a: a["g"].__setitem__(a["g"] < -0.6, -np.inf)},
    "softplus": {"gate": "softplus", "l2norm": True, "sigmoid": True},
    "softplus without A_log": {"gate": "softplus", "A_log": False},
    "bounded": {"gate": "bounded", "lower_bound": -5.0, "safe_gate": True, "l2norm": True},
    "negative eigenvalues": {"sigmoid": True, "neg_eigval": True, "l2norm": True},
    "v first": {"v_first": True},
    "saved intermediates": {"recompute": False},
    "no states": {"h0": False, "dht": False},
    "scale": {"scale": -1.7},
    "repeated keys": {"lengths": (130,), "magnitude": 1e-4, "edit": lambda a: a["k"].__setitem__(..., a["k"][:, :1])},
}


def errors(call: Call) -> dict[str, float]:
    """Relative Frobenius error of every result."""
    got, truth = HEALTHY.run(call).outputs, forward_reverse(call.problem)
    assert got.keys() == truth.keys()
    norm = {n: float(np.linalg.norm(t)) for n, t in truth.items()}
    return {n: float(np.linalg.norm(got[n] - t)) / (norm[n] or 1.0) for n, t in truth.items()}


UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def limit(call: Call) -> float:
    """64 roundings to storage, the length of the longest sum in a chunk, and the rounding of a sum of 64 gates."""
    g = log_decay(call.problem, call.problem.g)
    span = 0.0 if g is None or g.size == 0 else 64 * float(np.abs(g[np.isfinite(g)]).mean())
    return 64 * UNIT[call.dtypes["q"]] + span * UNIT["float32"]


@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("name", GRID)
def test_healthy_is_the_recurrence_to_float32(name: str, chunk: int) -> None:
    call = make_call(**GRID[name], chunk=chunk)
    worst = errors(call)
    assert max(worst.values()) < limit(call), worst


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", GRID)
def test_healthy_is_the_recurrence_to_16_bits(name: str, dtype: str) -> None:
    call = make_call(**GRID[name], chunk=64, dtype=dtype)
    worst = errors(call)
    assert max(worst.values()) < limit(call), worst


@pytest.mark.parametrize("layout", ["sliced", "strided", "expanded", "misaligned"])
def test_layout_and_poison_change_no_bit(layout: str) -> None:
    call = make_call(dtype="bfloat16", g_dtype="bfloat16")
    plain = HEALTHY.run(call)
    for poison in (None, np.nan, 1e30):
        other = HEALTHY.run(replace(call, layout=layout, poison=poison))
        assert other.changed == ()
        for name, value in plain.outputs.items():
            np.testing.assert_array_equal(other.outputs[name], value, err_msg=name)


def test_recompute_changes_no_bit() -> None:
    call = make_call(dtype="float16")
    a, b = HEALTHY.run(call), HEALTHY.run(replace(call, recompute=False))
    for name, value in a.outputs.items():
        np.testing.assert_array_equal(b.outputs[name], value, err_msg=name)


def test_results_have_their_arguments_dtypes() -> None:
    call = make_call(dtype="bfloat16", g_dtype="bfloat16", gate="softplus")
    dtypes = HEALTHY.run(call).dtypes
    assert dtypes == {"ht": "float32", "dh0": "float32", "dA_log": "float32", "ddt_bias": "float32"} | dict.fromkeys(
        ("o", "dq", "dk", "dv", "dg"), "bfloat16"
    ) | {"dbeta": "float32"}


def test_unusable_arguments_are_refused() -> None:
    call = make_call(neg_eigval=True)
    with pytest.raises(Refused, match="allow_neg_eigval needs"):
        HEALTHY.run(call)
