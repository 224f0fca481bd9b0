"""The cudnn targets, on a stand-in with the library's own layout: the library itself needs a Hopper GPU."""

from __future__ import annotations

import sys
import types

import calls
import numpy as np
import pytest
from judged import floor

pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")

import torch
import toy_kda

from oracles.recurrence import forward_reverse
from verikda.call import Refused
from verikda.targets import TargetError, resolve
from verikda.targets import cudnn as module


class NoEngineError(RuntimeError):
    pass


def kimi_delta_attention(
    q, k, v, g, beta, cu_seqlens, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, batch_invariant=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    safe_gate=False, gate_lower_bound=None, gate_domain="log", a_log=None, dt_bias=None,
    checkpoint_every_n_tokens=0, checkpoint_dtype=None, plan_name=None, overwrite_initial_state=False,
    state_indices=None,
):  # fmt: skip
    """Tokens in one row, states [N,HO,V,K], an empty state unless asked for: by the token recurrence in float64."""
    assert q.dim() == 3
    assert all(x.is_contiguous() for x in (q, k, v, g, beta))
    assert initial_state is None or initial_state.is_contiguous()
    assert (gate_domain, batch_invariant, overwrite_initial_state) == ("log", False, False)
    if plan_name != "kda_hopper_cuda":
        raise NoEngineError(f"no {plan_name} plan for this graph")
    assert safe_gate or (a_log is None and dt_bias is None)
    o, state = toy_kda.chunk_kda(
        *(x[None] for x in (q, k, v, g, beta)), scale, initial_state, True, use_qk_l2norm_in_kernel, safe_gate,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound=gate_lower_bound, state_v_first=True,
        cu_seqlens=cu_seqlens, A_log=a_log, dt_bias=None if dt_bias is None else dt_bias.reshape(-1),
    )  # fmt: skip
    return o[0], state if output_final_state else torch.empty(0)


def install(monkeypatch, operator=kimi_delta_attention):
    library = types.ModuleType("cudnn")
    library.__version__, library.cudnnGraphNotSupportedError = "1.32.0", NoEngineError
    ops = types.ModuleType("cudnn.linear_attention.ops")
    ops.kimi_delta_attention = operator
    monkeypatch.setitem(sys.modules, "cudnn", library)
    monkeypatch.setitem(sys.modules, "cudnn.linear_attention", types.ModuleType("cudnn.linear_attention"))
    monkeypatch.setitem(sys.modules, "cudnn.linear_attention.ops", ops)
    monkeypatch.setattr(module, "DEVICE", "cpu")


TRAINING = {
    "batch": calls.make("bfloat16", shape=(2, 21, 2, 2, 5, 4)),
    "pack": calls.make("bfloat16", shape=(1, 21, 2, 2, 5, 4), cu_seqlens=[0, 4, 21], offsets="int32"),
    "states as [V,K]": calls.make("bfloat16", shape=(2, 21, 1, 1, 5, 4), state_v_first=True),
}
FUSED = {
    "all in the kernel": calls.make(
        "bfloat16", shape=(1, 21, 1, 2, 5, 4), gate="bounded", params=True, do=False, dht=False, backward=False,
        problem={"qk_l2norm": True, "beta_sigmoid": True},
    ),
    "no parameters of the gate": calls.make("bfloat16", gate="bounded", do=False, dht=False, backward=False),
    "a scale of its own": calls.make("bfloat16", do=False, dht=False, backward=False),
}  # fmt: skip
object.__setattr__(FUSED["a scale of its own"].problem, "scale", 0.125)


@pytest.mark.parametrize("name", TRAINING)
def test_forward_and_backward_are_right(name, monkeypatch):
    install(monkeypatch)
    assert floor(resolve("cudnn"), TRAINING[name]) == "pass"


@pytest.mark.parametrize("name", FUSED)
def test_the_fused_forward_is_right(name, monkeypatch):
    install(monkeypatch)
    target, call = resolve("cudnn:forward"), FUSED[name]
    result = target.run(call)
    for n, value in forward_reverse(call.problem).items():
        if n in ("o", "ht"):
            assert np.abs(result.outputs[n] - value).max() <= 0.01 * (np.abs(value).max() + 1), n
    assert result.ran == "cudnn frontend 1.32.0, engine kda_hopper_cuda on cpu"


def changed(**change):
    """The stand-in with some arguments replaced by functions of them."""

    def operator(q, k, v, g, beta, cu_seqlens, **options):
        given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": cu_seqlens, **options}
        given |= {name: f(given[name]) for name, f in change.items() if given.get(name) is not None}
        return kimi_delta_attention(**given)

    return operator


MISUNDERSTOOD = {
    "log decay to base 2": (changed(g=lambda g: g * 0.6931472), TRAINING["batch"]),
    "states the other way round": (changed(initial_state=lambda s: s.mT.reshape(s.shape)), TRAINING["batch"]),
    "scale applied twice": (changed(q=lambda q: q * q.shape[-1] ** -0.5), TRAINING["batch"]),
    "beta before its sigmoid": (changed(beta=torch.sigmoid), TRAINING["batch"]),
    "offsets of a batch in the pack": (changed(cu_seqlens=lambda c: c[[0, -1, -1]]), TRAINING["pack"]),
    "heads of another order": (changed(g=lambda g: g.flip(1)), TRAINING["batch"]),
}


@pytest.mark.parametrize("name", MISUNDERSTOOD)
def test_an_operator_with_another_meaning_fails_the_floor(name, monkeypatch):
    operator, call = MISUNDERSTOOD[name]
    install(monkeypatch, operator)
    assert "o" in floor(resolve("cudnn"), call).split(",")


def test_what_the_kernels_do_not_support_is_declared(monkeypatch):
    install(monkeypatch)
    training, forward = resolve("cudnn").capabilities, resolve("cudnn:forward").capabilities
    assert (training.backward, forward.backward) == (True, False)
    assert (training.gates, forward.gates) == (("log",), ("log", "bounded"))
    assert (training.grouped, forward.grouped) == (False, True)
    assert (training.scale, forward.scale) == (False, True)
    for c in (training, forward):
        assert (c.dtypes, c.k_sizes, c.v_sizes, c.rules) == (("bfloat16",), (128,), (128,), ("kda",))
        refused = (c.beta_above_one, c.hard_reset, c.empty, c.tail_padding, c.shape_invariant)
        assert refused == (False,) * 5
    call = TRAINING["batch"]
    assert (
        resolve("cudnn").contract(call).name,
        resolve("cudnn:forward").contract(FUSED["a scale of its own"]).name,
    ) == (
        "operands-bfloat16-c64",
        "operands-bfloat16-c16",
    )


def test_a_call_that_no_engine_takes_is_a_refusal(monkeypatch):
    install(monkeypatch)
    monkeypatch.setattr(module, "ENGINE", "kda_frost")
    with pytest.raises(Refused, match="no engine takes this call: no kda_frost plan for this graph"):
        resolve("cudnn").run(TRAINING["batch"])
    with pytest.raises(Refused, match="only the bounded gate is fused"):
        resolve("cudnn:forward").run(calls.make("bfloat16", gate="softplus", params=True, backward=False))


@pytest.mark.parametrize("name", ["cudnn", "cudnn:forward"])
def test_without_the_library(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(TargetError, match=rf"target {name} needs cuDNN frontend's .*: pip install 'nvidia-cudnn-fron"):
        resolve(name)
