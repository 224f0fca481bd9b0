"""Exact checks across heads, batch and packs, and of scaling: a sequence and a head stand alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from oracles.arithmetic import Nearest
from oracles.chunked import emulate
from oracles.problem import Array
from verikda.call import Call
from verikda.checks.base import Check, Context, Failure, Outcome, compare, outcome, same
from verikda.checks.transform import (
    STATE_OUTPUTS,
    TOKEN_OUTPUTS,
    gather_rows,
    pick,
    repeat_heads,
    revised,
    roll_heads,
    unpacked,
    unroll_heads,
)
from verikda.counter import uniform
from verikda.dtypes import round_to

_PER_TOKEN_AND_STATE = (*TOKEN_OUTPUTS, *STATE_OUTPUTS)


def _two_heads(ctx: Context) -> str | None:
    return None if ctx.call.problem.q.shape[2] > 1 else "one head"


def _permute_heads(ctx: Context) -> Outcome:
    p = ctx.call.problem
    call = replace(ctx.call, problem=roll_heads(p))
    rolled = ctx.run(call)
    back = unroll_heads(rolled.outputs, p.v.shape[2] // p.q.shape[2])
    # Where a library works through an array in vectors, an element's place in memory decides who computes it.
    return same(ctx, "permute_heads", ctx.result.outputs, back, "heads in another order", None, (rolled, call))


def _two_sequences(ctx: Context) -> str | None:
    return None if len(ctx.call.problem.spans) > 1 else "one sequence"


def _permute_batch(ctx: Context) -> Outcome:
    p = ctx.call.problem
    n = len(p.spans)
    order = [*range(1, n), 0]
    back = np.argsort(order)
    if p.cu_seqlens is None:
        rolled = {}
        for name in ("q", "k", "v", "g", "beta", "do", "h0", "dht"):
            x = getattr(p, name)
            if x is not None:
                rolled[name] = x[order]
        call = replace(ctx.call, problem=revised(p, rolled))
        got = ctx.run(call)
        outputs = {n: x[back] if n in _PER_TOKEN_AND_STATE else x for n, x in got.outputs.items()}
        expected = dict(ctx.result.outputs)
    else:
        call = replace(ctx.call, problem=pick(p, [p.spans[i] for i in order], order))
        got = ctx.run(call)
        starts = np.concatenate([[0], np.cumsum([p.spans[i][2] - p.spans[i][1] for i in order])])
        spans = [(0, int(starts[i]), int(starts[i + 1])) for i in back]
        outputs = gather_rows(got.outputs, spans)
        expected = gather_rows(ctx.result.outputs, p.spans)
        for name in STATE_OUTPUTS:
            if name in got.outputs:
                outputs[name], expected[name] = got.outputs[name][back], ctx.result.outputs[name]
    names = tuple(n for n in expected if n in _PER_TOKEN_AND_STATE)
    return same(ctx, "permute_batch", expected, outputs, "sequences in another order", names, (got, call))


def _separable(ctx: Context) -> str | None:
    return _two_sequences(ctx) if ctx.call.problem.cu_seqlens is not None else "not packed"


def _packed_separate(ctx: Context) -> Outcome:
    """First, longest and last sequence, each alone in an ordinary batch of one."""
    p = ctx.call.problem
    lengths = [stop - start for _, start, stop in p.spans]
    chosen = sorted({0, int(np.argmax(lengths)), len(lengths) - 1})
    for i in chosen:
        if lengths[i] == 0:
            continue
        single = replace(ctx.call, problem=unpacked(pick(p, [p.spans[i]], [i])))
        alone = ctx.run(single)
        expected = gather_rows(ctx.result.outputs, [p.spans[i]])
        for name in STATE_OUTPUTS:
            if name in ctx.result.outputs and name in alone.outputs:
                expected[name] = ctx.result.outputs[name][i : i + 1]
        names = tuple(n for n in expected if n in _PER_TOKEN_AND_STATE)
        what = f"sequence {i} of the pack, against the same sequence alone"
        out = same(ctx, "packed_separate", alone.outputs, expected, what, names, (alone, single))
        if out.verdict != "pass":
            return out
    return Outcome("packed_separate", "pass")


def _has_empty(ctx: Context) -> str | None:
    p = ctx.call.problem
    return None if any(start == stop for _, start, stop in p.spans) else "no empty sequence"


def _empty_passthrough(ctx: Context) -> Outcome:
    p = ctx.call.problem
    failures: list[Failure] = []
    for source, name in ((p.h0, "ht"), (p.dht, "dh0")):
        if name not in ctx.result.outputs:
            continue
        got = ctx.result.outputs[name]
        given = np.zeros_like(got) if source is None else source
        empty = [i for i, (_, start, stop) in enumerate(p.spans) if start == stop]
        expected = got.copy()
        expected[empty] = given[empty]
        failures += compare("empty_passthrough", {name: expected}, {name: got}, ctx.result.dtypes, "an empty sequence")
    return outcome("empty_passthrough", failures)


def _has_padding(ctx: Context) -> str | None:
    p = ctx.call.problem
    if p.cu_seqlens is None or p.cu_seqlens[-1] == p.q.shape[1]:
        return "no rows after the last offset"
    return None


def _padding_rows(ctx: Context) -> Outcome:
    cu = ctx.call.problem.cu_seqlens
    assert cu is not None
    failures: list[Failure] = []
    for name in TOKEN_OUTPUTS:
        if name in ctx.result.outputs:
            got = ctx.result.outputs[name]
            expected = got.copy()
            expected[:, int(cu[-1]) :] = 0.0
            failures += compare(
                "padding_rows", {name: expected}, {name: got}, ctx.result.dtypes, "rows after the last offset"
            )
    return outcome("padding_rows", failures)


def _is_grouped(ctx: Context) -> str | None:
    p = ctx.call.problem
    return None if p.v.shape[2] > p.q.shape[2] else "as many value heads as query heads"


def _grouped_repeated(ctx: Context) -> Outcome:
    more_heads = replace(ctx.call, problem=repeat_heads(ctx.call.problem))
    repeated = ctx.run(more_heads)
    names = tuple(n for n in ctx.result.outputs if n not in ("dq", "dk"))
    what = "grouped value heads, against q and k repeated for each"
    return same(ctx, "grouped_repeated", repeated.outputs, ctx.result.outputs, what, names, (repeated, more_heads))


_FACTOR = -2.0
_TINY = 2.0**-100
"""Below this, doubling may bring a subnormal back to full precision."""


def _can_scale(ctx: Context) -> str | None:
    return "float16 has subnormals in reach" if ctx.call.dtypes["q"] == "float16" else None


def _power_of_two(ctx: Context) -> Outcome:
    """V and h0 times -2: o, ht, dq, dk, dg and dbeta times -2, dv and dh0 unchanged, every bit."""
    p = ctx.call.problem
    with np.errstate(over="ignore"):
        v = round_to(p.v * _FACTOR, ctx.call.dtypes["v"])
    if not np.isfinite(v).all():
        return Outcome("power_of_two", "inconclusive", detail="2 v does not fit its dtype")
    scaled = ctx.run(replace(ctx.call, problem=replace(p, v=v, h0=None if p.h0 is None else p.h0 * _FACTOR)))
    expected = {}
    actual = dict(scaled.outputs)
    for name, x in ctx.result.outputs.items():
        expected[name] = x if name in ("dv", "dh0") else x * _FACTOR
        if name in actual and actual[name].shape == x.shape:
            small = (np.abs(expected[name]) < _TINY) & (np.abs(actual[name]) < _TINY)
            unrepresentable = ~np.isfinite(round_to(expected[name], scaled.dtypes[name]))
            actual[name] = np.where(small | unrepresentable, expected[name], actual[name])
    return outcome("power_of_two", compare("power_of_two", expected, actual, scaled.dtypes, "v and h0 times -2"))


def integer_call(call: Call, scale: float) -> Call:
    """The same geometry with small integers: one-hot keys, beta 0 or 1, no decay.

    Every intermediate is a small integer (times the power of two `scale`), exact in every dtype.
    """
    p = call.problem
    seed = p.q.size + 31 * p.v.size + 977 * p.beta.size

    def sparse(name: str, shape: tuple[int, ...]) -> Array:
        values = np.floor(uniform(seed, name, shape) * 5.0) - 2.0
        return np.where(uniform(seed, name + " kept", shape) < 0.2, values, 0.0)

    k = np.zeros_like(p.k)
    hot = np.floor(uniform(seed, "k", p.k.shape[:3]) * p.k.shape[3]).astype(np.int64)
    np.put_along_axis(k, hot[..., None], 1.0, axis=3)
    ungated = p.g is None
    return replace(
        call,
        safe_gate=False,
        problem=replace(
            p,
            q=sparse("q", p.q.shape),
            k=k,
            v=sparse("v", p.v.shape),
            g=None if ungated else np.zeros(p.v.shape[:3] + p.k.shape[3:]),
            gate="none" if ungated else "log",
            beta=np.floor(uniform(seed, "beta", p.beta.shape) * 2.0),
            scale=scale,
            h0=None if p.h0 is None else sparse("h0", p.h0.shape),
            do=None if p.do is None else sparse("do", p.do.shape),
            dht=None if p.dht is None else sparse("dht", p.dht.shape),
            A_log=None,
            dt_bias=None,
            lower_bound=None,
            qk_l2norm=False,
            beta_sigmoid=False,
            allow_neg_eigval=False,
        ),
    )


def _can_be_exact(ctx: Context) -> str | None:
    if max(ctx.call.problem.q.shape[:2]) > 4096:
        return "more rows than the generator of integers has"
    if ctx.capabilities.scale:
        return None
    return None if ctx.call.problem.q.shape[3] in (1, 4, 16, 64, 256) else "K**-0.5 is not a power of two"


def _integers(ctx: Context) -> Outcome:
    K = ctx.call.problem.q.shape[3]
    call = integer_call(ctx.call, 1.0 if ctx.capabilities.scale else K**-0.5)
    truth = ctx.truth_of(call)
    contract = ctx.target.contract(call)
    got = ctx.run(call)
    model = emulate(call.problem, contract, Nearest(), backward=call.backward, output_dtypes=got.dtypes).outputs
    expected = {n: round_to(x, got.dtypes[n]) for n, x in truth.items() if n in got.outputs}
    exact = tuple(n for n in expected if np.array_equal(model[n], expected[n]))
    if not exact:
        return Outcome("integers", "inconclusive", detail="the contract itself is not exact on these integers")
    return outcome(
        "integers", compare("integers", expected, got.outputs, got.dtypes, "small integers are exact", exact)
    )


CHECKS = (
    Check("permute_heads", "permuting heads permutes the results, every bit", "HEADS_GATE_OF_HEAD_0", True,
          _two_heads, _permute_heads),
    Check("permute_batch", "permuting sequences permutes the results, every bit", "PACK_STATE_LEAKS", True,
          _two_sequences, _permute_batch),
    Check("packed_separate", "each packed sequence gives what it gives alone, every bit", "PACK_GRID_NOT_RESTARTED",
          True, _separable, _packed_separate),
    Check("empty_passthrough", "an empty sequence hands its state and its state gradient through", "PACK_EMPTY_RESETS",
          True, _has_empty, _empty_passthrough),
    Check("padding_rows", "rows after the last offset are 0 in every output and gradient", "PACK_ROWS_BEHIND_STALE",
          True, _has_padding, _padding_rows),
    Check("grouped_repeated", "grouped value heads equal repeated query/key heads, every bit", "GROUP_MODULO",
          True, _is_grouped, _grouped_repeated),
    Check("power_of_two", "v and h0 times -2 scale every result by 1 or -2, every bit", "VALUE_CLAMPED", True,
          _can_scale, _power_of_two),
    Check("integers", "small integers with one-hot keys and no decay come out exact", "MASK_AQK_STRICT", True,
          _can_be_exact, _integers),
)  # fmt: skip
