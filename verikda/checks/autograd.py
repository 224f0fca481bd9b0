"""Checks of what autograd asks of an operator: fewer gradients, the reverse once more."""

from __future__ import annotations

from dataclasses import replace

from verikda.checks.base import Check, Context, Outcome, compare, outcome, same

HALVES = (("g", "beta", "A_log", "dt_bias", "h0"), ("q", "k", "v"))


def _has_graph(ctx: Context) -> str | None:
    if not ctx.capabilities.autograd:
        return "the target is no function of autograd"
    return None if ctx.call.backward else "no gradient"


def _frozen(ctx: Context) -> Outcome:
    """Half of the inputs at a time: operators that leave out what nobody asked for may leave out too much."""
    first = ctx.result.outputs
    open_ = Outcome("frozen", "pass")
    for frozen in HALVES:
        call = replace(ctx.call, frozen=tuple(n for n in frozen if getattr(ctx.call.problem, n) is not None))
        got = ctx.run(call)
        names = tuple(n for n in first if n.removeprefix("d") not in frozen)
        what = f"{', '.join(call.frozen)} without gradient"
        out = same(ctx, "frozen", first, got.outputs, what, names, (got, call))
        if out.verdict == "fail":
            return out
        if out.verdict != "pass":
            open_ = out
    return open_


def _second_backward(ctx: Context) -> Outcome:
    first = ctx.result
    again = ctx.run(replace(ctx.call, backwards=2))
    what = "a second backward through one forward"
    return outcome("second_backward", compare("second_backward", first.outputs, again.outputs, first.dtypes, what))


CHECKS = (
    Check("frozen", "inputs that need no gradient change no bit of the other gradients", "FROZEN_HALF", True,
          _has_graph, _frozen),
    Check("second_backward", "a second backward through one forward gives the bits of the first", "BACKWARD_ONCE", True,
          _has_graph, _second_backward),
)  # fmt: skip
