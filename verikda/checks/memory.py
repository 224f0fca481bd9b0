"""Checks of memory and repetition: what a call may read, write and remember."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from verikda.call import Call
from verikda.checks.base import Check, Context, Failure, Outcome, compare, outcome, same
from verikda.checks.transform import TOKENS
from verikda.checks.values import from_judgement


def _always(ctx: Context) -> str | None:
    return None


def _inputs_unchanged(ctx: Context) -> Outcome:
    failures = [
        Failure("inputs_unchanged", name, f"the call changed {name}, or memory beside it") for name in ctx.result.changed
    ]
    return outcome("inputs_unchanged", failures)


def _repeat(ctx: Context) -> Outcome:
    again = ctx.run(ctx.call)
    return outcome(
        "repeat", compare("repeat", ctx.result.outputs, again.outputs, again.dtypes, "the same call a second time")
    )


def _poison(ctx: Context) -> Outcome:
    failures: list[Failure] = []
    for value in (float("nan"), 1e30):
        got = ctx.run(replace(ctx.call, poison=value))
        failures += compare(
            "poison", ctx.result.outputs, got.outputs, got.dtypes, f"{value} around the inputs and in padding rows"
        )
        failures += [
            Failure("poison", name, f"the call changed {name}, or memory beside it") for name in got.changed
        ]
        if failures:
            break
    return outcome("poison", failures)


def _has_layouts(ctx: Context) -> str | None:
    return None if len(ctx.capabilities.layouts) > 1 else "the target takes contiguous inputs only"


def _views(ctx: Context) -> Outcome:
    for layout in ctx.capabilities.layouts:
        if layout != ctx.call.layout:
            other = replace(ctx.call, layout=layout)
            got = ctx.run(other)
            what = f"{layout} inputs instead of {ctx.call.layout}"
            out = same(ctx, "views", ctx.result.outputs, got.outputs, what, None, (got, other))
            if out.verdict != "pass":
                return out
    return Outcome("views", "pass")


def other_call(ctx: Context) -> Call | None:
    """A call of the same shapes with other offsets, or one with fewer tokens."""
    p = ctx.call.problem
    if p.cu_seqlens is not None and len(p.spans) > 1:
        lengths = np.diff(p.cu_seqlens)[::-1]
        cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        if not np.array_equal(cu, p.cu_seqlens):
            return replace(ctx.call, problem=replace(p, cu_seqlens=cu))
    half = (p.q.shape[1] + 1) // 2
    if half == p.q.shape[1] or (p.cu_seqlens is not None and not ctx.capabilities.empty):
        return None
    rows: dict[str, object] = {n: getattr(p, n)[:, :half] for n in TOKENS if getattr(p, n) is not None}
    if p.cu_seqlens is not None:
        rows["cu_seqlens"] = np.minimum(p.cu_seqlens, half)
    return replace(ctx.call, problem=replace(p, **rows))  # type: ignore[arg-type]


def _has_other(ctx: Context) -> str | None:
    return None if other_call(ctx) is not None else "no other call of these shapes"


def _call_order(ctx: Context) -> Outcome:
    """Offsets or lengths remembered from an earlier call make the other call wrong, or the first when repeated."""
    first, other = ctx.result, other_call(ctx)
    assert other is not None
    between = from_judgement("call_order", ctx.judge(ctx.run(other), other), "a second, different call")
    if between.verdict == "fail":
        return between
    again = ctx.run(ctx.call)
    failures = compare("call_order", first.outputs, again.outputs, first.dtypes, "repeated after another call")
    return outcome("call_order", failures, ratios=between.ratios)


CHECKS = (
    Check("inputs_unchanged", "no input, nor memory beside it, is written", "WRITES_INTO_V", True,
          _always, _inputs_unchanged),
    Check("repeat", "the same call twice gives the same bits", "RANDOM_ORDER_SUM", True, _always, _repeat),
    Check("poison", "NaN or 1e30 beside the inputs and in padding rows changes no bit", "READS_PADDING", True,
          _always, _poison),
    Check("views", "sliced, strided, expanded and misaligned inputs give the bits of contiguous ones",
          "IGNORES_STRIDES", True, _has_layouts, _views),
    Check("call_order", "a call with other offsets or length in between is right and leaves no trace",
          "OFFSETS_CACHED", True, _has_other, _call_order),
)  # fmt: skip
