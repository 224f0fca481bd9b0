"""Transformations of a problem whose effect on the results is known exactly.

Each takes and returns plain arrays in the public layout. Values stay representable in
their dtype, so nothing is rounded twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from oracles.problem import Array, Problem
from verikda.call import Call
from verikda.dtypes import round_to

TOKENS = ("q", "k", "v", "g", "beta", "do")
"""Arguments with a token axis (axis 1)."""

TOKEN_OUTPUTS = ("o", "dq", "dk", "dv", "dg", "dbeta")
STATE_OUTPUTS = ("ht", "dh0")


def revised(problem: Problem, changes: Mapping[str, object]) -> Problem:
    """The problem with some of its fields replaced."""
    return replace(problem, **changes)  # type: ignore[arg-type]


def token_rows(problem: Problem, rows: Sequence[tuple[int, int, int]]) -> dict[str, Array]:
    """Concatenate row spans (batch, start, stop) of every token argument into one B = 1 row."""
    taken = {}
    for name in TOKENS:
        x = getattr(problem, name)
        if x is not None:
            taken[name] = np.concatenate([x[b : b + 1, start:stop] for b, start, stop in rows], axis=1)
    return taken


def pick(problem: Problem, spans: Sequence[tuple[int, int, int]], states: Sequence[int]) -> Problem:
    """The packed problem (B = 1) made of these spans, with the states of these sequences."""
    lengths = [stop - start for _, start, stop in spans]
    index = list(states)
    changes: dict[str, object] = {
        **token_rows(problem, spans),
        "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "h0": None if problem.h0 is None else problem.h0[index],
        "dht": None if problem.dht is None else problem.dht[index],
    }
    return revised(problem, changes)


def unpacked(problem: Problem) -> Problem:
    """A packed problem of one sequence as an ordinary batch of one."""
    return replace(problem, cu_seqlens=None)


def gather_rows(outputs: Mapping[str, Array], spans: Sequence[tuple[int, int, int]]) -> dict[str, Array]:
    """Token outputs at these spans, concatenated into one B = 1 row."""
    return {
        name: np.concatenate([outputs[name][b : b + 1, start:stop] for b, start, stop in spans], axis=1)
        for name in TOKEN_OUTPUTS
        if name in outputs
    }


def disturb_after(call: Call, sequence: int, cut: int) -> Call:
    """Change q, k, v, g and beta of one sequence from token `cut` of it on; do there becomes 0, and its dht too.

    Gates stay <= 0 where they were, |k| is unchanged and beta shrinks, so the domain is kept.
    """
    p = call.problem
    b, start, stop = p.spans[sequence]
    rows = (b, slice(start + cut, stop))
    changes: dict[str, Array] = {}
    for name in ("q", "k", "v"):
        x = getattr(p, name).copy()
        x[rows] = -x[rows][..., ::-1]
        changes[name] = x
    beta = p.beta.copy()
    beta[rows] = round_to(0.5 * beta[rows], call.dtypes["beta"])
    changes["beta"] = beta
    if p.g is not None:
        g = p.g.copy()
        g[rows] = round_to(0.25 * np.where(np.isfinite(g[rows]), g[rows], -1.0) - 0.75, call.dtypes["g"])
        changes["g"] = g
    return replace(call, problem=revised(p, changes))


def silence_after(call: Call, sequence: int, cut: int) -> Call:
    """Gradients of the outputs from token `cut` of one sequence on, and of its final state, become 0."""
    p = call.problem
    b, start, stop = p.spans[sequence]
    changes: dict[str, Array] = {}
    if p.do is not None:
        changes["do"] = p.do.copy()
        changes["do"][b, start + cut : stop] = 0.0
    if p.dht is not None:
        changes["dht"] = p.dht.copy()
        changes["dht"][sequence] = 0.0
    return replace(call, problem=revised(p, changes))


def head_axis(name: str) -> int:
    """Axis of the heads in an input or output of that name."""
    states, per_head = ("h0", "dht", "ht", "dh0"), ("A_log", "dt_bias", "dA_log", "ddt_bias")
    return 1 if name in states else 0 if name in per_head else 2


def roll_heads(problem: Problem) -> Problem:
    """Move every query/key head, with its group of value heads, one place on."""
    groups = problem.v.shape[2] // problem.q.shape[2]
    changes = {}
    for name in ("q", "k", "v", "g", "beta", "do", "h0", "dht", "A_log", "dt_bias"):
        x = getattr(problem, name)
        if x is not None:
            changes[name] = np.roll(x, 1 if name in ("q", "k") else groups, axis=head_axis(name))
    return revised(problem, changes)


def unroll_heads(outputs: Mapping[str, Array], groups: int) -> dict[str, Array]:
    """Undo `roll_heads` on its results."""
    step = {"dq": 1, "dk": 1}
    return {name: np.roll(x, -step.get(name, groups), axis=head_axis(name)) for name, x in outputs.items()}


def repeat_heads(problem: Problem) -> Problem:
    """Grouped values as ordinary heads: q and k repeated for each value head."""
    groups = problem.v.shape[2] // problem.q.shape[2]
    return replace(problem, q=np.repeat(problem.q, groups, axis=2), k=np.repeat(problem.k, groups, axis=2))
