"""Checks of what autograd asks of an operator: fewer gradients, another loss, the reverse once more."""

from __future__ import annotations

from dataclasses import replace

from verikda.checks.base import Check, Context, Outcome, compare, outcome, same
from verikda.checks.values import judged

GATES = ("g", "beta", "A_log", "dt_bias", "h0")
TOKENS = ("q", "k", "v")


def _has_graph(ctx: Context) -> str | None:
    if not ctx.capabilities.autograd:
        return "the target is no function of autograd"
    return None if ctx.call.backward else "no gradient"


def _frozen(ctx: Context) -> Outcome:
    """Half of the inputs at a time: operators that leave out what nobody asked for may leave out too much."""
    first = ctx.result.outputs
    for frozen in (GATES, TOKENS):
        call = replace(ctx.call, frozen=tuple(n for n in frozen if getattr(ctx.call.problem, n) is not None))
        got = ctx.run(call)
        names = tuple(n for n in first if n.removeprefix("d") not in frozen)
        what = f"{', '.join(call.frozen)} without gradient"
        out = same(ctx, "frozen", first, got.outputs, what, names, (got, call))
        if out.verdict != "pass":
            return out
    return Outcome("frozen", "pass")


def _second_backward(ctx: Context) -> Outcome:
    first = ctx.result
    again = ctx.run(replace(ctx.call, backwards=2))
    what = "a second backward through one forward"
    return outcome("second_backward", compare("second_backward", first.outputs, again.outputs, first.dtypes, what))


def _has_state_loss(ctx: Context) -> str | None:
    p = ctx.call.problem
    return None if ctx.call.backward and p.dht is not None and p.do is not None else "no gradient of the final state"


def _state_loss(ctx: Context) -> Outcome:
    call = replace(ctx.call, problem=replace(ctx.call.problem, do=None))
    return judged(ctx, "state_loss", call, "a loss on the final state alone")


CHECKS = (
    Check("frozen", "inputs that need no gradient change no bit of the other gradients", "FROZEN_HALF", True,
          _has_graph, _frozen),
    Check("second_backward", "a second backward through one forward gives the bits of the first", "BACKWARD_ONCE", True,
          _has_graph, _second_backward),
    Check("state_loss", "a loss on the final state alone gives its gradients within the floor", "STATE_LOSS_ALONE",
          False, _has_state_loss, _state_loss),
)  # fmt: skip
