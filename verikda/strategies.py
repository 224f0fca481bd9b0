"""Hypothesis strategies for cases, and a stratified start.

Only knobs and one seed are drawn, never elements of arrays: a search over knobs finds planted faults
in about a hundred cases where a search over elements needs four hundred or never gets there. Every case
is valid by construction. In your own tests::

    from hypothesis import given, settings
    from verikda.strategies import cases

    @settings(deadline=None)
    @given(cases("mypackage.ops:chunk_kda", dtype="bfloat16", gate_regime=["bound", "spike"], max_tokens=80))
    def test_mine(verikda_check, case):
        verikda_check("mypackage.ops:chunk_kda", case)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from verikda import counter, knobs
from verikda.call import Capabilities
from verikda.case import Case
from verikda.knobs import Limits

if TYPE_CHECKING:
    from verikda.targets.base import Target

Draw = Callable[[st.SearchStrategy[Any]], Any]


def cases(
    target: str | Target | Capabilities | None = None,
    *,
    max_tokens: int = 160,
    max_channels: int = 64,
    max_heads: int = 4,
    max_state: int = 8192,
    unstable: bool = False,
    overrides: bool | tuple[tuple[str, int, float], ...] = True,
    **fixed: Any,
) -> st.SearchStrategy[Case]:
    """Valid cases that a target supports.

    Parameters
    ----------
    target : its name ("module:function" or any other that `verikda check` takes), itself, or its capabilities; None is
        a complete implementation.
    max_tokens, max_channels, max_heads, max_state : see `verikda.knobs.Limits`.
    unstable : also draw regimes outside the stable domain (positive gates, unnormalised keys).
    overrides : whether up to 8 single elements are written, or which.
    **fixed : a field of `Case` fixed to one value, or restricted to a list of values.

    Raises
    ------
    ValueError
        If a name is no field of `Case`, or no case fits.
    TargetError
        If there is no such target, or it cannot be used here.
    """
    if isinstance(target, str):
        from verikda.targets import resolve

        target = resolve(target)
    capabilities = target if isinstance(target, Capabilities | None) else target.capabilities
    if overrides is not True:
        fixed["overrides"] = overrides or ()
    limits = Limits(max_tokens, max_channels, max_heads, max_state, unstable)
    space = knobs.Space(capabilities or Capabilities(), limits, fixed)
    state = threading.local()  # the knobs chosen so far in the case being drawn

    @st.composite
    def knob(draw: Draw, name: str) -> Any:
        if name == _FIRST:
            state.known = {}
        known: dict[str, Any] = state.known
        choice = _choice(name, known, space)
        known[name] = value = draw(choice) if isinstance(choice, st.SearchStrategy) else choice
        return value

    # builds draws its arguments in this order, and a failure then says which of them do not matter
    return st.builds(Case, **{name: knob(name) for name in knobs.OPTIONS})


_FIRST = next(iter(knobs.OPTIONS))


def _choice(name: str, known: dict[str, Any], space: knobs.Space) -> Any:
    """A strategy for knob `name`, or its only value."""
    if name == "overrides" and name not in space.fixed:
        return _overrides(known)
    if name == "seed" and name not in space.fixed:
        return _SEEDS
    options = space.options(name, known)
    if name == "lengths" and name not in space.fixed:
        anything = _lengths(bool(known["packed"]), space.limits.max_tokens, space.capabilities.empty)
        return _sampled(name, options) | anything
    return _sampled(name, options) if len(options) > 1 else options[0]


_SEEDS = st.integers(0, 2**32 - 1)


@lru_cache(4096)
def _sampled(name: str, options: knobs.Options) -> st.SearchStrategy[Any]:
    """Kept, because making a strategy costs more than drawing from it; by name, because (0, 1) == (False, True)."""
    return st.sampled_from(options)


_SEEDS = st.integers(0, 2**32 - 1)


@lru_cache(64)
def _lengths(packed: bool, max_tokens: int, empty: bool) -> st.SearchStrategy[tuple[int, ...]]:
    if not packed:
        batch = st.sampled_from([n for n in (1, 1, 2, 3) if n <= max_tokens])
        return batch.flatmap(lambda n: st.integers(1, max_tokens // n).map(lambda length: (length,) * n))
    least = 0 if empty else 1

    def within(lengths: list[int]) -> tuple[int, ...]:
        """Cut to the budget: each sequence gets at most what is left."""
        out: list[int] = []
        for n in lengths:
            cut = min(n, max_tokens - sum(out))
            if cut >= least:
                out.append(cut)
        return tuple(out)

    long = st.lists(st.integers(least, max_tokens), min_size=1, max_size=6)
    tiny = st.lists(st.integers(least, min(3, max_tokens)), min_size=1, max_size=48)
    return st.one_of(long, tiny).map(within)


def _overrides(known: dict[str, Any]) -> st.SearchStrategy[tuple[tuple[str, int, float], ...]]:
    case = Case(**known)
    shapes = {name: math.prod(shape) for name, shape in case.shapes.items() if math.prod(shape)}
    if case.layout == "expanded" or not shapes:
        return st.just(())
    one = st.sampled_from(sorted(shapes)).flatmap(
        lambda name: st.tuples(
            st.just(name), st.integers(0, shapes[name] - 1), st.sampled_from(knobs.override_values(case, name))
        )
    )
    some = st.lists(one, min_size=1, max_size=8, unique_by=lambda item: item[:2]).map(tuple)
    return st.one_of(st.just(()), st.just(()), st.just(()), some)


_WITH = {
    "gate_in_kernel": ("dtype",),
    "lower_bound": ("dtype", "gate_in_kernel"),
    "gate_magnitude": ("dtype", "gate_in_kernel", "lower_bound"),
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


def long_cases(capabilities: Capabilities | None = None, *, variant: int = 0) -> list[Case]:
    """Few channels and thousands of tokens: what only shows there.

    One pack of every length from 0 to 65, so every tail of every chunk and more sequences than a warp has lanes; one
    sequence of 2,200 tokens with more than 2^16 elements of q, k, v and g, so that what restarts, drifts or wraps round
    by then is seen: an offset of 16 bits stands for one of 32. A target that takes no packs gets the second only. As
    far as the capabilities allow, nothing fades on the way: slow gates, states, float32.
    """
    c = capabilities or Capabilities()
    shapes = [_LONG]
    if c.packed:
        lengths = tuple(range(0 if c.empty else 1, 66))
        tails = {"packed": True, "lengths": lengths, "chunk_size": max(c.chunk_sizes)}
        shapes.insert(0, (tails, {"K": [2, 3, 4], "V": [2, 3, 4]}))
    limits = Limits(max_tokens=4096)
    made = []
    for fixed, sizes in shapes:
        with suppress(ValueError):
            made.append(wished_case(c, fixed, _LIVELY | sizes, limits=limits, variant=variant))
    return made


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


def length_class(case: Case) -> str:
    """Where the longest sequence stands relative to the chunk, and whether there are empty ones."""
    C, n = case.chunk_size, max(case.lengths)
    chunks, rest = divmod(n, C)
    if n == 0:
        where = "0"
    elif n < 16:
        where = "under 16" if n > 1 else "1"
    elif rest == 0:
        where = "whole chunks"
    elif rest == 1:
        where = "whole chunks + 1"
    elif rest == C - 1:
        where = "whole chunks - 1"
    else:
        where = "under a chunk" if chunks == 0 else "partial chunk"
    return where + (" with empties" if 0 in case.lengths else "")


def labels(case: Case) -> tuple[str, ...]:
    """Event labels of a case, for `hypothesis.event` and for reports."""
    return (
        f"gate={case.gate_regime}" if case.rule == "kda" else "gate=none",
        f"gate form={case.gate}",
        f"keys={case.key_regime}",
        f"beta={case.beta_regime}",
        f"values={case.value_regime}",
        f"do={case.do_regime}",
        f"dtype={case.dtype}",
        f"length={length_class(case)}",
        f"packed={case.packed}",
        f"layout={case.layout}",
    )


_FLAGS = ("qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "safe_gate", "state_v_first", "dht", "A_log", "dt_bias")


def describe(case: Case) -> str:
    """One line for people: sizes, regimes and whatever is not at its default."""
    if case.packed:
        shown = ",".join(map(str, case.lengths[:6])) + (",..." if case.N > 6 else "")
        tokens = f"{case.N} packed sequences [{shown}]" + (f" + {case.tail_padding} rows" if case.tail_padding else "")
    else:
        tokens = f"B={case.B} T={case.T}"
    parts = [
        f"{case.rule} {case.dtype}",
        tokens,
        f"H={case.heads} HV={case.HV} K={case.K} V={case.V} C={case.chunk_size}",
    ]
    if case.rule == "kda":
        form = "" if case.gate == "log" else f", {case.gate} in kernel"
        form += "" if case.lower_bound is None else f" down to {case.lower_bound:g}"
        parts.append(f"gate {case.gate_regime} x {case.gate_magnitude:g}{form}")
    parts.append(f"k {case.key_regime}, q {case.query_regime}, beta {case.beta_regime}")
    parts.append(f"v {case.value_regime}, do {case.do_regime}")
    if case.h0 != "none":
        parts.append(f"h0 {case.h0}")
    parts += [flag for flag in _FLAGS if getattr(case, flag)]
    if not case.recompute:
        parts.append("no recompute")
    if case.layout != "contiguous":
        parts.append(case.layout)
    if case.overrides:
        parts.append(f"{len(case.overrides)} overrides")
    return "; ".join(parts) + f"; seed {case.seed}"
