"""The jla targets, on a stand-in for JAX and the library made of torch: the library itself needs a Hopper GPU."""

from __future__ import annotations

import sys
import types

import calls
import ml_dtypes
import numpy as np
import pytest
from judged import floor

pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")

import torch
import toy_kda

from verikda.call import ContextLost, Refused
from verikda.targets import TargetError, resolve
from verikda.targets import jla as module


def device_put(x):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def device_get(tree):
    if isinstance(tree, dict):
        return {n: device_get(x) for n, x in tree.items()}
    if isinstance(tree, tuple):
        return tuple(device_get(x) for x in tree)
    if tree is None:
        return None
    x = tree.detach()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def vjp(function, given):
    leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
    out = function(leaves)

    def pull(cotangents):
        assert [x is None for x in cotangents] == [x is None for x in out], "another structure than that of the outputs"
        some, their = ([x for x in xs if x is not None] for xs in (out, cotangents))
        return (dict(zip(leaves, torch.autograd.grad(some, list(leaves.values()), their), strict=True)),)

    return tuple(None if x is None else x.detach() for x in out), pull


def linear_attention(kind, q, k, v, *, impl, scale, initial_state, output_final_state, use_qk_l2norm, **gates):
    """Public layout, log decay, states [K,V]: by the token recurrence in float64."""
    if impl != "mosaic_gpu":
        raise ValueError(f"no {impl!r} implementation of {kind!r} accepts this call")
    if q.shape[-1] == 3:
        raise ValueError("mosaic_gpu KDA: head dims must be in (64, 128)")
    assert set(gates) == ({"g", "beta"} if kind == "kda" else {"beta"})
    g, beta = gates.get("g"), gates["beta"]
    return toy_kda.chunk_kda(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm)


def install(monkeypatch, operator=linear_attention, capability="9.0"):
    module.compiled.cache_clear()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "")  # set by the target, and put back after the test
    jax, jla, ops = (types.ModuleType(name) for name in ("jax", "jla", "jla.ops"))
    device = types.SimpleNamespace(compute_capability=capability, device_kind="NVIDIA H200")
    jax.__version__, jla.__version__, ops.linear_attention = "0.11.2", "0.1.0", operator
    jax.device_put, jax.device_get, jax.vjp, jax.jit = device_put, device_get, vjp, lambda f: f
    jax.devices = lambda: [device]
    jax.numpy = types.SimpleNamespace(zeros_like=torch.zeros_like)
    for made in (jax, jla, ops):
        monkeypatch.setitem(sys.modules, made.__name__, made)


KDA = calls.make("bfloat16", shape=(2, 21, 2, 2, 5, 4), problem={"qk_l2norm": True})
DELTA = calls.make("float16", shape=(2, 21, 2, 2, 5, 4), gate="none")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("jla", KDA),
        ("jla", calls.make("bfloat16", shape=(1, 9, 1, 1, 5, 4), h0=False, dht=False)),
        ("jla", calls.make("bfloat16", shape=(1, 9, 1, 1, 5, 4), dht=False, final_state=False)),
        ("jla", calls.make("bfloat16", shape=(1, 9, 1, 1, 5, 4), do=False, dht=False, backward=False)),
        ("jla:delta", DELTA),
    ],
)
def test_right(name, call, monkeypatch):
    install(monkeypatch)
    target = resolve(name)
    assert floor(target, call) == "pass"
    result = target.run(call)
    assert result.ran == "jla 0.1.0, mosaic_gpu, JAX 0.11.2 on NVIDIA H200"
    assert ("dq" in result.outputs) == call.backward


def test_equal_calls_are_compiled_once(monkeypatch):
    install(monkeypatch)
    compiled = []
    monkeypatch.setattr(sys.modules["jax"], "jit", lambda f: compiled.append(f) or f)
    target = resolve("jla")
    first = target.run(KDA)
    again = target.run(KDA)
    assert np.array_equal(first.outputs["dq"], again.outputs["dq"])
    assert len(compiled) == 2  # forward, and forward with reverse


def changed(**change):
    def operator(kind, q, k, v, **given):
        given |= {"q": q, "k": k, "v": v}
        given |= {name: f(given[name]) for name, f in change.items() if given.get(name) is not None}
        return linear_attention(kind, given.pop("q"), given.pop("k"), given.pop("v"), **given)

    return operator


MISUNDERSTOOD = {
    "log decay to base 2": (changed(g=lambda g: g * 0.6931472), KDA),
    "states the other way round": (changed(initial_state=lambda s: s.mT.reshape(s.shape)), KDA),
    "scale applied twice": (changed(q=lambda q: q.detach() * 0 + q * 3), DELTA),
    "beta before its sigmoid": (changed(beta=torch.sigmoid), DELTA),
    "norm left out": (changed(use_qk_l2norm=lambda on: False), KDA),
}


@pytest.mark.parametrize("name", MISUNDERSTOOD)
def test_an_operator_with_another_meaning_fails_the_floor(name, monkeypatch):
    operator, call = MISUNDERSTOOD[name]
    install(monkeypatch, operator)
    assert "o" in floor(resolve("jla" if call is KDA else "jla:delta"), call).split(",")


def test_what_the_kernels_do_not_support_is_declared(monkeypatch):
    install(monkeypatch)
    kda, delta = resolve("jla").capabilities, resolve("jla:delta").capabilities
    assert (kda.rules, kda.dtypes, kda.k_sizes, kda.v_sizes) == (("kda",), ("bfloat16",), (128,), (64, 128))
    assert (delta.rules, delta.dtypes, delta.k_sizes) == (("delta",), ("bfloat16", "float16"), (64, 128))
    for c in (kda, delta):
        assert (c.chunk_sizes, c.layouts) == ((64,), ("contiguous",))
        assert (c.packed, c.grouped, c.beta_sigmoid, c.state_v_first, c.shape_invariant) == (False,) * 5
    assert resolve("jla").contract(KDA).name == "operands-bfloat16-c64"
    assert resolve("jla:delta").contract(DELTA).name == "storage-float16-c64"
    with pytest.raises(Refused, match="head dims must be in"):
        resolve("jla").run(calls.make("bfloat16"))


def test_a_call_that_ends_the_context_is_told_and_is_the_last(monkeypatch):
    def fail(kind, q, k, v, **given):
        monkeypatch.setattr(sys.modules["jax"], "device_put", no_answer)
        no_answer(q)

    def no_answer(x):
        raise RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")

    install(monkeypatch, fail)
    target = resolve("jla")
    with pytest.raises(ContextLost, match=r"^RuntimeError: INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS"):
        target.run(KDA)
    with pytest.raises(TargetError, match=r"an earlier call has ended the CUDA context .* target jla cannot be called"):
        target.run(KDA)


def test_without_the_library_or_its_gpu(monkeypatch):
    install(monkeypatch, capability="10.0")
    with pytest.raises(TargetError, match=r"target jla needs a Hopper GPU \(compute capability 9.0\), but JAX finds"):
        resolve("jla")
    monkeypatch.setitem(sys.modules, "jla", None)
    with pytest.raises(TargetError, match=r"target jla:delta needs jax-linear-attention, .*: pip install jax-lin"):
        resolve("jla:delta")
