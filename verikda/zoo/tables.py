"""The zoo's results as tables, from the record alone."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

from verikda import show
from verikda.zoo import matrix, rivals
from verikda.zoo.kills import Kill
from verikda.zoo.matrix import Totals
from verikda.zoo.specimens import SPECIMENS, Specimen


def kill_tables(out: Console, results: list[Kill]) -> None:
    """Print the matrix and its totals."""
    rows = show.table("fault", "place", "first check", "output", "cases", "seconds", "found", "says")
    for r in matrix.rows(results):
        check, output = r.first
        found = f"{r.killed} of {r.seeds}"
        colour = "green" if r.killed == r.seeds else "bold red"
        times = (f"{r.cases:g}", f"{r.seconds:.2f}") if r.killed else ("", "")
        rows.add_row(
            r.subject.name, r.subject.place, check, output, *times, f"[{colour}]{found}[/]", escape(r.subject.what)
        )
    out.print(rows)
    for line in sentences(matrix.totals(results)):
        out.print(line, markup=False)


def sentences(t: Totals) -> list[str]:
    """The totals in words."""
    if not t.searches:
        return ["No fault was searched for."]
    slowest = t.slowest
    lines = [
        f"{t.killed} of {t.searches} searches found their fault ({100 * t.killed / t.searches:.1f} %); {t.always} of "
        f"{t.specimens} faults with every seed.",
        f"Median to the first failing case: {t.cases:g} cases, {t.seconds:.2f} s of processor time"
        + (f"; slowest {slowest.slowest:.1f} s ({slowest.subject.name})." if slowest else "."),
        f"Healthy implementation: {t.alarms} false alarms in {t.healthy} searches, {t.healthy_cases:,} cases.",
    ]
    if t.never:
        lines.append(f"Never found: {', '.join(t.never)}.")
    if t.sometimes:
        lines.append(f"Found with some seeds only: {', '.join(t.sometimes)}.")
    return lines


def rival_tables(out: Console, lines: list[dict[str, Any]]) -> None:
    """Print the comparison."""
    header, body = comparison(lines)
    rows = show.table(*header)
    for row in body:
        rows.add_row(*(escape(cell.replace("**", "")) for cell in row))
    out.print(rows)


def comparison(lines: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: places of the zoo and all of it against judges, and the complaints about the healthy one."""
    scores = rivals.scores(lines)
    results = matrix.kills(lines)
    table, t = matrix.rows(results), matrix.totals(results)
    found = {judge: set(score.found) for judge, score in scores.items()}
    alarms = [f"{score.alarms} of {score.outputs} outputs" for score in scores.values()]
    if table:
        found = {"verikda": {r.subject.name for r in table if r.killed == r.seeds}, **found}
        alarms.insert(0, f"{t.alarms} of {t.healthy_cases:,} cases")
    judged = {line["specimen"] for line in lines if line["kind"] == "rival"}
    seen = [s for s in SPECIMENS.values() if s.name in judged]

    def row(title: str, of: list[Specimen]) -> list[str]:
        return [title, str(len(of)), *(str(sum(s.name in hits for s in of)) for hits in found.values())]

    places = dict.fromkeys(s.place for s in seen)
    body = [row(place, [s for s in seen if s.place == place]) for place in places]
    body += [[f"**{cell}**" for cell in row("all", seen)], ["false alarms", "", *alarms]]
    return ["place", "faults", *found], body
