"""Targets by name: built in, registered by packages, and functions."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace

import calls
import numpy as np
import pytest

from oracles.contract import recurrent32
from oracles.recurrence import forward_reverse
from verikda import targets
from verikda.targets import TargetError, available, resolve
from verikda.targets.numpy_function import NumpyFunction


def numpy_kda(q, k, v, g, beta, do=None, dht=None):
    return {"o": np.zeros_like(v)}


numpy_kda.verikda_arrays = "numpy"


class ReadyMade:
    name = "ready"
    capabilities = None

    def contract(self, call):
        return recurrent32()

    def run(self, call):
        raise NotImplementedError


class Unmakeable(ReadyMade):
    def __init__(self, needed):
        pass


ready = ReadyMade()
number = 5


@pytest.fixture
def registered(monkeypatch):
    def register(name, load):
        point = SimpleNamespace(name=name, value="pkg.mod:thing", load=load, dist=None)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] if group == targets.GROUP else [])

    return register


def test_the_list():
    lines = {line.name: line for line in available()}
    assert {"verikda", "emulator", "zoo", "transformers", "transformers:recurrent", "fla"} <= set(lines)
    assert lines["emulator"].installed
    for line in lines.values():
        assert line.description
        assert bool(line.reason) != line.installed


def test_what_is_missing_is_said(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    line = {line.name: line for line in available()}["transformers"]
    assert not line.installed
    assert "transformers: pip install 'verikda[peers]'" in line.reason


def test_unknown_names():
    with pytest.raises(
        TargetError, match=r"target 'flah' is not known: use one of verikda, .*emulator, .*, or package.module:f"
    ):
        resolve("flah")


@pytest.mark.parametrize("name", ["transformers", "transformers:recurrent", "fla", "test_registry:numpy_kda"])
def test_without_torch(monkeypatch, name):
    monkeypatch.setattr(numpy_kda, "verikda_arrays", "torch")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TargetError, match=rf"target {name} needs PyTorch, .*: pip install 'verikda\[torch\]'"):
        resolve(name)


def test_without_transformers(monkeypatch):
    pytest.importorskip("torch", reason="needs PyTorch, so that transformers is the only thing missing")
    for name in ("transformers", "transformers.models.kimi_linear"):  # another test may have imported it
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TargetError, match=r"cannot be imported .*: pip install 'verikda\[peers\]'"):
        resolve("transformers")


def test_emulator_takes_a_contract():
    call = calls.make("bfloat16")
    assert resolve("emulator").contract(call).name == "storage-bfloat16-c64"
    assert resolve("emulator", contract="float32").contract(call).name == "float32-c64"
    with pytest.raises(TargetError, match="contract 'float8' is not known"):
        resolve("emulator", contract="float8")
    with pytest.raises(TargetError, match="emulator declares its own device"):
        resolve("emulator", device="cuda")


def test_zoo():
    assert resolve("zoo").name.startswith("zoo")
    with pytest.raises(TargetError, match="the zoo has no fault 'nothing_like_it'"):
        resolve("zoo:nothing_like_it")
    with pytest.raises(TargetError, match="zoo declares its own contract; contract 'float32' cannot be set"):
        resolve("zoo", contract="float32")


def test_numpy_functions_are_marked(monkeypatch):
    target = resolve("test_registry:numpy_kda", contract="float32")
    assert isinstance(target, NumpyFunction)
    assert target.name == "test_registry:numpy_kda"
    assert target.contract(calls.make("bfloat16")).name == "float32-c64"
    with pytest.raises(TargetError, match="works on NumPy arrays; device 'cuda' does not apply"):
        resolve("test_registry:numpy_kda", device="cuda")
    monkeypatch.setattr(numpy_kda, "verikda_arrays", "jax")
    with pytest.raises(TargetError, match="verikda_arrays is 'jax'; use 'torch' or 'numpy'"):
        resolve("test_registry:numpy_kda")


def test_ready_made_targets():
    assert resolve("test_registry:ready") is ready
    assert isinstance(resolve("test_registry:ReadyMade"), ReadyMade)
    with pytest.raises(TargetError, match="Unmakeable: making the target failed: TypeError"):
        resolve("test_registry:Unmakeable")
    with pytest.raises(TargetError, match="declares its own contract"):
        resolve("test_registry:ready", contract="float32")
    with pytest.raises(TargetError, match="is a int, neither a function nor a target"):
        resolve("test_registry:number")


def test_registered_by_a_package(registered):
    registered("mine", lambda: ReadyMade)
    assert isinstance(resolve("mine"), ReadyMade)
    assert "mine" in [line.name for line in available()]


def test_a_package_cannot_take_a_built_in_name(registered):
    registered("emulator", lambda: ReadyMade)
    assert not isinstance(resolve("emulator"), ReadyMade)
    assert [line.name for line in available()].count("emulator") == 1


def test_a_registered_target_that_fails(registered):
    def load():
        raise ImportError("no libcuda")

    registered("mine", load)
    with pytest.raises(TargetError, match=r"target mine: loading pkg\.mod:thing failed: ImportError: no libcuda"):
        resolve("mine")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_the_emulator_answers(dtype, tolerance):
    call = calls.make(
        dtype, shape=(1, 21, 1, 2, 3, 4), cu_seqlens=[0, 5, 5, 20], gate="bounded", params=True, chunk_size=16
    )
    result = resolve("emulator").run(call)
    expected = forward_reverse(call.problem)
    assert set(result.outputs) == set(expected)
    for name, value in expected.items():
        assert np.abs(result.outputs[name] - value).max() <= tolerance * (np.abs(value).max() + 1), name
    assert result.dtypes["o"] == result.dtypes["dq"] == dtype
    assert result.dtypes["dh0"] == result.dtypes["dg"] == "float32"
    assert set(resolve("emulator").run(calls.make(backward=False)).outputs) == {"o", "ht"}


def test_a_target_that_cannot_be_made_is_not_here(registered):
    def broken():
        raise RuntimeError("no driver")

    registered("mine", broken)
    line = targets.made_here({line.name: line for line in available()}["mine"])
    assert not line.installed
    assert line.reason == "target mine: loading pkg.mod:thing failed: RuntimeError: no driver"
    assert targets.made_here({line.name: line for line in available()}["emulator"]).installed
