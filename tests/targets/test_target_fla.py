"""The fla target, on a stand-in with the library's public signature: the library itself needs a GPU."""

from __future__ import annotations

import sys
import types

import calls
import numpy as np
import pytest

from oracles.recurrence import forward_reverse

pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")

import toy_kda

from verikda.targets import TargetError, resolve


@pytest.fixture
def stand_in(monkeypatch):
    seen = {}

    def chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False,
        safe_gate=False,
        lower_bound=None,
        disable_recompute=False,
        return_intermediate_states=False,
        state_v_first=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        cp_context=None,
        **kwargs,
    ):
        seen.update(kwargs, disable_recompute=disable_recompute)
        return toy_kda.chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            use_gate_in_kernel,
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            safe_gate,
            lower_bound,
            disable_recompute,
            state_v_first,
            cu_seqlens,
            kwargs["A_log"],
            kwargs["dt_bias"],
            kwargs["chunk_size"],
        )

    for name in ("fla", "fla.ops", "fla.ops.kda"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["fla.ops.kda"].chunk_kda = chunk_kda
    return seen


def test_parameters_behind_kwargs_arrive(stand_in):
    call = calls.make("bfloat16", gate="bounded", params=True, safe_gate=True, chunk_size=32, recompute=False)
    result = resolve("fla").run(call)
    assert stand_in["chunk_size"] == 32
    assert stand_in["disable_recompute"] is True
    for n, value in forward_reverse(call.problem).items():
        assert np.abs(result.outputs[n] - value).max() <= 0.02 * (np.abs(value).max() + 1), n


def test_capabilities(stand_in):
    target = resolve("fla")
    c = target.capabilities
    assert c.chunk_sizes == (32, 64)
    assert c.dtypes == ("float16", "bfloat16")
    assert c.gates == ("log", "softplus", "bounded")
    assert c.rules == ("kda",)
    assert not c.hard_reset
    for field in ("packed", "initial_state", "scale", "qk_l2norm", "beta_sigmoid", "state_v_first", "recompute"):
        assert getattr(c, field), field
    assert set(c.notes) == {"dtypes", "chunk_sizes", "hard_reset"}
    assert target.contract(calls.make("float16", chunk_size=32)).name == "storage-float16-c32"


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(TargetError, match=r"needs flash-linear-attention, .*: pip install fla-core"):
        resolve("fla")
