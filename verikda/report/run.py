"""Measuring a grid on targets: lines are handed on as they come, in this process or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from functools import cache
from typing import Any

from verikda.interrupts import held, processes
from verikda.report.grid import Grid, Point, flag_points, points
from verikda.targets import resolve
from verikda.targets.base import Target

Item = Point | str
"""A point of the grid, or the name of a claim."""
Work = tuple[tuple[str, ...], Item]
"""An item and the targets that it is measured on together."""
CLAIMS = ("inverse", "exponentials", "anchors", "recompute")
TIMED = "recompute"
"""The claim that is measured when no other process of this run is left, because it is timed."""


def items(grid: Grid, names: Sequence[str], flags: bool) -> list[Work]:
    """Everything that a report measures: points first, then the notes' claims.

    Each target has its points to itself, so that one that compiles for minutes holds up no other.

    Parameters
    ----------
    names : of the targets.
    flags : whether the kernels are also built with other compiler flags, for a GPU.
    """
    todo = list(points(grid))
    together: tuple[Item, ...] = (*(flag_points(grid) if flags else ()), *CLAIMS)
    return [*(((name,), p) for p in todo for name in names), *((tuple(names), x) for x in together)]


def measure_all(todo: Sequence[Work], jobs: int, on_lines: Callable[[list[Any]], None]) -> bool:
    """Measure every item and hand on its lines.

    Parameters
    ----------
    todo : see `items`.
    jobs : processes; 1 stays in this one.
    on_lines : gets the lines of each item.

    Returns
    -------
    bool
        False when Ctrl-C or SIGTERM ended it; the lines of finished items have been handed on.

    Raises
    ------
    TargetError
        When a name is no target that can be used here.
    """
    try:
        for lines in _measured(todo, jobs):
            with held():  # all lines of an item, or none
                on_lines(lines)
    except KeyboardInterrupt:
        return False
    return True


def _measured(todo: Sequence[Work], jobs: int) -> Iterator[list[dict[str, Any]]]:
    if jobs == 1:
        for work in todo:
            yield lines_of(*work)
        return
    with processes(jobs) as pool:
        for future in as_completed([pool.submit(lines_of, *work) for work in todo if work[1] != TIMED]):
            yield future.result()
    for work in todo:
        if work[1] == TIMED:
            yield lines_of(*work)


@cache
def _targets(names: tuple[str, ...]) -> tuple[Target, ...]:
    return tuple(resolve(name) for name in names)


def lines_of(names: tuple[str, ...], item: Item) -> list[dict[str, Any]]:
    """The lines of one item: a point on every target, or a claim.

    Raises
    ------
    TargetError
        When a name is no target that can be used here.
    """
    if isinstance(item, str):
        return list(_claim(item))
    from verikda.report.measure import measure
    from verikda.report.stages import stage_line

    if item.series == "stages":
        return [stage_line(target, item) for target in _targets(names)]
    if item.series == "flags":
        from verikda.report.flags import flag_lines

        return list(flag_lines(item))
    return [measure(target, item) for target in _targets(names)]


def _claim(name: str) -> Iterator[dict[str, Any]]:
    if name == "inverse":
        from verikda.report.inverse import inverse_lines

        yield from inverse_lines()
    elif name == "exponentials":
        from verikda.report.exponentials import exponential_lines

        yield from exponential_lines()
    elif name == "anchors":
        from verikda.report.anchors import anchor_lines

        yield from anchor_lines()
    else:
        from verikda.report.memory import memory_lines

        yield from memory_lines()
