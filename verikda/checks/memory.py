"""Checks of memory and repetition: what a call may read, write and remember."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from verikda.call import Call
from verikda.checks.base import Check, Context, Failure, Outcome, always, compare, outcome, same
from verikda.checks.transform import TOKENS, revised
from verikda.checks.values import judged
from verikda.dtypes import round_to


def _inputs_unchanged(ctx: Context) -> Outcome:
    failures = [
        Failure("inputs_unchanged", name, f"the call changed {name}, or memory beside it")
        for name in ctx.result.changed
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


def other_calls(ctx: Context) -> dict[str, Call]:
    """Calls that a cache keyed too loosely confuses with this one: other offsets or fewer tokens, another dtype."""
    found: dict[str, Call] = {}
    p = ctx.call.problem
    half = (p.q.shape[1] + 1) // 2
    if p.cu_seqlens is not None and not np.array_equal(np.diff(p.cu_seqlens), np.diff(p.cu_seqlens)[::-1]):
        cu = np.concatenate([[0], np.cumsum(np.diff(p.cu_seqlens)[::-1])]).astype(np.int64)
        found["a call with other offsets"] = replace(ctx.call, problem=replace(p, cu_seqlens=cu))
    elif half < p.q.shape[1] and (p.cu_seqlens is None or ctx.capabilities.empty):
        rows: dict[str, object] = {n: getattr(p, n)[:, :half] for n in TOKENS if getattr(p, n) is not None}
        if p.cu_seqlens is not None:
            rows["cu_seqlens"] = np.minimum(p.cu_seqlens, half)
        found["a call with fewer tokens"] = replace(ctx.call, problem=revised(p, rows))
    here = ctx.call.dtypes["q"]
    for dtype in ctx.capabilities.dtypes:
        if dtype != here:
            dtypes = {n: dtype if d == here and n in _FOLLOW else d for n, d in ctx.call.dtypes.items()}
            # times 0.999, so that the other dtype's last bits are in use
            values = {n: round_to(0.999 * getattr(p, n), dtypes[n]) for n in _FOLLOW if getattr(p, n) is not None}
            if all(np.isfinite(x).all() for n, x in values.items() if n != "g"):
                found[f"a call in {dtype}"] = replace(ctx.call, dtypes=dtypes, problem=revised(p, values))
                break
    return found


_FOLLOW = ("q", "k", "v", "g", "beta", "do")
"""Tensors whose dtype follows that of q where they share it."""


def _has_other(ctx: Context) -> str | None:
    return None if other_calls(ctx) else "no other call of these shapes"


def _call_order(ctx: Context) -> Outcome:
    """Whatever is remembered from an earlier call makes the other call wrong, or the first one when repeated."""
    first = ctx.result
    ratios: dict[str, float] = {}
    for what, other in other_calls(ctx).items():
        between = judged(ctx, "call_order", other, what)
        if between.verdict == "fail":
            return between
        for name, ratio in between.ratios.items():
            ratios[name] = max(ratio, ratios.get(name, 0.0))
        again = ctx.run(ctx.call)
        failures = compare("call_order", first.outputs, again.outputs, first.dtypes, f"repeated after {what}")
        if failures:
            return outcome("call_order", failures)
    return Outcome("call_order", "pass", (), ratios)


CHECKS = (
    Check("inputs_unchanged", "no input, nor memory beside it, is written", "INPUT_OVERWRITTEN", True,
          always, _inputs_unchanged),
    Check("repeat", "the same call twice gives the same bits", "ORDER_OF_SUM_VARIES", True, always, _repeat),
    Check("poison", "NaN or 1e30 beside the inputs and in padding rows changes no bit", "READS_ROWS_BEHIND", True,
          always, _poison),
    Check("views", "sliced, strided, expanded and misaligned inputs give the bits of contiguous ones",
          "STRIDES_IGNORED", True, _has_layouts, _views),
    Check("call_order", "calls with other offsets, length or dtype in between are right and leave no trace",
          "PACK_OFFSETS_CACHED", True, _has_other, _call_order),
)  # fmt: skip
