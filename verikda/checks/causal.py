"""Exact checks along time: later tokens, the length of the call, and a split on the chunk grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from oracles.arithmetic import Nearest
from oracles.chunked import emulate
from oracles.problem import Array
from verikda.call import Call, Result
from verikda.checks.base import Check, Context, Failure, Outcome, bitwise, outcome, same
from verikda.checks.transform import TOKEN_OUTPUTS, TOKENS, disturb_after, silence_after
from verikda.checks.values import can_split, run_split


def _longest(ctx: Context) -> tuple[int, int]:
    lengths = [stop - start for _, start, stop in ctx.call.problem.spans]
    sequence = int(np.argmax(lengths))
    return sequence, lengths[sequence]


def _cut(length: int, chunk: int) -> int:
    """Inside a chunk where there is room: a leak through an anchor row stays inside its sub-block."""
    return max(1, length - 1 - (length % 7)) if length <= chunk else length - max(1, (length % chunk) // 2)


def _two_tokens(ctx: Context) -> str | None:
    return None if _longest(ctx)[1] >= 2 else "no sequence of two tokens"


def _prefix(ctx: Context) -> Outcome:
    sequence, length = _longest(ctx)
    cut = _cut(length, ctx.contract.chunk or 64)
    b, start, stop = ctx.call.problem.spans[sequence]
    quiet = silence_after(ctx.call, sequence, cut)
    disturbed = disturb_after(quiet, sequence, cut)
    before, after = ctx.run(quiet), ctx.run(disturbed)
    failures: list[Failure] = []
    what = f"tokens from {cut} of sequence {sequence} changed"
    later = (b, slice(start + cut, stop))
    for name in before.outputs:
        expected, actual = before.outputs[name].copy(), after.outputs[name].copy()
        if name in TOKEN_OUTPUTS:
            if name != "o":
                for x in (expected, actual):
                    if x[later].size and np.abs(x[later]).max() != 0.0:  # NaN is not 0 either
                        failures.append(
                            Failure(
                                "prefix", name, f"{name} after token {cut} is not 0 though only earlier outputs count"
                            )
                        )
                        break
            expected[later] = actual[later] = 0.0
        elif name == "ht":
            expected[sequence] = actual[sequence] = 0.0
        elif name in ("dA_log", "ddt_bias") and ctx.call.problem.gate not in ("softplus", "bounded"):
            continue
        found = bitwise("prefix", name, expected, actual, before.dtypes[name], what)
        if found:
            failures.append(found)
    return _unless_overflow(ctx, outcome("prefix", failures), (before, after), (quiet, disturbed))


def _overflows(ctx: Context, *calls: Call) -> bool:
    """Whether the contract itself, rounded to nearest, gives a result that is not finite on one of these calls.

    Infinity times 0 is NaN: where this is so, what follows a token that counts for nothing may be anything.
    """
    results = (emulate(c.problem, ctx.contract, Nearest(), backward=c.backward).outputs for c in calls)
    return any(not np.isfinite(x).all() for outputs in results for x in outputs.values())


def _unless_overflow(ctx: Context, found: Outcome, results: Sequence[Result], calls: Sequence[Call]) -> Outcome:
    """`found`, or inconclusive for a failure where a result is not finite and the contract overflows too."""
    finite = all(np.isfinite(x).all() for r in results for x in r.outputs.values())
    if found.verdict != "fail" or finite or not _overflows(ctx, *calls):
        return found
    return Outcome(found.check, "inconclusive", detail="the contract overflows on this input")


def _can_shorten(ctx: Context) -> str | None:
    if ctx.call.problem.cu_seqlens is not None and len(ctx.call.problem.spans) > 1:
        return "several packed sequences"
    return _two_tokens(ctx)


def _length(ctx: Context) -> Outcome:
    p = ctx.call.problem
    _, length = _longest(ctx)
    cut = _cut(length, ctx.contract.chunk or 64)
    quiet = ctx.call
    for sequence in range(len(p.spans)):
        quiet = silence_after(quiet, sequence, cut)
    whole = ctx.run(quiet)
    rows: dict[str, object] = {n: getattr(quiet.problem, n)[:, :cut] for n in TOKENS if getattr(p, n) is not None}
    if p.cu_seqlens is not None:
        rows["cu_seqlens"] = np.array([0, cut])
    shorter = replace(quiet, problem=replace(quiet.problem, **rows))  # type: ignore[arg-type]
    part = ctx.run(shorter)
    expected: dict[str, Array] = {n: x[:, :cut] if n in TOKEN_OUTPUTS else x for n, x in whole.outputs.items()}
    names = tuple(n for n in expected if n in (*TOKEN_OUTPUTS, "dh0"))
    what = f"only the first {cut} tokens given"
    found = same(ctx, "length", expected, part.outputs, what, names, (part, shorter))
    return _unless_overflow(ctx, found, (whole, part), (quiet, shorter))


def _can_split_on_grid(ctx: Context) -> str | None:
    reason = can_split(ctx)
    if reason:
        return reason
    _, start, stop = ctx.call.problem.spans[0]
    chunk = ctx.contract.chunk or 1
    return None if stop - start > chunk else "no more than one chunk"


def _split_aligned(ctx: Context) -> Outcome:
    """Gradients of A_log and dt_bias add up over the two calls in another order and are left out."""
    chunk = ctx.contract.chunk or 1
    _, start, stop = ctx.call.problem.spans[0]
    cut = chunk * max(1, (stop - start - 1) // chunk // 2)
    (before, _), (after, _), _ = run_split(ctx, cut)
    whole = ctx.result.outputs
    outputs: dict[str, Array] = {}
    for name in TOKEN_OUTPUTS:
        if name in before.outputs and name in after.outputs:
            outputs[name] = np.zeros_like(whole[name])
            outputs[name][:, start : start + cut] = before.outputs[name]
            outputs[name][:, start + cut : stop] = after.outputs[name]
    if "ht" in whole:
        outputs["ht"] = after.outputs["ht"]
    if ctx.call.problem.h0 is not None and "dh0" in before.outputs:
        outputs["dh0"] = before.outputs["dh0"]
    joined = replace(ctx.result, outputs=outputs, dtypes={**after.dtypes, **before.dtypes})
    what = f"cut at chunk boundary {cut}"
    return same(ctx, "split_aligned", whole, outputs, what, tuple(outputs), (joined, ctx.call))


CHECKS = (
    Check(
        "prefix",
        "changing later tokens changes no bit of earlier outputs, nor of the gradients of a loss on earlier outputs",
        "ANCHOR_FUTURE",
        True,
        _two_tokens,
        _prefix,
    ),
    Check(
        "length",
        "leaving later tokens out changes no bit of the earlier results",
        "ANCHOR_FUTURE",
        True,
        _can_shorten,
        _length,
    ),
    Check(
        "split_aligned",
        "two calls cut at a chunk boundary, float32 state carried over, equal one call bit for bit",
        "STATE_IN_BF16",
        True,
        _can_split_on_grid,
        _split_aligned,
    ),
)
