"""Hypothesis strategies for cases, and cases in words.

Only knobs and one seed are drawn, never elements of arrays: regimes of values reach what a search over elements
rarely does. Every case is valid by construction. In your own tests::

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
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from verikda import knobs
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
    overrides : whether up to 8 single elements are written, or which; then fix sizes with which every case has them.
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
    dtypes = [f"{n} {case.dtype_of(n)}" for n in ("g", "beta") if case.dtype_of(n) != "float32"]
    dtypes += [f"offsets {case.offsets}"] if case.offsets != "int64" else []
    parts = [
        ", ".join([f"{case.rule} {case.dtype}", *dtypes]),
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
    for names, exponent in (("q", case.q_exponent), ("v and h0", case.v_exponent), ("do and dht", case.do_exponent)):
        if exponent:
            parts.append(f"{names} x 2^{exponent}")
    if case.scale is not None:
        parts.append(f"scale {case.scale:g}")
    parts += [flag for flag in _FLAGS if getattr(case, flag)]
    if not case.recompute:
        parts.append("no recompute")
    if not case.final_state:
        parts.append("no final state")
    if case.layout != "contiguous":
        parts.append(case.layout)
    if case.overrides:
        parts.append(f"{len(case.overrides)} overrides")
    return "; ".join(parts) + f"; seed {case.seed}"
