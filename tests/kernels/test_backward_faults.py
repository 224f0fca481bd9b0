"""Faults planted in the backward kernels that need inputs of their own; `verikda.zoo.mutations` has the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from host_backward import run_backward
from test_backward import contract_of

from kernels_cuda.modules import Host
from oracles.recurrence import forward_reverse
from verikda.call import Call
from verikda.case import Case
from verikda.floor import LIMIT, judge
from verikda.inputs import make_call
from verikda.zoo.cuda import Changed


def call_of() -> Call:
    knobs: dict[str, Any] = {"lengths": (100,), "K": 64, "V": 24, "dtype": "bfloat16", "h0": "random", "dht": True}
    return make_call(Case(gate_magnitude=0.05, key_regime="collinear", seed=5, **knobs), backward=True)


@pytest.mark.parametrize("fault", [False, True])
def test_what_cancels_has_one_factor(fault: bool) -> None:
    """With beta near 1 a decay of the chunk that is not the last row's to the bit leaves the floor.

    Keys are unit vectors, and the one that comes last in a chunk is written there with 1 - beta = 2e-4.
    """
    other_sum = ("prepare.cu", ": f0.value() * e0;", ": exp_decay<T>(before[0] + total[64 * group]);")
    knobs: dict[str, Any] = {"key_regime": "orthogonal", "beta_regime": "near_one", "value_regime": "converged"}
    case = Case(
        lengths=(65,), heads=2, K=32, chunk_size=32, dtype="float32", do_regime="last_token_only", seed=2, **knobs
    )
    call = make_call(case, backward=True)
    out, dtypes = run_backward(Changed([other_sum]) if fault else Host(), call)
    judgement = judge(out, dtypes, call.problem, contract_of(call), backward=True)
    ratios = {name: x.ratio for name, x in judgement.outputs.items()}
    assert any(x is not None and x > LIMIT for x in ratios.values()) == fault, ratios


PAIRS: dict[str, Any] = {
    "lengths": (45, 45, 45), "heads": 4, "K": 2, "V": 15, "dtype": "float16", "g_dtype": "same",
    "gate_regime": "zero_rows", "key_regime": "collinear", "query_regime": "zero_rows", "beta_regime": "binary",
    "value_regime": "one_large_row", "do_regime": "ints", "gate_magnitude": 50.0, "do_exponent": -6, "dht": True,
    "gate_in_kernel": True, "A_log": True, "dt_bias": True, "qk_l2norm": True, "beta_sigmoid": True,
    "state_v_first": True, "seed": 13070,
}  # fmt: skip


@pytest.mark.parametrize("fault", [False, True])
def test_a_pair_of_tokens_counts_alike_on_both_sides_of_dg(fault: bool) -> None:
    """Open gates among closed ones: in front of a closed gate all that is left of dg is how well pairs cancel."""
    once = (
        "backward_wide.cuh",
        "void as_split(float& x, float& y) {\n    if constexpr (is_16bit<T>) {",
        "void as_split(float& x, float& y) {\n    if constexpr (false && is_16bit<T>) {",
    )
    call = make_call(Case(**PAIRS), backward=True)
    out, dtypes = run_backward(Changed([once]) if fault else Host(), call)
    ratio = judge(out, dtypes, call.problem, contract_of(call), backward=True).outputs["dg"].ratio
    assert ratio is not None
    assert (ratio > LIMIT) == fault, ratio


def test_rounding_that_leaks_through_a_reset_is_seen() -> None:
    call = make_call(Case(lengths=(70,), K=64, V=24, dtype="bfloat16", h0="random", gate_magnitude=1.0), backward=True)
    p = call.problem
    assert p.g is not None
    g = p.g.copy()
    g[0, (20, 33)] = -np.inf
    call = replace(call, problem=replace(p, g=g))
    fault = ("backward_intra.cu", "if (!(decay > no_decay_left<T>)) aG", "if (false) aG")
    out, _ = run_backward(Changed([fault]), call)
    assert (out["dg"][np.isneginf(g)] != 0).any()


def test_total_minus_prefix_is_seen() -> None:
    """A suffix sum that passes through the total loses late gradients beside large early ones."""
    fault = (
        "backward_common.cuh",
        "    low += shfl(high, l % 4);\n    return shfl(low, l % 4);\n",
        "    low += shfl(high, l % 4);\n    const float total = shfl(low, l % 4);\n"
        "    low = (low - total) + total, high = (high - total) + total;\n    return total;\n",
    )
    call = make_call(Case(lengths=(64,), K=16, V=16, dtype="float32", gate_magnitude=0.1), backward=True)
    p = call.problem
    assert p.do is not None
    do = p.do * np.where(np.arange(64) < 8, 2.0**40, 1.0)[None, :, None, None]
    call = replace(call, problem=replace(p, do=do))
    late = forward_reverse(call.problem)["dg"][:, 8:]
    out, _ = run_backward(Changed([fault]), call)
    assert np.abs(out["dg"][:, 8:] - late).max() > 1e-5 * np.abs(late).max()
