"""The adjoint identity: forward and reverse agree with each other, whatever either is compared with.

Outputs are linear in (v, h0), so <do, o> + <dht, ht> = <dv, v> + <dh0, h0>. The difference of the two sides is
judged against what it is in stochastic runs of the declared contract: a mean over few runs first, over many with
explicit float32 noise before a failure is reported.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from oracles.arithmetic import Stochastic
from oracles.chunked import emulate
from oracles.problem import Array, Problem
from verikda.checks.base import Check, Context, Failure, Outcome
from verikda.dtypes import ulp

_PAIRS = (("o", "do", 1.0), ("ht", "dht", 1.0), ("dv", "v", -1.0), ("dh0", "h0", -1.0))
_RUNS = ((8, None), (64, True))
"""Stochastic runs, and whether float32 noise is explicit: without, runs of a 16-bit contract add up float32 alike."""


def _gap(outputs: Mapping[str, Array], p: Problem) -> Array:
    """<do, o> + <dht, ht> - <dv, v> - <dh0, h0>, over all but a leading axis of runs.

    Not finite where an output is not, which the caller asks; inf * 0 and inf - inf on the way there are no news.
    """
    gap = np.zeros(())
    for output, weight, sign in _PAIRS:
        w = getattr(p, weight)
        if w is not None:
            x = outputs[output]
            with np.errstate(over="ignore", invalid="ignore"):
                gap = gap + sign * (x * w).sum(axis=tuple(range(x.ndim - w.ndim, x.ndim)))
    return gap


def _applies(ctx: Context) -> str | None:
    p = ctx.call.problem
    if not ctx.call.backward or p.do is None:
        return "no gradient of the output"
    if p.h0 is not None and "dh0" not in ctx.result.outputs:
        return "the target gives no gradient of the initial state"
    if "dv" not in ctx.result.outputs or (p.dht is not None and "ht" not in ctx.result.outputs):
        return "the target gives no dv or no final state"
    return None


def _adjoint(ctx: Context) -> Outcome:
    p, got = ctx.call.problem, ctx.result
    actual = float(_gap(got.outputs, p))
    if not np.isfinite(actual):
        return Outcome("adjoint", "inconclusive", detail="a result is not finite (the floor check judges that)")
    rounding = sum(
        float((getattr(p, weight) ** 2 * ulp(got.outputs[output], got.dtypes[output]) ** 2).sum()) / 12.0
        for output, weight, _ in _PAIRS
        if getattr(p, weight) is not None
    )
    ratio = 0.0
    for runs, noisy in _RUNS:
        rng = np.random.Generator(np.random.Philox(runs))
        gaps = _gap(emulate(p, ctx.contract, Stochastic(rng, runs, noisy)).outputs, p)
        if not np.isfinite(gaps).all():
            return Outcome("adjoint", "inconclusive", detail="the contract overflows on this input")
        noise = float(np.sqrt((gaps**2).mean() + rounding))
        if noise == 0.0 and actual == 0.0:
            return Outcome("adjoint", "inconclusive", detail="both sides are 0")
        ratio = abs(actual) / noise if noise else float("inf")
        if ratio <= ctx.limit / 2:
            break
    if ratio <= ctx.limit:
        return Outcome("adjoint", "pass", (), {})
    text = (
        f"<do,o> + <dht,ht> differs from <dv,v> + <dh0,h0> by {actual:.3g}, {ratio:.3g} times the noise of the contract"
    )
    return Outcome("adjoint", "fail", (Failure("adjoint", "dv", text, ratio=ratio),))


CHECKS = (
    Check(
        "adjoint",
        "<do,o> + <dht,ht> = <dv,v> + <dh0,h0> within the noise of the contract",
        "DV_A_NOT_TRANSPOSED",
        False,
        _applies,
        _adjoint,
    ),
)
