"""What a search starts with: cases that are always the same, each kind for what random ones would find late or never.

Every option of every knob (`stratified`), thousands of tokens (`long_cases`), the channels of real models
(`wide_cases`), sums of few terms (`coherent_cases`) and float16 just below its end (`brink_cases`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from oracles.arithmetic import Exact
from oracles.chunked import emulate
from oracles.contract import chunked32
from verikda import counter, knobs
from verikda.call import Capabilities
from verikda.case import Case
from verikda.inputs import make_call
from verikda.knobs import Limits

_WITH = {
    "gate_in_kernel": ("dtype",),
    "lower_bound": ("dtype", "gate_in_kernel"),
    "gate_magnitude": ("dtype", "gate_in_kernel", "lower_bound"),
    "final_state": ("dht",),
}
"""Knobs whose options the stratified start counts apart for each value of other knobs."""


def stratified(
    capabilities: Capabilities | None = None, n: int = 100, *, variant: int = 0, **options: Any
) -> list[Case]:
    """`n` cases, always the same, in which every option of every knob comes up early and about equally often.

    The form of the gate does so for each dtype by itself, its magnitude for each dtype and form. The first case is a
    16-bit one where the target has any: what a process keeps of its first call (cuLA #43) harms later calls only if it
    was narrow.

    Run them before a random search: with the default `n` every regime, dtype, flag and length class that the
    target supports is in.

    Parameters
    ----------
    capabilities : of the target; None is a complete implementation.
    n : how many.
    variant : another number combines the options in another way, with other values.
    **options : limits and fixed knobs, as in `cases`.
    """
    limits = {name: options.pop(name) for name in list(options) if name in Limits.__dataclass_fields__}
    space = knobs.Space(capabilities or Capabilities(), Limits(**limits), options)
    # each knob takes the option used least so far; ties fall by a hash, so that knobs do not run in step
    used: dict[tuple[Any, ...], int] = {}
    out: list[Case] = []
    for i in range(n):
        known: dict[str, Any] = {}
        for name in knobs.OPTIONS:
            if name == "seed" and name not in space.fixed:
                known[name] = (i + 1_000_003 * variant) % 2**32
                continue
            values = space.options(name, known)
            if name == "dtype" and i == 0:
                values = tuple(x for x in values if x != "float32") or values
            if len(values) == 1:
                known[name] = values[0]  # no choice: it must not count against this option elsewhere
                continue
            classes: list[tuple[Any, ...]] = [(x, values[:j].count(x)) for j, x in enumerate(values)]
            if name in _WITH:
                classes = [(*c, *(known[other] for other in _WITH[name])) for c in classes]
            if name == "lengths" and name not in space.fixed:
                named = knobs.length_classes(SimpleNamespace(**known), space.capabilities, space.limits)
                classes = [(label, 0) for label in named]
            key = counter.stream_key(i + (variant << 32), name)
            best = min(range(len(values)), key=lambda j: (used.get((name, *classes[j]), 0), counter.mix(key + j)))
            used[name, *classes[best]] = used.get((name, *classes[best]), 0) + 1
            known[name] = values[best]
        out.append(Case(**known))
    return out


_LIVELY: dict[str, Any] = {
    "dtype": "float32",
    "gate_regime": "slow",
    "gate_magnitude": 1.0,
    "key_regime": "random",
    "query_regime": "random",
    "beta_regime": "random",
    "value_regime": "random",
    "do_regime": "random",
    "q_exponent": 0,
    "v_exponent": 0,
    "do_exponent": 0,
    "h0": "random",
    "dht": True,
    "scale": None,
    "heads": 1,
    "groups": 1,
}
"""Knobs with which every token is heard in every output, however far away."""

_LONG: tuple[dict[str, Any], dict[str, Any]] = {"packed": False, "lengths": (2200,)}, {"K": [32], "V": [32]}
"""2,200 x 32 is beyond 2^16."""

_KEPT: dict[str, Any] = {"beta_regime": "tiny", "gate_regime": "tiny_steps", "h0": "large"}
"""Knobs with which a large state is changed by less, from chunk to chunk, than 16 bits of it hold."""

_WIDE: dict[str, Any] = {
    "K": [128, 128, 256, 100],
    "V": [128, 128, 256, 100],
    "heads": [1, 1, 2],
    "groups": [1, 1, 2],
    "h0": "random",
    "dht": True,
    "key_regime": ["random", "collinear"],
    "query_regime": ["random", "keys"],
    "beta_regime": ["random", "near_one"],
    "value_regime": "random",
    "do_regime": "random",
    "gate_regime": ["slow", "mixed", "heads", "random"],
    "gate_magnitude": 1.0,
}
"""Sizes of which the smallest is beyond those of the other cases, and knobs with which every channel is heard."""

_WIDE_TOKENS = 80
"""Enough for two chunks of any size."""

_FEW_TERMS: dict[str, Any] = {
    "rule": "kda",
    "heads": 3,
    "groups": 1,
    "K": [8, 8, 8, 1],
    "V": [1, 2, 8],
    "lengths": [(2,) * 32, (2,) * 32, (7,) * 8],
    "key_regime": ["sparse_int", "repeated"],
    "query_regime": "keys",
    "beta_dtype": "float32",
    "beta_regime": "near_one",
    "value_regime": ["random", "constant"],
    "do_regime": "ints",
    "scale": 1.0,
    "gate_regime": ["random", "reset"],
    "gate_magnitude": 1.0,
    "safe_gate": False,
    "qk_l2norm": False,
    "q_exponent": 0,
    "v_exponent": 0,
    "do_exponent": 0,
    "tail_padding": 0,
    "h0": "none",
    "dht": False,
}
"""Knobs with which most terms of dq and dg cancel, and products with do are exact: what is left is the error of the few
numbers that were rounded. Eight channels make every short sequence a block of its own."""


_BRINK: dict[str, Any] = {
    "beta_regime": "up_to_two",
    "key_regime": "repeated",
    "query_regime": "keys",
    "qk_l2norm": False,
    "lengths": [(7,) * 8, (4,) * 8],
    "dht": True,
    "do_regime": "last_token_only",
    "h0": ["large", "none"],
    "gate_regime": ["zero", "tiny_steps", "slow"],
    "gate_magnitude": 1.0,
    "groups": 1,
    "K": [2, 8, 1],
    "V": [32, 8],
    "value_regime": ["converged", "constant"],
    "v_exponent": 4,
    "q_exponent": 0,
    "do_exponent": 0,
    "overrides": (),
}
"""Knobs with which A has its largest entries, and dA is larger than what it is made of."""

_HELD, _BEYOND = 15 / 16 * 2.0**16, 17 / 16 * 2.0**16
"""Roundings carry no number from one of these across 65504, where float16 ends."""

_TRIED = 32
"""Seeds tried for a case on the brink."""


def long_cases(capabilities: Capabilities | None = None, *, variant: int = 0) -> list[Case]:
    """Few channels and thousands of tokens: what only shows there.

    One pack of every length from 0 to 65, so every tail of every chunk and more sequences than a warp has lanes; one
    sequence of 2,200 tokens with more than 2^16 elements of q, k, v and g, so that what restarts, drifts or wraps round
    by then is seen: an offset of 16 bits stands for one of 32. A target that takes no packs gets the second only. As
    far as the capabilities allow, nothing fades on the way: slow gates, states, float32.

    A third, in 16 bits, where initial states are taken: as long, with small changes of a large state, which are lost
    where the running state is kept in 16 bits.
    """
    c = capabilities or Capabilities()
    long, sizes = _LONG
    wanted = [(long, _LIVELY | sizes)]
    if c.packed:
        lengths = tuple(range(0 if c.empty else 1, 66))
        tails = {"packed": True, "lengths": lengths, "chunk_size": max(c.chunk_sizes)}
        wanted.insert(0, (tails, _LIVELY | {"K": [2, 3, 4], "V": [2, 3, 4]}))
    narrow = [x for x in ("bfloat16", "float16") if x in c.dtypes]
    if narrow and c.initial_state:
        wanted.append((long, _LIVELY | _KEPT | {"dtype": narrow} | sizes))
    limits = Limits(max_tokens=4096)
    made = []
    for fixed, wishes in wanted:
        with suppress(ValueError):
            made.append(wished_case(c, fixed, wishes, limits=limits, variant=variant))
    return made


def wide_cases(capabilities: Capabilities | None = None, n: int = 8, *, variant: int = 0) -> list[Case]:
    """`n` cases with the channels that models have, few tokens and few heads.

    Kernels cut channels into tiles of 32 or 64, or have code of their own for 128, and all of that is out of reach of
    the other cases, which have up to 64.

    Parameters
    ----------
    capabilities : of the target; what they do not allow is drawn as `stratified` does.
    n : how many.
    variant : another number gives other values.
    """
    c = capabilities or Capabilities()
    limits = Limits(max_tokens=_WIDE_TOKENS)
    return stratified(c, n, variant=variant, **vars(limits), **_granted(c, {}, _WIDE, limits))


def coherent_cases(capabilities: Capabilities | None = None, n: int = 40, *, variant: int = 0) -> list[Case]:
    """`n` cases of few terms, in which one rounding is the whole error.

    Sums of many terms hide a number that was rounded once too often, or once too seldom: its error is lost among those
    of all others. Here short sequences have few channels, queries are the keys, beta is near one and do has small
    integers. Then o hardly depends on what was written before, and dg is a difference of nearly equal terms whose
    errors are equal too, unless they were formed from numbers rounded in different ways. Hard resets put weak gates
    after strong ones.

    Parameters
    ----------
    capabilities : of the target; what they do not allow is drawn as `stratified` does.
    n : how many.
    variant : another number gives other values.
    """
    c = capabilities or Capabilities()
    return stratified(c, n, variant=variant, **_granted(c, {}, _FEW_TERMS, Limits()))


def brink_cases(capabilities: Capabilities | None = None, n: int = 8, *, variant: int = 0) -> list[Case]:
    """`n` cases in float16 in which the largest number that the backward needs is just below 65504.

    Within a factor of about 2, so that whatever is larger than what is needed is infinite: a square formed whole where
    a triangle is read (and infinity times a 0 beside the triangle is NaN), or something kept in 16 bits that belongs in
    32. The backward is linear in do and dht, so one emulation tells by which power of two they can be raised. Of some
    seeds the first is taken in which elements of A^T dA that nothing needs are beyond 65504, or else go farthest.

    Parameters
    ----------
    capabilities : of the target; one without float16 or without gradients has no such case.
    n : how many.
    variant : another number gives other values.
    """
    c = capabilities or Capabilities()
    if "float16" not in c.dtypes or not c.backward:
        return []
    made = []
    for case in stratified(c, n, variant=variant, **_granted(c, {"dtype": "float16"}, _BRINK, Limits())):
        farthest, best = -1.0, case
        for j in range(_TRIED):
            size, raised = _raised(replace(case, seed=(case.seed + n * j) % 2**32))
            if size > farthest:
                farthest, best = size, raised
            if size > _BEYOND:
                break
        made.append(best)
    return made


def _raised(case: Case) -> tuple[float, Case]:
    """The largest element of all of A^T dA, and the case in which it is so, with do and dht as large as can be.

    The first row is left out: X has none.
    """
    call = make_call(case)
    trace = emulate(call.problem, chunked32(max(case.lengths)), Exact(), intermediates=True)
    inner, dtypes = trace.intermediates, call.output_dtypes()
    assert call.problem.do is not None
    needed = [call.problem.do, *(inner[name] for name in ("dU", "dS", "dW", "dA", "AtdA"))]
    needed += [x for name, x in trace.outputs.items() if name.startswith("d") and dtypes[name] == "float16"]
    exponent = math.floor(math.log2(_HELD / max(np.abs(x).max() for x in needed)))
    whole = np.abs((np.swapaxes(inner["A"], -1, -2) @ inner["dA"])[..., 1:, :]).max()
    return math.ldexp(whole, exponent), replace(case, do_exponent=exponent)


def wished_case(
    capabilities: Capabilities,
    fixed: Mapping[str, Any],
    wishes: Mapping[str, Any],
    *,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    variant: int = 0,
) -> Case:
    """One case with knobs that it must have, and others as far as the capabilities allow.

    Parameters
    ----------
    capabilities : of the target.
    fixed, wishes : field of `Case` -> one value, or a list of allowed ones. A name in both is fixed; earlier wishes
        win.
    limits : of sizes, for knobs that are neither.
    variant : another number gives another seed.

    Raises
    ------
    ValueError
        If the capabilities allow no case with the fixed knobs.
    """
    granted = _granted(capabilities, fixed, wishes, limits)
    return stratified(capabilities, 1, variant=variant, **vars(limits), **granted)[0]


def _granted(
    capabilities: Capabilities, fixed: Mapping[str, Any], wishes: Mapping[str, Any], limits: Limits
) -> dict[str, Any]:
    """The fixed knobs, and those wishes that the capabilities grant."""
    granted = dict(fixed)
    for name, value in wishes.items():
        if name not in granted:
            with suppress(ValueError):
                knobs.Space(capabilities, limits, {**granted, name: value})
                granted[name] = value
    return granted
