"""Checks of value: every output against float64, under the noise floor of the declared contract.

Relations that hold in exact arithmetic but not bit for bit (another chunk size, a split off the
chunk grid, a flag that changes only the layout or the memory use) are the same judgement of another
call, because the truth does not change.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from oracles.problem import Array
from verikda.call import Call, Malformed, Result
from verikda.checks.base import Check, Context, Failure, Outcome, always, failures_of
from verikda.checks.transform import TOKENS, revised
from verikda.floor import Judgement
from verikda.inputs import SAFE_GATE


def from_judgement(check: str, judgement: Judgement, what: str = "") -> Outcome:
    """Turn a judgement of values into an outcome; `what` says in words of which call, where it is another one."""
    ratios = {v.output: v.ratio for v in judgement.outputs.values() if v.ratio is not None}
    detail = ": ".join(text for text in (what, judgement.detail) if text)
    return Outcome(check, judgement.verdict, failures_of(check, judgement, what), ratios, detail)


def promised(ctx: Context, call: Call) -> tuple[str, ...]:
    """Outputs that the target's capabilities say a call returns."""
    p = call.problem
    has_state = ctx.capabilities.initial_state or ctx.capabilities.dht
    names = ["o"] + ["ht"] * (has_state and call.final_state)
    if call.backward:
        given = [n for n in ("q", "k", "v", "g", "beta", "h0", "A_log", "dt_bias") if getattr(p, n) is not None]
        names += [f"d{n}" for n in given]
    return tuple(names)


def _floor(ctx: Context) -> Outcome:
    missing = tuple(
        Failure(
            "floor",
            name,
            f"{name} is missing: the target declares it but did not return it (a forward-only function says so with "
            'verikda_capabilities = {"backward": False})',
        )
        for name in promised(ctx, ctx.call)
        if name not in ctx.result.outputs
    )
    if missing:
        return Outcome("floor", "fail", missing)
    return from_judgement("floor", ctx.judge(ctx.result))


def judged(
    ctx: Context, check: str, call: Call, what: str, result: Result | None = None, truth: dict[str, Array] | None = None
) -> Outcome:
    """What the floor says of another call, in which no output may be missing that this context's call gave.

    Parameters
    ----------
    check : name of the check that asks.
    call : the other call; `what` says in words what it is.
    result : of it; None makes the call.
    truth : float64 reference of it; None computes it.
    """
    got = ctx.run(call) if result is None else result
    names = [n for n in promised(ctx, call) if n in ctx.result.outputs and n not in got.outputs]
    if names:
        return Outcome(check, "fail", tuple(Failure(check, n, f"{what}: {n} is missing") for n in names))
    found = ctx.judge(got, call, truth)
    return from_judgement(check, found, what)


def _has_state_loss(ctx: Context) -> str | None:
    p = ctx.call.problem
    return None if ctx.call.backward and p.dht is not None and p.do is not None else "no gradient of the final state"


def _state_loss(ctx: Context) -> Outcome:
    call = replace(ctx.call, problem=replace(ctx.call.problem, do=None))
    return judged(ctx, "state_loss", call, "a loss on the final state alone")


def _flip(ctx: Context, check: str, flag: str) -> Outcome:
    call = replace(ctx.call, **{flag: not getattr(ctx.call, flag)})  # type: ignore[arg-type]
    return judged(ctx, check, call, f"{flag}={getattr(call, flag)}", truth=ctx.truth)


def _state_v_first(ctx: Context) -> Outcome:
    return _flip(ctx, "v_first", "state_v_first")


def _recompute(ctx: Context) -> Outcome:
    return _flip(ctx, "recompute", "recompute")


def _safe_gate(ctx: Context) -> Outcome:
    return _flip(ctx, "safe_gate", "safe_gate")


def _chunk_sizes(ctx: Context) -> Outcome:
    worst: dict[str, float] = {}
    for chunk in ctx.capabilities.chunk_sizes:
        if chunk == ctx.call.chunk_size:
            continue
        call = replace(ctx.call, chunk_size=chunk)
        out = judged(ctx, "chunk_sizes", call, f"chunk_size={chunk}", truth=ctx.truth)
        for name, ratio in out.ratios.items():
            worst[name] = max(worst.get(name, 0.0), ratio)
        if out.verdict != "pass":
            return out
    return Outcome("chunk_sizes", "pass", (), worst)


def can_split(ctx: Context) -> str | None:
    """Why a split with a carried state cannot be tried, or None."""
    p = ctx.call.problem
    if not ctx.capabilities.initial_state:
        return "the target takes no initial state"
    if len({stop - start for _, start, stop in p.spans}) != 1:
        return "sequences of several lengths"
    if p.cu_seqlens is not None and len(p.spans) > 1:
        return "several packed sequences"
    if ctx.call.backward and not ctx.capabilities.dht:
        return "the target takes no gradient of the final state"
    return None


Part = tuple[Result, Call]


def run_split(ctx: Context, cut: int) -> tuple[Part, Part, Part]:
    """Tokens before and after `cut` as two calls: state carried forward, its gradient carried back.

    Returns
    -------
    before, after : the two parts.
    alone : the part before `cut` as it was first run, without gradients, for its state; `before` of a forward call.
    """
    call, p = ctx.call, ctx.call.problem
    _, start, stop = p.spans[0]
    rows = {name: getattr(p, name) for name in TOKENS if getattr(p, name) is not None}
    first: dict[str, object] = {name: x[:, start : start + cut] for name, x in rows.items()}
    second: dict[str, object] = {name: x[:, start + cut : stop] for name, x in rows.items()}
    if p.cu_seqlens is not None:
        first["cu_seqlens"] = np.array([0, cut])
        second["cu_seqlens"] = np.array([0, stop - start - cut])

    def part(tokens: dict[str, object], backward: bool, **states: object) -> Call:
        dtypes = {**call.dtypes, "h0": "float32", "dht": "float32"}
        problem = revised(p, {**tokens, **states})
        return replace(call, backward=backward, dtypes=dtypes, problem=problem, final_state=True)

    early = part(first, False, dht=None)
    before = ctx.run(early)
    alone = before, early
    late = part(second, call.backward, h0=_finite(before, "ht"))
    after = ctx.run(late)
    if call.backward:
        if "dh0" not in after.outputs:
            raise Malformed("an initial state was given, but no gradient of it came back")
        early = part(first, True, dht=_finite(after, "dh0"))
        before = ctx.run(early)
    return (before, early), (after, late), alone


def _finite(result: Result, name: str) -> Array:
    """What one part hands to the other; values that are not finite are no input."""
    handed = result.outputs[name]
    if not np.isfinite(handed).all():
        raise Malformed(f"{name} of one part of the call is not finite and cannot be handed to the other")
    return handed


def _can_split_anywhere(ctx: Context) -> str | None:
    reason = can_split(ctx)
    if reason is None and ctx.call.problem.spans[0][2] - ctx.call.problem.spans[0][1] < 2:
        reason = "fewer than two tokens"
    return reason


def _split_anywhere(ctx: Context) -> Outcome:
    """Each part by its own truth: what was handed over is an input of the other, so nothing is counted twice.

    The part before the cut is judged as it was run without gradients too: calls of inference may take other kernels.
    """
    _, start, stop = ctx.call.problem.spans[0]
    n = stop - start
    cut = n - 1 if n % 2 else 1 + n // 3  # one decode step, or well off the chunk grid
    worst: dict[str, float] = {}
    parts = dict(zip(("before", "after", "without gradients before"), run_split(ctx, cut), strict=True))
    if not ctx.call.backward:
        del parts["without gradients before"]  # "before" is the same run
    for name, (result, call) in parts.items():
        out = judged(ctx, "split_anywhere", call, f"tokens {name} a cut at {cut}", result)
        worst = {k: max(worst.get(k, 0.0), out.ratios.get(k, 0.0)) for k in {*worst, *out.ratios}}
        if out.verdict == "fail":
            return out
    return Outcome("split_anywhere", "pass", (), worst)


def _several_chunk_sizes(ctx: Context) -> str | None:
    return None if len(ctx.capabilities.chunk_sizes) > 1 else "the target has one chunk size"


def _has_v_first(ctx: Context) -> str | None:
    return None if ctx.capabilities.state_v_first else "the target has no state_v_first"


def _beyond_safe_gate(ctx: Context) -> str | None:
    p = ctx.call.problem
    if not ctx.capabilities.safe_gate:
        return "the target has no safe_gate"
    if not ctx.capabilities.beyond_safe_gate:
        return f"the target does not promise gates below {SAFE_GATE:g} under safe_gate (beyond_safe_gate)"
    if ctx.call.safe_gate or p.gate != "log" or p.g is None or not (p.g < SAFE_GATE).any():
        return f"no given gate below {SAFE_GATE:g}"
    return None


def _has_recompute(ctx: Context) -> str | None:
    return None if ctx.capabilities.recompute else "the target has no disable_recompute"


CHECKS = (
    Check(
        "floor",
        "every output is finite where float64 is, and within 4 noise floors of it",
        "RULE_RESIDUAL_UNDECAYED",
        False,
        always,
        _floor,
    ),
    Check(
        "chunk_sizes",
        "the same holds for every other chunk size",
        "DK_CHUNK_64",
        False,
        _several_chunk_sizes,
        _chunk_sizes,
    ),
    Check(
        "split_anywhere",
        "two calls with the state carried over give what one call gives, cut off the grid or before the last token",
        "SIGMOID_TWICE_IN_DECODE",
        False,
        _can_split_anywhere,
        _split_anywhere,
    ),
    Check(
        "v_first",
        "states given and returned as [V,K] are the transposed ones",
        "STATE_V_FIRST_NOT_READ",
        False,
        _has_v_first,
        _state_v_first,
    ),
    Check(
        "recompute",
        "recomputing or storing intermediates gives gradients within the floor",
        "SAVED_STATE_AFTER_CHUNK",
        False,
        _has_recompute,
        _recompute,
    ),
    Check(
        "safe_gate",
        "a call with gates below -5 gives the same under safe_gate, by targets that promise it",
        "SAFE_GATE_CLAMPS",
        False,
        _beyond_safe_gate,
        _safe_gate,
    ),
    Check(
        "state_loss",
        "a loss on the final state alone gives its gradients within the floor",
        "STATE_LOSS_ALONE",
        False,
        _has_state_loss,
        _state_loss,
    ),
)
