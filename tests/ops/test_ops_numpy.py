"""The operators on NumPy arrays; forward and backward by themselves, every intermediate against the exact emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import small

from oracles.arithmetic import Exact
from oracles.chunked import emulate
from oracles.contract import chunked32
from oracles.problem import Problem
from oracles.recurrence import forward_reverse
from verikda.ops import (  # fmt: skip
    chunk_delta_rule,
    chunk_delta_rule_bwd,
    chunk_delta_rule_fwd,
    chunk_kda,
    chunk_kda_bwd,
    chunk_kda_fwd,
    engine,
    recurrent_kda,
)
from verikda.ops.engine import Ready
from verikda.ops.validate import check_call

PROBLEMS: dict[str, dict[str, Any]] = {
    "batch": {"B": 2},
    "pack": {"T": 40, "offsets": [0, 5, 5, 36]},
    "softplus": {"gate": "softplus", "parameters": True, "T": 35},
}
PER_TOKEN = ("Gamma", "Aqk", "A", "W", "U", "Qg", "Kg", "Vnew")
RETURNED = ("o", "ht", *PER_TOKEN, "S", "h0")
GRADIENTS = ("dq", "dk", "dv", "dbeta", "dg", "dh0", "dA_log", "ddt_bias")
PLAIN = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")


def low(p: Problem, v_first: bool = False, **own: str) -> dict[str, Any]:
    """Arguments of chunk_kda_fwd."""
    given = small.arguments(p, small.in_numpy(**own), v_first)
    return {n: x for n, x in given.items() if n not in PLAIN}


def rows(p: Problem, inner: np.ndarray) -> np.ndarray:
    """An intermediate of the emulator, [N,HV,chunks,C,D], per token as [B,T,HV,D]."""
    out = np.zeros((p.q.shape[0], p.q.shape[1], *(inner.shape[1], inner.shape[-1])))
    for n, (b, first, last) in enumerate(p.spans):
        flat = inner[n].reshape(inner.shape[1], -1, inner.shape[-1])
        out[b, first:last] = flat[:, : last - first].swapaxes(0, 1)
    return out


def backward_arguments(given: dict[str, Any]) -> dict[str, Any]:
    return {n: x for n, x in given.items() if n not in ("g", "output_final_state")}


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_intermediate(name):
    p = small.make(**PROBLEMS[name])
    answer = dict(zip(RETURNED, chunk_kda_fwd(**low(p), disable_recompute=True), strict=True))
    trace = emulate(p, chunked32(small.CHUNK), Exact(), backward=False, intermediates=True)
    exact = trace.intermediates
    for n in PER_TOKEN:
        wanted = rows(p, exact[n])
        small.close(answer[n], wanted / np.log(2) if n == "Gamma" else wanted)
    chunks = [(n, c) for n, (_, a, b) in enumerate(p.spans) for c in range(-(-(b - a) // small.CHUNK))]
    h = answer["S"].reshape(-1, *answer["S"].shape[2:])
    assert answer["S"].shape[:2] == (p.q.shape[0], len(chunks) // p.q.shape[0])
    small.close(h, np.stack([exact["S"][n, :, c] for n, c in chunks]))
    small.close(answer["o"], trace.outputs["o"])
    small.close(answer["ht"], trace.outputs["ht"])


def test_what_is_not_kept_is_none():
    p = small.make(gate="softplus", parameters=True)
    given = low(p)
    parts = dict(zip(RETURNED, chunk_kda_fwd(**given), strict=True))
    assert {n for n, x in parts.items() if x is None} == {"Gamma", "W", "U", "Qg", "Kg", "Vnew", "S"}
    assert parts["h0"] is given["initial_state"]
    with_h = dict(zip(RETURNED, chunk_kda_fwd(**given, return_intermediate_states=True), strict=True))
    assert with_h["S"].shape == (1, 2, 2, 5, 3)
    assert with_h["W"] is None
    pre = dict(zip(RETURNED, chunk_kda_fwd(**low(small.make()) | {"output_final_state": False}), strict=True))
    assert pre["Gamma"].dtype == np.float32
    assert pre["ht"] is None


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("v_first", [False, True])
def test_backward(name, v_first):
    p = small.make(**PROBLEMS[name])
    given, wanted = low(p, v_first), forward_reverse(p)
    _, _, g, Aqk, Akk, *inner, h, h0 = chunk_kda_fwd(**given, disable_recompute=True)
    start = {"Aqk": Aqk, "Akk": Akk, "do": p.do.astype(np.float32), "g_org": given["g"]}
    start["dht"] = np.ascontiguousarray(p.dht.swapaxes(-1, -2) if v_first else p.dht, np.float32)
    saved = {"g": g, "h": h, **dict(zip(("w", "u", "qg", "kg", "v_new"), inner, strict=True))}
    again = chunk_kda_bwd(**backward_arguments(given), **start)
    kept = chunk_kda_bwd(**backward_arguments(given), **start, **saved, disable_recompute=True)
    # exp gC is 2^g of another exp2, 2 ulp each, and of a g in units of log2, rounded: half an ulp of g times ln 2
    tolerance = 2.0**-24 * (4 + (0 if g is None else np.abs(g).max()))
    for n, x, y in zip(GRADIENTS, again, kept, strict=True):
        if x is None:
            assert y is None
            assert wanted.get(n) is None
            continue
        argument = {"dbeta": "beta", "dh0": "initial_state"}.get(n, n[1:])
        assert x.shape == given[argument].shape
        turned = x.swapaxes(-1, -2) if n == "dh0" and v_first else x
        small.close(turned.reshape(wanted[n].shape), wanted[n])
        small.close(y, np.asarray(x, np.float64), tolerance)
    assert h0 is given["initial_state"]


def test_given_intermediates_are_used():
    p = small.make()
    given = low(p)
    _, _, _, Aqk, Akk, *_ = chunk_kda_fwd(**given)
    start = {"do": p.do.astype(np.float32), "g_org": given["g"]}
    right = chunk_kda_bwd(**backward_arguments(given), **start, Aqk=Aqk, Akk=Akk)
    for name, other in (("Aqk", {"Aqk": 2 * Aqk, "Akk": Akk}), ("Akk", {"Aqk": Aqk, "Akk": 2 * Akk})):
        assert not np.array_equal(chunk_kda_bwd(**backward_arguments(given), **start, **other)[2], right[2]), name


def test_delta_rule():
    p = small.make(gate="none", B=2)
    given = small.arguments(p, small.in_numpy())
    wanted = forward_reverse(p)
    plain = {n: x for n, x in given.items() if n not in (*PLAIN, "state_v_first")}
    o, A, ht = chunk_delta_rule_fwd(**plain)
    small.close(o, wanted["o"])
    small.close(ht, wanted["ht"])
    exact = emulate(p, chunked32(small.CHUNK), Exact(), backward=False, intermediates=True).intermediates
    small.close(A, rows(p, exact["A"]))
    reverse = {n: x for n, x in plain.items() if n != "output_final_state"}
    found = chunk_delta_rule_bwd(**reverse, A=A, do=p.do.astype(np.float32), dht=p.dht.astype(np.float32))
    for n, x in zip(("dq", "dk", "dv", "dbeta", "dh0"), found, strict=True):
        small.close(x, wanted[n])
    for x, y in zip(chunk_delta_rule(**given), (o, ht), strict=True):
        assert np.array_equal(x, y)


def test_forward_of_the_public_functions():
    p = small.make(qk_l2norm=True, beta_sigmoid=True)
    given = small.arguments(p, small.in_numpy())
    wanted = forward_reverse(p)
    o, ht = chunk_kda(**given)
    small.close(o, wanted["o"])
    small.close(ht, wanted["ht"])
    given.pop("chunk_size")
    assert np.array_equal(recurrent_kda(**given)[0], o)


def test_bfloat16_is_that_of_ml_dtypes():
    p = small.make(dtype="bfloat16")
    o, ht = chunk_kda(**small.arguments(p, small.in_numpy("bfloat16", beta="bfloat16", cu_seqlens="int32")))
    assert (o.dtype, ht.dtype) == (ml_dtypes.bfloat16, np.float32)


def test_views_and_read_only_arrays():
    p = small.make(T=24, offsets=[0, 20])
    given = small.arguments(p, small.in_numpy(cu_seqlens="int32"))
    plain = chunk_kda(**given)
    wide = np.full((1, 24, 2, 10), np.nan, np.float32)
    wide[..., ::2] = given["g"]
    given["g"] = wide[..., ::2]
    given["v"] = np.asfortranarray(given["v"])
    for x in given.values():
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    for x, y in zip(plain, chunk_kda(**given), strict=True):
        assert np.array_equal(x, y)


def test_tail_rows_hold_zeros_whatever_the_inputs_hold_there():
    p = small.make(T=24, offsets=[0, 17])
    given = low(p)
    for name in ("q", "k", "v", "g", "beta"):
        given[name][:, 17:] = np.nan
    out = chunk_kda_fwd(**given, disable_recompute=True)
    for n, x in zip(RETURNED, out, strict=True):
        assert np.isfinite(x).all(), n
        if n in ("o", *PER_TOKEN):
            assert not x[:, 17:].any(), n
    Aqk, Akk = out[3:5]
    do = np.where(np.arange(24)[:, None, None] < 17, p.do, np.nan).astype(np.float32)
    grads = chunk_kda_bwd(**backward_arguments(given), Aqk=Aqk, Akk=Akk, do=do, g_org=given["g"])
    for n, x in zip(GRADIENTS, grads, strict=True):
        if x is not None:
            assert np.isfinite(x).all(), n
            assert n == "dh0" or not x[:, 17:].any(), n
    wanted = forward_reverse(replace(p, dht=None))
    small.close(grads[0], wanted["dq"])


def test_the_older_name_of_state_v_first_means_the_same():
    p = small.make()
    given = low(p, v_first=True)
    older = {n: x for n, x in given.items() if n != "state_v_first"} | {"transpose_state_layout": True}
    for a, b in zip(chunk_kda_fwd(**given), chunk_kda_fwd(**older), strict=True):
        assert (a is None and b is None) or a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_second_backward_reads_what_the_first_read(name, dtype):
    """Autograd keeps what was saved, and walks it again with retain_graph."""
    p = small.make(**PROBLEMS[name], dtype=dtype)
    given = small.arguments(p, small.in_numpy(dtype))
    given = {n: x for n, x in given.items() if n != "output_final_state"}
    ready = Ready.of(check_call(**given, gated=True))
    keep = engine.needed(ready)
    saved = {n: x for n, x in engine.forward(ready, keep=keep).items() if n in (*keep, "decay")}
    before = {n: x.tobytes() for n, x in {**saved, **ready.inputs}.items()}
    do, dht = p.do.astype(dtype), p.dht.astype(np.float32)
    first, again = (engine.backward(ready, do, dht, saved=saved) for _ in range(2))
    assert saved
    assert {n: x.tobytes() for n, x in first.items()} == {n: x.tobytes() for n, x in again.items()}
    assert {n: x.tobytes() for n, x in {**saved, **ready.inputs}.items()} == before
