"""From a failing case to the smallest one that still fails the same check.

Greedy over the knobs of a Case: halve the sizes, put each knob back to its default. Ends when no single
step keeps the failure, so that every knob of a reported case that is not at its default is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from verikda.case import Case

_SIZES = ("K", "V", "heads", "groups")
_SMALLER: tuple[Callable[[int], int], ...] = (lambda x: x // 2, lambda x: x - 16, lambda x: x - 1)
_LAST = ("seed", "dtype", "g_dtype", "beta_dtype")
"""Knobs tried last: another seed or dtype is another input, not a smaller one."""


def candidates(case: Case) -> Iterator[Case]:
    """Simpler neighbours of a case, largest steps first. Invalid ones are left out."""
    steps: list[dict[str, object]] = []
    n = len(case.lengths)
    if n > 1:
        for part in (case.lengths[: n // 2], case.lengths[n // 2 :]):
            steps.append({"lengths": part})
        if n <= 8:
            steps += [{"lengths": case.lengths[:i] + case.lengths[i + 1 :]} for i in range(n)]
    else:
        steps.append({"packed": False, "tail_padding": 0})
    for smaller in _SMALLER:
        if not case.packed:
            steps.append({"lengths": tuple(max(1, smaller(x)) for x in case.lengths)})
        else:
            steps += [
                {"lengths": (*case.lengths[:i], max(0, smaller(x)), *case.lengths[i + 1 :])}
                for i, x in enumerate(case.lengths[:8])
                if x
            ]
    for name in _SIZES:
        value = getattr(case, name)
        steps += [{name: v} for v in sorted({1, 2, value // 2, value - 1}) if 1 <= v < value]
    default = Case()
    knobs = [f.name for f in fields(Case) if f.name not in ("lengths", "packed", *_SIZES, *_LAST)]
    for name in (*knobs, *_LAST):
        value, simple = getattr(case, name), getattr(default, name)
        if value == simple:
            continue
        steps.append({name: simple})
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) > 1:
            steps.append({name: type(value)(round(value / 2))})
    if case.overrides:
        steps += [{"overrides": case.overrides[:i] + case.overrides[i + 1 :]} for i in range(len(case.overrides))]
    if case.gate_in_kernel:
        plain: dict[str, object] = {
            "gate_in_kernel": False,
            "lower_bound": None,
            "A_log": False,
            "dt_bias": False,
            "safe_gate": False,
        }
        steps.append(plain)
    for step in steps:
        try:
            smaller_case = replace(case, **step)  # type: ignore[arg-type]
        except ValueError:
            continue
        if smaller_case != case:
            yield smaller_case


def shrink(
    case: Case,
    still_fails: Callable[[Case], bool],
    *,
    seconds: float = 60.0,
    attempts: int = 250,
) -> tuple[Case, bool]:
    """Smallest case reached from `case`, and whether no further step keeps the failure.

    Parameters
    ----------
    still_fails : the same check fails on this case; exceptions of its own are not caught.
    seconds, attempts : budget; where it runs out, the second value is False. Attempts are the same everywhere; the
        time limit is for targets so slow that they would not end.
    """
    deadline = time.perf_counter() + seconds
    tried: set[Case] = {case}
    improved = True
    while improved:
        improved = False
        for candidate in candidates(case):
            if candidate in tried:
                continue
            tried.add(candidate)
            if len(tried) > attempts or time.perf_counter() > deadline:
                return case, False
            if still_fails(candidate):
                case, improved = candidate, True
                break
    return case, True
