"""What autograd asks of a torch function beside one backward for all inputs: shown on operators that get it wrong."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")

import torch
import toy_kda

from verikda.case import Case
from verikda.checks import named
from verikda.run_case import run_case
from verikda.targets.torch_function import TorchFunction

CHECKS = ("frozen", "second_backward", "state_loss")
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
        ("dv over v", ("second_backward",)),
        ("frees what it saved", ("second_backward",)),
        ("no loss without do", ("state_loss",)),
    ],
)
def test_each_is_seen_by_its_own_check(fault: str, fails: tuple[str, ...]) -> None:
    report = run_case(operator(fault), CASE, named(CHECKS))
    assert tuple(o.check for o in report.outcomes if o.verdict == "fail") == fails
    assert [o.check for o in report.outcomes] == list(CHECKS)
