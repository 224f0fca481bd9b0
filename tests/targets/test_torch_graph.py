"""What autograd asks of a torch function beside one backward for all inputs: shown on operators that get it wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")

import torch
import toy_kda

from verikda.call import Refused
from verikda.case import Case
from verikda.checks import named
from verikda.inputs import make_call
from verikda.run_case import run_case
from verikda.targets import resolve
from verikda.targets.answer import sort_error
from verikda.targets.base import TargetError
from verikda.targets.numpy_function import NumpyFunction
from verikda.targets.torch_function import TorchFunction

CHECKS = ("state_loss", "frozen", "second_backward")
CASE = Case(lengths=(9,), K=4, V=3, h0="random", dht=True)


def operator(fault: str) -> TorchFunction:
    """The toy behind a backward of its own, which recomputes the forward, as kernels have one."""

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*tensors)
            return toy_kda.chunk_kda(*tensors[:5], initial_state=tensors[5], output_final_state=True)

        @staticmethod
        def backward(ctx: Any, do: Any, dht: Any) -> Any:
            if fault == "no loss without do" and do is None:
                return (None,) * 6
            leaves = [x.detach().clone().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                o, ht = toy_kda.chunk_kda(*leaves[:5], initial_state=leaves[5], output_final_state=True)
            pairs = [(y, d) for y, d in ((o, do), (ht, dht)) if d is not None]
            outputs, incoming = zip(*pairs, strict=True)
            grads = list(torch.autograd.grad(outputs, leaves, incoming, allow_unused=True))
            if fault == "dk with dbeta" and not ctx.needs_input_grad[4]:
                grads[1] = torch.zeros_like(leaves[1])
            if fault == "dbeta with dq" and not ctx.needs_input_grad[0]:
                grads[4] = torch.zeros_like(leaves[4])
            if fault == "dv over v":
                ctx.saved_tensors[2].data.copy_(grads[2])
            if fault == "frees what it saved":
                if hasattr(ctx, "gone"):
                    raise AttributeError("'OperatorBackward' object has no attribute 'A'")
                ctx.gone = True
            return tuple(grads)

    def chunk_kda(
        q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None, output_final_state=False
    ) -> Any:
        return Operator.apply(q, k, v.clone(), g, beta, initial_state)

    return TorchFunction(chunk_kda, fault or "healthy", contract="recurrent32", device="cpu")


@pytest.mark.parametrize(
    ("fault", "fails"),
    [
        ("", ()),
        ("dk with dbeta", ("frozen",)),
        ("dbeta with dq", ("frozen",)),
        ("dv over v", ("second_backward",)),
        ("frees what it saved", ("second_backward",)),
        ("no loss without do", ("state_loss",)),
    ],
)
def test_each_is_seen_by_its_own_check(fault: str, fails: tuple[str, ...]) -> None:
    report = run_case(operator(fault), CASE, named(CHECKS))
    assert tuple(o.check for o in report.outcomes if o.verdict == "fail") == fails
    assert [o.check for o in report.outcomes] == list(CHECKS)


def test_what_torch_compile_says_of_a_second_backward_is_a_refusal() -> None:
    text = "This backward function was compiled with non-empty donated buffers which requires retain_graph=False."
    assert isinstance(sort_error(RuntimeError(text), "backward: "), Refused)


def test_a_function_may_say_that_it_does_not_stand_it() -> None:
    def chunk_kda(q, k, v, g, beta, initial_state=None, output_final_state=False):
        return toy_kda.chunk_kda(q, k, v, g, beta, None, initial_state, output_final_state)

    assert TorchFunction(chunk_kda, "toy", device="cpu").capabilities.autograd
    chunk_kda.verikda_capabilities = {"autograd": False}  # type: ignore[attr-defined]
    plain = TorchFunction(chunk_kda, "toy", device="cpu")
    report = run_case(plain, CASE, named(CHECKS))
    assert [o.check for o in report.outcomes] == ["state_loss"]


def test_a_numpy_function_has_no_graph() -> None:
    def chunk_kda(q, k, v, g, beta, do=None, dht=None):
        return {"o": v}

    chunk_kda.verikda_capabilities = {"autograd": True}  # type: ignore[attr-defined]
    with pytest.raises(TargetError, match="only torch functions"):
        NumpyFunction(chunk_kda, "toy")


@pytest.mark.parametrize("name", ["emulator", "verikda:host"])
def test_targets_without_a_graph_refuse_what_needs_one(name: str) -> None:
    target, call = resolve(name), make_call(CASE)
    for change in ({"frozen": ("h0",)}, {"backwards": 2}):
        with pytest.raises(ValueError, match="has no graph of autograd"):
            target.run(replace(call, **change))
