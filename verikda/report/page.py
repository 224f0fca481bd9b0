"""The report as a page, as Markdown and on a terminal, from its lines alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.markup import escape

from verikda import show
from verikda.report import charts, tables
from verikda.report.captions import CAPTIONS
from verikda.report.claims import NOT_RUN, Claim, claims, of_kind
from verikda.report.lines import Line
from verikda.report.svg import Panel, style
from verikda.report.tables import Table


def _nothing() -> Sequence[Panel]:
    return ()


@dataclass
class Section:
    """One idea: charts, drawn when they are asked for, and a table of it; `missing` says why there is nothing."""

    id: str
    draw: Callable[[], Sequence[Panel]] = _nothing
    table: Table | None = None
    missing: str = NOT_RUN

    @cached_property
    def panels(self) -> Sequence[Panel]:
        """The charts."""
        with style():
            return self.draw()

    @property
    def title(self) -> str:
        """Its heading."""
        return CAPTIONS[self.id][0]

    @property
    def says(self) -> str:
        """What is to be seen."""
        return CAPTIONS[self.id][1]

    @property
    def empty(self) -> bool:
        """Whether nothing was measured for it."""
        return not self.panels and self.table is None


@dataclass(frozen=True)
class Page:
    """Everything that is shown.

    Attributes
    ----------
    lines : of one or more runs.
    """

    lines: tuple[Line, ...]

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Page:
        """A page of some lines, targets as they were asked for; where a point was measured twice the last one counts.

        Raises
        ------
        ValueError
            When none of them is of a report.
        """
        known = [x for x in lines if x["kind"] in ("report", "point", "stages", "claim", "end")]
        if not any(x["kind"] in ("point", "stages", "claim") for x in known):
            kinds = ", ".join(sorted({x["kind"] for x in lines}))
            raise ValueError(f"lines of kind {kinds} hold no measurement; give a file that verikda report --json wrote")
        last: dict[Any, Line] = {}
        for x in known:
            last[tables.identity(x) if x["kind"] in ("point", "stages") else id(x)] = x
        asked = list(dict.fromkeys(name for x in known if x["kind"] == "report" for name in x["targets"]))
        rank = {name: i for i, name in enumerate(asked)}
        # several processes finish in any order
        return cls(tuple(sorted(last.values(), key=lambda x: rank.get(x.get("target"), len(rank)))))

    @cached_property
    def main(self) -> list[Line]:
        """Lines of targets, without the kernels built with other compiler flags."""
        return [x for x in self.lines if x.get("series") != "flags"]

    @cached_property
    def strip(self) -> Table | None:
        """Verdicts by target, dtype and output."""
        return tables.strip(self.main)

    @cached_property
    def claims(self) -> list[Claim]:
        """The notes' claims."""
        return claims(self.main)

    @cached_property
    def worst(self) -> list[tables.Worst]:
        """The worst cases."""
        return tables.worst(self.main)

    @cached_property
    def runs(self) -> list[Line]:
        """Opening lines of the runs."""
        return [x for x in self.lines if x["kind"] == "report"]

    @property
    def cut_short(self) -> bool:
        """Whether some run did not get to its end."""
        ends = [x for x in self.lines if x["kind"] == "end"]
        return len(ends) < len(self.runs) or any(x["interrupted"] for x in ends)

    @property
    def summary(self) -> str:
        """What came out, in one sentence."""
        made = [x for x in self.main if x["kind"] == "point"]
        counts = {v: sum(x["verdict"] == v for x in made) for v in tables.VERDICTS}
        text = ", ".join(f"{n} {v}" for v, n in counts.items() if n)
        if not self.worst:
            return f"{len(made)} points: {text or 'none'}."
        w = self.worst[0]
        return f"{len(made)} points: {text}. The worst ratio is {w.ratio}: {w.output} of {w.target} in {w.dtype}."

    @cached_property
    def reasons(self) -> list[str]:
        """Why points were not judged, with their number."""
        silent = Counter((x["target"], x["detail"]) for x in self.main if x["kind"] == "point" and "outputs" not in x)
        return [f"{target}, {n} {'point' if n == 1 else 'points'}: {detail}" for (target, detail), n in silent.items()]

    @cached_property
    def ran(self) -> list[str]:
        """What the targets said they ran."""
        return sorted({f"{x['target']}: {x['ran']}" for x in self.lines if x.get("ran")})

    @cached_property
    def sections(self) -> list[Section]:
        """Charts and tables in the order in which they are read."""
        lines, builds = self.main, [x for x in self.lines if x.get("series") == "flags"]
        no_stages = f"{NOT_RUN}: only the emulator and verikda's own kernels return intermediates"
        no_flags = f"{NOT_RUN}: it needs a GPU, target verikda and --grid wide or full"
        return [
            Section("gates", lambda: charts.gates(lines)),
            Section("frontier", table=tables.gate_map(lines)),
            Section("keys", lambda: charts.keys(lines)),
            Section("ulp", lambda: charts.ulps(lines), tables.ulps(lines)),
            Section("position", lambda: charts.positions(lines), tables.lengths(lines)),
            Section("stages", lambda: charts.stages(lines), missing=no_stages),
            Section("bias", lambda: charts.bias(lines)),
            Section("safe", table=tables.safe(lines)),
            Section("contracts", table=tables.contracts(lines)),
            Section("flags", table=tables.builds(builds), missing=no_flags),
        ]

    @cached_property
    def claim_panels(self) -> dict[int, list[Panel]]:
        """Charts of the claims, by their place."""
        with style():
            return {
                0: charts.inverse(of_kind(self.main, "inverse")),
                1: charts.exponentials(of_kind(self.main, "exponentials")),
            }

    def html(self) -> str:
        """One self-contained page."""
        return str(_templates(True).get_template("page.html").render(page=self))

    def markdown(self) -> str:
        """The tables, in Markdown."""
        text = str(_templates(False).get_template("page.md").render(page=self, frontier=_frontier(self)))
        text = "\n".join(line.rstrip() for line in text.strip().splitlines())
        return re.sub(r"\n{3,}", "\n\n", text) + "\n"


def _frontier(page: Page) -> Table | None:
    """The overflow frontier without its map."""
    table = next(s.table for s in page.sections if s.id == "frontier")
    if table is None:
        return None
    keep = (0, 1, 2, -3, -2, -1)
    rows = (tuple(row[i] for i in keep) for row in table.rows)
    return Table(tuple(table.headers[i] for i in keep), tuple(rows), 3)


def _templates(html: bool) -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("verikda.report"), autoescape=html, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    return made


def terminal(out: Console, page: Page) -> None:
    """The verdicts and the claims, in a table of the terminal's width."""
    if page.strip is not None:
        rows = show.table(*page.strip.headers)
        for row in page.strip.rows:
            texts = [f"[bold red]{escape(c.text)}[/]" if c.level in ("fail", "inf") else escape(c.text) for c in row]
            texts[2] = show.coloured(row[2].text)
            rows.add_row(*texts)
        out.print(rows)
    told = [claim for claim in page.claims if claim.verdict != NOT_RUN or claim.says]
    if told:
        out.print("What reading notes on such kernels claim, measured:")
    for claim in told:
        why = f". {claim.says[0]}" if claim.verdict == NOT_RUN else ""
        show.say(out, f'  "{claim.title}": {claim.verdict}{why}')
    if len(told) < len(page.claims):
        out.print(f"Not reached: {len(page.claims) - len(told)} of {len(page.claims)} claims of reading notes.")
    if page.cut_short:
        out.print("A run was cut short; what it had is shown.")
    out.print(page.summary, markup=False)
