"""The fla targets, on stand-ins with the library's public signatures: the library itself needs a GPU."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from dataclasses import replace

import calls
import pytest
from judged import floor

pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")

import toy_kda

from verikda.call import Refused
from verikda.case import Case
from verikda.run_case import run_case
from verikda.targets import TargetError, resolve

seen = {}


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs,
):  # fmt: skip
    seen.update(kwargs, disable_recompute=disable_recompute, safe_gate=safe_gate)
    return toy_kda.chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, disable_recompute, state_v_first,
        cu_seqlens, kwargs["A_log"], kwargs["dt_bias"], kwargs["chunk_size"],
    )  # fmt: skip


def fused_recurrent_kda(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, lower_bound=None, state_v_first=False, cu_seqlens=None, **kwargs,
):  # fmt: skip
    assert all(x.is_contiguous() for x in (q, k, v, g, beta)), "only the decorator makes inputs contiguous"
    return toy_kda.chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, False, lower_bound, False, state_v_first, cu_seqlens, A_log,
        dt_bias,
    )  # fmt: skip


def chunk_delta_rule(
    q, k, v, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, cu_seqlens_cpu=None, **kwargs,
):  # fmt: skip
    seen.update(kwargs)
    return toy_kda.chunk_kda(
        q, k, v, None, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens
    )


def decorated(function):
    """What the library's decorators do: another package's kernels where they may, and contiguous tensors."""

    @functools.wraps(function)
    def outer(*args, **kwargs):
        if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") != "1":
            raise AssertionError("the kernels of another package ran")
        return function(*args, **{n: x.contiguous() if hasattr(x, "contiguous") else x for n, x in kwargs.items()})

    def disabled(*args, **kwargs):  # as torch.compiler.disable leaves it
        return outer(*args, **kwargs)

    disabled._torchdynamo_orig_callable, disabled.__signature__ = outer, inspect.signature(function)
    return disabled


@pytest.fixture
def library(monkeypatch):
    seen.clear()
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "")  # set by the target, and put back after the test
    for name in ("fla", "fla.ops", "fla.ops.kda", "fla.ops.delta_rule"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for place, function in (("kda", chunk_kda), ("kda", fused_recurrent_kda), ("delta_rule", chunk_delta_rule)):
        monkeypatch.setattr(function, "__module__", f"fla.ops.{place}.chunk")
        setattr(sys.modules[f"fla.ops.{place}"], function.__name__, decorated(function))
    return sys.modules["fla.ops.kda"]


def test_parameters_behind_kwargs_arrive(library):
    more = {"params": True, "safe_gate": True, "chunk_size": 32, "recompute": False}
    call = calls.make("bfloat16", shape=(2, 5, 1, 2, 9, 4), gate="bounded", **more)
    assert floor(resolve("fla"), call) == "pass"
    assert (seen["chunk_size"], seen["disable_recompute"], seen["safe_gate"]) == (32, True, True)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("fla", calls.make("float16", shape=(1, 21, 1, 2, 5, 4), cu_seqlens=[0, 4, 21], state_v_first=True)),
        ("fla:recurrent", calls.make("float32", gate="softplus", params=True, backward=False, do=False, dht=False)),
        ("fla:recurrent", replace(calls.make("float32", backward=False, do=False, dht=False), layout="strided")),
        ("fla:delta", calls.make("bfloat16", shape=(2, 21, 2, 2, 5, 4), gate="none", chunk_size=16)),
    ],
)
def test_right(library, name, call):
    assert floor(resolve(name), call) == "pass"
    assert name != "fla:delta" or seen["chunk_size"] == 16


def test_kernels_of_other_packages_do_not_run_instead(library):
    with pytest.raises(AssertionError, match="another package"):
        library.chunk_kda()
    result = resolve("fla").run(calls.make("bfloat16", shape=(1, 3, 1, 1, 2, 2)))
    assert result.ran.startswith("fla.ops.kda.chunk.chunk_kda (")
    assert f"test_target_fla.py:{chunk_kda.__code__.co_firstlineno})" in result.ran
    assert ", torch " in result.ran
    assert os.environ["FLA_DISABLE_BACKEND_DISPATCH"] == "1"


@pytest.mark.parametrize(
    ("mode", "folder", "said"),
    [
        ("disabled", "configs", ""),
        ("default", "configs", ", configs of configs (FLA_CACHE_MODE=default)"),
        ("full", "/home/me/configs", ", configs of configs (FLA_CACHE_MODE=full)"),
        ("fuzzy", None, ", configs of the library (FLA_CACHE_MODE=fuzzy)"),
    ],
)
def test_whose_configs_ran(library, monkeypatch, tmp_path, mode, folder, said):
    monkeypatch.chdir(tmp_path)  # a path within the current folder is said from there on
    cache = types.SimpleNamespace(FLA_CACHE_MODE=types.SimpleNamespace(value=mode))
    monkeypatch.setitem(sys.modules, "fla.ops.utils.cache", cache)
    monkeypatch.setenv("FLA_CACHE_MODE", "strict")  # too late: not what the library read
    monkeypatch.delenv("FLA_CONFIG_DIR", raising=False)
    if folder:
        monkeypatch.setenv("FLA_CONFIG_DIR", folder)
    ran = resolve("fla").run(calls.make("bfloat16", shape=(1, 3, 1, 1, 2, 2))).ran
    assert ran.endswith(f":{chunk_kda.__code__.co_firstlineno}){said}, torch {ran.rpartition(', torch ')[2]}")


def test_a_library_that_was_imported_with_its_choice_is_refused(library, monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.backends", types.SimpleNamespace(_DISPATCH_DISABLED=False))
    with pytest.raises(TargetError, match="set FLA_DISABLE_BACKEND_DISPATCH=1 before anything imports it"):
        resolve("fla")


def test_a_function_that_cannot_be_unwrapped(library, monkeypatch):
    monkeypatch.setattr(library, "chunk_kda", lambda q, k, v, g, beta: None)
    with pytest.raises(TargetError, match=r"fla.ops.kda.chunk_kda could not be unwrapped to the library's own code"):
        resolve("fla")


def test_capabilities(library):
    target = resolve("fla")
    c = target.capabilities
    assert (c.chunk_sizes, c.dtypes, c.rules) == ((32, 64), ("float16", "bfloat16"), ("kda",))
    assert c.gates == ("log", "softplus", "bounded")
    assert not c.hard_reset
    assert not c.tail_padding
    for field in ("packed", "initial_state", "scale", "qk_l2norm", "beta_sigmoid", "state_v_first", "recompute"):
        assert getattr(c, field), field
    assert set(c.notes) == {"dtypes", "chunk_sizes", "hard_reset", "tail_padding"}
    token, delta = resolve("fla:recurrent").capabilities, resolve("fla:delta").capabilities
    assert (token.backward, token.dht, token.hard_reset, token.safe_gate) == (False, False, True, False)
    assert token.tail_padding
    assert not delta.tail_padding
    assert (delta.rules, delta.chunk_sizes, delta.grouped, delta.gates) == (("delta",), (16, 32, 64), False, ("log",))


def test_calls_whose_kernel_does_not_compile_are_declined(library):
    """With safe_gate Triton needs a tile of 16 over all of K: the next power of two of 9, not of 8."""
    small, large = (calls.make("float16", shape=(1, 3, 1, 1, K, 2), safe_gate=True) for K in (8, 9))
    with pytest.raises(Refused, match=r"safe_gate with K = 8: this kernel of fla takes K from 9 on"):
        resolve("fla").run(small)
    assert not seen, "the library was called"
    assert floor(resolve("fla"), large) == "pass"
    assert floor(resolve("fla"), replace(small, safe_gate=False)) == "pass"
    report = run_case(resolve("fla"), Case(dtype="float16", safe_gate=True))
    assert (report.verdict, len(report.outcomes)) == ("refused", 1)
    with pytest.raises(ValueError, match="has no parameter safe_gate"):
        resolve("fla:recurrent").run(replace(small, backward=False))


def test_contracts(library):
    """TF32 has the bits of float16 and more than bfloat16."""
    names = [resolve("fla").contract(calls.make(dtype, chunk_size=32)).name for dtype in ("float16", "bfloat16")]
    assert names == ["operands-float16-c32", "storage-bfloat16-c32"]
    assert resolve("fla:recurrent").contract(calls.make("bfloat16")).name == "float32-recurrent"
    assert resolve("fla:delta").contract(calls.make("float16", chunk_size=16)).name == "storage-float16-c16"


@pytest.mark.parametrize("name", ["fla", "fla:recurrent", "fla:delta"])
def test_without_the_library(name, monkeypatch):
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "")
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(TargetError, match=rf"target {name} needs flash-linear-attention, .*: pip install fla-core"):
        resolve(name)
