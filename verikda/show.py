"""Terminal output: tables and progress with rich on a terminal, the same as plain lines when piped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from oracles.problem import GRADIENTS, OUTPUTS
from verikda.checks import BY_NAME
from verikda.search import Summary
from verikda.strategies import describe

_COLOUR = {"pass": "green", "fail": "bold red", "inconclusive": "yellow", "refused": "yellow"}


def console() -> Console:
    """A console that writes plain text of a fixed width when the output is not a terminal."""
    out = Console(highlight=False, soft_wrap=False, emoji=False)  # "mymodule:bug:" is a name, not a picture
    return out if out.is_terminal else Console(highlight=False, width=140, no_color=True, emoji=False)


def say(out: Console, text: str) -> None:
    """Print text as it is, its lines whole: a command that is to be copied must stay on one line."""
    out.print(text, markup=False, soft_wrap=True)


EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal."""


class Step(Protocol):
    def __call__(self, text: str) -> None: ...


@contextmanager
def progress(out: Console, total: int, title: str) -> Iterator[Step]:
    """A progress bar on a terminal; elsewhere a line of counts every `EVERY` seconds at most."""
    if not out.is_terminal:
        yield _lines(out, total, title)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=out, transient=True) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda text: bar.update(task, advance=1, note=text)


def _lines(out: Console, total: int, title: str) -> Step:
    """Prints how far it is, so that a log shows that something goes on; nothing for what ends soon."""
    started = last = time.monotonic()
    done = 0

    def step(text: str) -> None:
        nonlocal last, done
        done += 1
        now = time.monotonic()
        if now - last >= EVERY:
            last = now
            out.print(f"{title}: {done} of {total} after {now - started:.0f} s", markup=False)

    return step


def table(*headers: str) -> Table:
    """A table whose numbers line up and whose text does not wrap away."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, header in enumerate(headers):
        made.add_column(header, justify="left" if i == 0 or header in ("verdict", "worst case", "says") else "right")
    return made


def coloured(verdict: str) -> str:
    """A verdict with its colour."""
    return f"[{_COLOUR.get(verdict, 'white')}]{verdict}[/]"


def summary_tables(out: Console, summary: Summary, limit: float) -> None:
    """Print the verdict per output and per check, and what was refused or could not be told."""
    outputs = table("output", "cases judged", "worst ratio", "verdict", "worst case")
    failing = summary.failing_outputs()
    for name in (*OUTPUTS, *GRADIENTS):
        if name not in summary.worst:
            continue
        ratio, case = summary.worst[name]
        verdict = "fail" if name in failing or ratio > limit else "pass"
        outputs.add_row(name, str(summary.judged[name]), f"{ratio:.3g}", coloured(verdict), describe(case))
    out.print(outputs)
    checks = table("check", "pass", "fail", "inconclusive", "refused", "says")
    for name, check in BY_NAME.items():
        count = summary.checks.get(name)
        if count is None:
            checks.add_row(name, "0", "0", "0", "0", "not run")
        else:
            row = [str(count[v]) for v in ("pass", "fail", "inconclusive", "refused")]
            checks.add_row(name, *row, check.proves)
    out.print(checks)
    for title, counts in (("refused by the target", summary.refusals), ("inconclusive", summary.doubts)):
        for text, n in counts.most_common(5):
            out.print(f"{title} ({n}): {text}", markup=False)
