"""The operators as functions of torch's autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from verikda.ops import engine
from verikda.ops.engine import Ready
from verikda.ops.validate import Checked


class _Chunked(torch.autograd.Function):  # type: ignore[misc]
    """Saves the arguments and, without recomputation, what the reverse reads of the forward."""

    @staticmethod
    def forward(ctx: Any, call: Checked, final_state: bool, recompute: bool, *tensors: Any) -> tuple[Any, Any]:
        names = tuple(call.given)
        ready = Ready.of(replace(call, given=dict(zip(names, tensors, strict=True))))
        keep = () if recompute else engine.needed(ready)
        out = engine.forward(ready, keep=keep, final_state=final_state)
        kept = {} if recompute else {name: out[name] for name in (*keep, "decay") if name in out}
        ctx.call, ctx.names, ctx.kept = replace(call, given={}), names, tuple(kept)
        ctx.save_for_backward(*tensors, *kept.values())
        ctx.set_materialize_grads(False)
        return out["o"], out.get("ht")

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Any, dht: Any) -> tuple[Any, ...]:
        found: Mapping[str, Any] = {}
        if do is not None or dht is not None:
            saved = ctx.saved_tensors  # read once: each reading unpacks, which activation checkpointing allows once
            tensors, kept = saved[: len(ctx.names)], saved[len(ctx.names) :]
            ready = Ready.of(replace(ctx.call, given=dict(zip(ctx.names, tensors, strict=True))))
            found = engine.backward(ready, do, dht, saved=dict(zip(ctx.kept, kept, strict=True)))
        wanted = ctx.needs_input_grad[3:]
        return (
            None,
            None,
            None,
            *(found.get(f"d{name}") if need else None for name, need in zip(ctx.names, wanted, strict=True)),
        )


def records(call: Checked) -> bool:
    """Whether autograd would want gradients of this call."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in call.given.values())


def apply(call: Checked, final_state: bool, recompute: bool) -> tuple[Any, Any]:
    """(o, final_state or None), with gradients."""
    answer: tuple[Any, Any] = _Chunked.apply(call, final_state, recompute, *call.given.values())
    return answer
