"""How a call of a torch function can end: an answer that is none, a refusal, a crash, a lost context."""

from __future__ import annotations

import asyncio
import inspect
import os
from pathlib import Path

import calls
import numpy as np
import pytest

from verikda.call import ContextLost, Crashed, Malformed, Refused

torch = pytest.importorskip("torch", reason="the torch adapter needs PyTorch: pip install 'verikda[torch]'")

import toy_kda  # noqa: E402
from test_torch_function import target  # noqa: E402

from verikda.targets.base import TargetError  # noqa: E402
from verikda.targets.torch_function import TorchFunction  # noqa: E402


def answers(answer, message):
    def f(q, k, v, g, beta, initial_state=None, output_final_state=False):
        o, ht = toy_kda.chunk_kda(q, k, v, g, beta, None, initial_state, output_final_state)
        return answer(o, ht)

    with pytest.raises(Malformed, match=message):
        target(f).run(calls.make())


def test_malformed_answers():
    answers(lambda o, ht: (o[:, :-1], ht), r"o has shape \[2, 4, 2, 4\]; expected \[2, 5, 2, 4\]")
    answers(lambda o, ht: (o, ht.mT), r"final_state has shape \[2, 2, 4, 3\]; expected \[2, 2, 3, 4\]")
    answers(lambda o, ht: (o.double(), ht), "o has dtype float64; expected float32")
    answers(
        lambda o, ht: (o, ht.long()), "final_state has dtype int64; expected one of float16, bfloat16, float32, float64"
    )
    answers(lambda o, ht: o, "returned no final_state although output_final_state=True")
    answers(lambda o, ht: (o.tolist(), ht), "o is a list; expected a tensor")
    answers(lambda o, ht: (), "empty tuple")
    answers(lambda o, ht: (o, ht.detach()), "final_state carries no gradient")
    answers(lambda o, ht: (o.to_sparse(), ht), "o has layout torch.sparse_coo; expected torch.strided")
    answers(lambda o, ht: (o, ht.to_sparse()), "final_state has layout torch.sparse_coo; expected torch.strided")
    answers(lambda o, ht: (o.to("meta"), ht), "o is on device meta, which holds no values")


def test_a_sparse_gradient_is_malformed():
    class Sparse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d):
            return d.to_sparse()

    def f(q, k, v, g, beta, initial_state=None, output_final_state=False):
        return toy_kda.chunk_kda(q, k, v, g, Sparse.apply(beta), None, initial_state, output_final_state)

    with pytest.raises(Malformed, match=r"dbeta has layout torch.sparse_coo; expected torch.strided"):
        target(f).run(calls.make())


def test_the_text_of_an_error_can_be_written():
    def f(q, k, v, g, beta):
        raise RuntimeError("a file name \udcff")

    with pytest.raises(Crashed, match=r"a file name \\udcff$") as caught:
        target(f).run(calls.make(h0=False, dht=False))
    str(caught.value).encode("utf-8")


def test_a_state_of_another_dtype_is_allowed_and_recorded():
    def f(q, k, v, g, beta, initial_state=None, output_final_state=False):
        o, ht = toy_kda.chunk_kda(q, k, v, g, beta, None, initial_state, output_final_state)
        return o, ht.bfloat16()

    assert target(f).run(calls.make()).dtypes["ht"] == "bfloat16"


def test_missing_gradients_are_absent():
    def no_beta(q, k, v, g, beta, initial_state=None, output_final_state=False):
        return toy_kda.chunk_kda(q, k, v, g, beta.detach(), None, initial_state, output_final_state)

    outputs = target(no_beta).run(calls.make()).outputs
    assert set(outputs) == {"o", "ht", "dq", "dk", "dv", "dg", "dh0"}
    assert set(target(toy_kda.forward_only).run(calls.make(dht=False)).outputs) == {"o", "ht"}


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, answer):
        ctx.answer = answer
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        return ctx.answer(d), None


@pytest.mark.parametrize("answer", [lambda d: d[:, :1, :1], lambda d: "text"])
def test_a_gradient_that_is_none_of_its_kind(answer):
    def f(q, k, v, g, beta):
        return toy_kda.chunk_kda(BadBackward.apply(q, answer), k, v, g, beta)[0]

    with pytest.raises(Malformed, match="backward: "):
        target(f).run(calls.make(h0=False, dht=False))


def raising(error):
    def f(q, k, v, g, beta):
        raise error

    return target(f), calls.make(h0=False, dht=False)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("chunk_size 16 is not allowed"),
        TypeError("bad"),
        NotImplementedError("K > 128"),
        AssertionError("initial_state must be in float32"),
        RuntimeError("head size 5 is not supported"),
        RuntimeError("this kernel only supports bfloat16"),
        RuntimeError("Unsupported dtype"),
        RuntimeError("'addmm' not implemented for 'Half'"),
    ],
)
def test_refusals_carry_their_text(error):
    t, call = raising(error)
    with pytest.raises(Refused) as caught:
        t.run(call)
    assert str(caught.value) == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "error",
    [
        IndexError("list index out of range"),
        ZeroDivisionError("division by zero"),
        MemoryError("out of memory"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("The size of tensor a (5) must match the size of tensor b (4)"),
        RuntimeError("unsupported operation: more than one element of the written-to tensor refers to one location"),
        torch.OutOfMemoryError("not supported"),
        SystemExit(0),
        asyncio.CancelledError("stream closed"),
        GeneratorExit("closed"),
    ],
)
def test_other_errors_are_crashes(error):
    t, call = raising(error)
    with pytest.raises(Crashed) as caught:
        t.run(call)
    assert str(caught.value) == f"{type(error).__name__}: {error}"
    assert caught.value.__cause__ is error


def test_the_users_ctrl_c_is_no_crash():
    t, call = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        t.run(call)


@pytest.mark.parametrize("text", ["q must be contiguous", "Input tensor must be contiguous, got strides (3, 1)"])
def test_a_layout_that_an_extension_declines_is_refused(text):
    t, call = raising(RuntimeError(text))
    with pytest.raises(Refused, match="must be contiguous"):
        t.run(call)


def test_a_state_in_float64_is_judged_as_float32():
    def double(**arguments):
        o, ht = toy_kda.chunk_kda(**arguments)
        return o, ht.double()

    double.__signature__ = inspect.signature(toy_kda.chunk_kda)
    result = TorchFunction(double, "double", device="cpu").run(calls.make(shape=(1, 3, 1, 1, 2, 2)))
    assert result.dtypes["ht"] == "float32"


def test_the_folder_and_numpys_errors_are_as_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def rude(**arguments):
        os.chdir("/")
        np.seterr(all="raise")
        return toy_kda.chunk_kda(**arguments)

    rude.__signature__ = inspect.signature(toy_kda.chunk_kda)
    before = np.geterr()
    TorchFunction(rude, "rude", device="cpu").run(calls.make(shape=(1, 3, 1, 1, 2, 2)))
    assert Path.cwd() == tmp_path
    assert np.geterr() == before


def no_answer(device):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return TorchFunction(toy_kda.chunk_kda, "toy", device="cuda")


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: launch failure"), ValueError("K > 4")])
def test_a_device_that_does_not_answer_after_an_error_is_a_lost_context(monkeypatch, error):
    """Whatever the error says: a refusal after which nothing can be called is none."""

    def fail():
        raise error

    gpu = on_a_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pytest.raises((Crashed, Refused)) as answered:
        gpu.guarded(fail)
    assert not isinstance(answered.value, ContextLost)
    monkeypatch.setattr(torch.cuda, "synchronize", no_answer)
    with pytest.raises(ContextLost) as lost:
        gpu.guarded(fail, "backward: ")
    assert str(lost.value) == f"backward: {type(error).__name__}: {error}"
    with pytest.raises((Crashed, Refused)) as on_cpu:
        target().guarded(fail)
    assert not isinstance(on_cpu.value, ContextLost)


def test_an_error_of_a_kernel_that_ran_later_is_a_lost_context(monkeypatch):
    """The call returns; its kernel's error comes with the wait for it."""
    monkeypatch.setattr(torch.cuda, "synchronize", no_answer)
    with pytest.raises(ContextLost, match=r"^RuntimeError: CUDA error: an illegal memory access"):
        on_a_gpu(monkeypatch).guarded(lambda: 1)


def test_no_call_is_made_on_a_device_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", no_answer)
    with pytest.raises(TargetError, match=r"an earlier call has ended the CUDA context .* target toy cannot be called"):
        on_a_gpu(monkeypatch).run(calls.make())


def test_an_interrupt_is_no_outcome():
    t, call = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        t.run(call)


def test_refusal_in_the_backward():
    def later(d):
        raise NotImplementedError("forward only")

    def f(q, k, v, g, beta):
        return toy_kda.chunk_kda(BadBackward.apply(q, later), k, v, g, beta)[0]

    with pytest.raises(Refused, match="backward: NotImplementedError: forward only"):
        target(f).run(calls.make(h0=False, dht=False))
