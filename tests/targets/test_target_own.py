"""The own kernels as targets: they run what they say, agree with the recurrence, and say what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import calls
import numpy as np
import pytest

from kernels_cuda import host_build
from kernels_cuda.sources import source_hash
from oracles.recurrence import forward_reverse
from verikda.call import Capabilities, ContextLost
from verikda.targets import TargetError, available, own, resolve
from verikda.targets.contracts import NAMES, contract_by_name


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    host_build.compiler.cache_clear()
    yield
    host_build.compiler.cache_clear()


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(own, "gpu_missing", lambda: "CuPy finds no CUDA device")


CALLS = {
    "kda": {"recompute": False},
    "delta": {"gate": "none"},
    "pack": {
        "cu_seqlens": [0, 0, 3, 5], "offsets": "int32", "shape": (1, 8, 1, 2, 3, 4), "gate": "softplus", "params": True,
        "state_v_first": True, "layout": "strided", "poison": float("nan"),
    },
    "forward": {"backward": False},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_on_the_cpu(name):
    target = resolve("verikda:host")
    call = calls.make(chunk_size=16, **CALLS[name])
    result, wanted = target.run(call), forward_reverse(call.problem)
    names = {n for n, x in wanted.items() if x is not None and (call.backward or n in ("o", "ht"))}
    assert set(result.outputs) == names
    for n, x in result.outputs.items():
        assert np.abs(x - wanted[n]).max() <= 1e-5 * np.abs(wanted[n]).max(), n
    assert result.changed == ()
    assert result.ran == f"kernels_cuda {source_hash()}, NumPy on the CPU"
    assert result.dtypes["o"] == "float32"


class Idle:
    """A backend whose kernels do nothing."""

    ready = frozenset[str]()

    def __init__(self, name):
        self.name = name

    def launch(self, kernel, grid, block, shared, args, stream=0):
        pass


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "where", ["host", pytest.param("cuda", marks=pytest.mark.skipif(bool(own.gpu_missing()), reason="no GPU"))]
)
def test_what_no_kernel_writes_is_nan(where, name, dtype):
    """So that a row which a kernel leaves out shows, whatever the allocator hands out."""
    call = calls.make(dtype, chunk_size=16, **CALLS[name])
    outputs = own.on(Idle(where), "idle").run(call).outputs
    assert {n for n, x in outputs.items() if not np.isnan(x).all()} == set()
    assert "o" in outputs


def test_a_call_through_cupy_that_ends_the_context_is_told_and_is_the_last(monkeypatch):
    """On a stand-in for CuPy: that the kernels are asked at all shows on a GPU only."""

    def no_answer():
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    def fail(q, k, v, g, beta, do=None, dht=None):
        runtime.deviceSynchronize = no_answer
        raise ValueError("q is on another device")

    runtime = SimpleNamespace(deviceSynchronize=lambda: None)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    target, call = own.ThroughCupy(fail, "own"), calls.make(h0=False, dht=False)
    with pytest.raises(ContextLost, match=r"^ValueError: q is on another device"):
        target.run(call)
    with pytest.raises(TargetError, match=r"an earlier call has ended the CUDA context .* target own cannot be called"):
        target.run(call)


def test_contracts_by_name():
    assert {name: contract_by_name(name, "float16", 32).name for name in NAMES} == {
        "storage16": "storage-float16-c32", "operands16": "operands-float16-c32",
        "operands_tf32": "tf32-float16-c32", "float32": "float32-c32", "recurrent32": "float32-recurrent",
    }  # fmt: skip
    assert {contract_by_name(name, "float32", 32).name for name in NAMES[:4]} == {"float32-c32"}
    with pytest.raises(TargetError, match="'half' is not known: use one of storage16, operands16, operands_tf32"):
        contract_by_name("half", "float16", 32)


def test_what_it_says_of_itself(no_gpu):
    target = resolve("verikda")
    assert target.name == "verikda"
    assert target.capabilities == Capabilities()
    assert target.contract(calls.make("float32", chunk_size=32)).name == "float32-c32"
    assert target.contract(calls.make("bfloat16", chunk_size=16)).name == "tf32-bfloat16-c16"
    assert {"verikda", "verikda:host", "verikda:cuda"} <= {line.name for line in available()}


def test_without_a_gpu(no_gpu):
    with pytest.raises(TargetError, match=r"verikda:cuda needs a GPU: CuPy finds no CUDA device; use verikda:host"):
        resolve("verikda:cuda")


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TargetError, match=r"needs a GPU: CuPy cannot be imported .*: pip install 'verikda\[cuda13\]'"):
        resolve("verikda:cuda")


def test_with_neither_gpu_nor_compiler(no_gpu, no_compiler):
    message = (
        r"target verikda finds no GPU \(CuPy finds no CUDA device\), and running kernels on the CPU needs a C\+\+17 "
        r"compiler, .*; install g\+\+ or set CXX; to try the checks without kernels use the target 'emulator'"
    )
    with pytest.raises(TargetError, match=f"^{message}$"):
        resolve("verikda")
    with pytest.raises(TargetError, match=r"^running kernels on the CPU needs .* use the target 'emulator'$"):
        resolve("verikda:host")


def test_without_torch():
    """In a process where torch cannot be imported."""
    path = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    code = (
        f"import sys; sys.modules['torch'] = None; sys.path[:0] = {path!r}; import calls\n"
        "from verikda.targets import resolve\n"
        "print(sorted(resolve('verikda:host').run(calls.make(chunk_size=16)).outputs))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'dbeta', 'dg', 'dh0', 'dk', 'dq', 'dv', 'ht', 'o'" in done.stdout
