"""The reading notes' own claims about KDA kernels, each with what was measured and the command that measures it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from verikda.floor import LIMIT
from verikda.report import tables
from verikda.report.lines import Line, number
from verikda.report.tables import Cell, Table, show

NOT_RUN = "not run"
COMMAND = "verikda report emulator"


@dataclass(frozen=True)
class Claim:
    """One claim: in words, whether the numbers bear it out, what they are, a table of them, and how to get them."""

    title: str
    verdict: str
    says: tuple[str, ...]
    table: Table | None
    command: str


def of_kind(lines: Sequence[Line], name: str) -> Line | None:
    """The last measured "claim" line of this name."""
    found = [x for x in lines if x["kind"] == "claim" and x.get("claim") == name and x.get("verdict") != NOT_RUN]
    return found[-1] if found else None


def claims(lines: Sequence[Line]) -> list[Claim]:
    """All four, in the order of the algorithm."""
    return [
        _inverse(of_kind(lines, "inverse")),
        _exponentials(of_kind(lines, "exponentials")),
        _anchors(of_kind(lines, "anchors")),
        _recompute(of_kind(lines, "recompute"), lines),
    ]


def _inverse(line: Line | None) -> Claim:
    title = "A Neumann series with doubling inverts I + N faster than substitution, but less precisely"
    if line is None:
        return Claim(title, NOT_RUN, (), None, COMMAND)
    cosines = [number(c) for c in line["cosines"]]
    columns = {"independent": 0.0, "cos 0.1": 0.1, "cos 0.3": 0.3, "collinear, cos 0.999": 0.999, "repeated": 1.0}
    rows, worse = [], True
    for dtype, errors in line["errors"].items():
        for method, shown in (("substitution", "substitution"), ("neumann", "Neumann")):
            values = [number(errors[method][cosines.index(c)]) for c in columns.values()]
            rows.append((Cell(dtype), Cell(shown), *(_error_cell(v) for v in values)))
        pairs = zip(errors["neumann"], errors["substitution"], strict=True)
        worse &= all(number(n) >= number(s) for n, s in pairs)
    n, s = line["operations"]["neumann"], line["operations"]["substitution"]
    ms = {name: 1e3 * t for name, t in line["seconds"].items()}
    says = (
        f"Speed: for C = {line['chunk']} the series takes {n['multiply_adds']:,} multiply-adds against "
        f"{s['multiply_adds']:,} ({n['multiply_adds'] / s['multiply_adds']:.0f} times as many), in {n['steps']} steps "
        f"that wait for each other, all matrix products, against {s['steps']} rows. So it can be faster only where "
        f"matrix products cost next to nothing. In NumPy on this CPU, {line['matrices']} matrices in float32: "
        f"{ms['neumann']:.3g} ms against {ms['substitution']:.3g} ms.",
        "Precision: relative error of A for keys from independent to equal, beta = 0.95, no decay. Powers of N grow "
        "like binomial coefficients where keys agree, and the series cancels them again.",
    )
    faster = ms["neumann"] < ms["substitution"]
    precise = "less precise on all keys" if worse else "not always less precise"
    verdict = f"{'faster' if faster else 'not faster'} here; {precise}"
    return Claim(title, verdict, says, Table(("dtype", "method", *columns), tuple(rows), 2), COMMAND)


def _error_cell(error: float) -> Cell:
    """A relative error; from 1 on nothing is right."""
    return Cell("not finite", "inf") if error == math.inf else Cell(show(error), "fail" if error >= 1 else "")


def _exponentials(line: Line | None) -> Claim:
    title = "exp(Gamma) and exp(-Gamma) taken separately overflow under strong gates"
    if line is None:
        return Claim(title, NOT_RUN, (), None, COMMAND)
    rows = tuple(
        (Cell(r["dtype"]), Cell(str(r["chunk"])), Cell(show(r["frontier"])), Cell(show(r["overflow"])),
         Cell(f"{number(r['overflow']) / number(r['frontier']):.3g}"))
        for r in line["rows"]
    )  # fmt: skip
    says = (
        "All gates equal, operands of Aqk kept in the dtype. The first gate at which a value is not finite lies at "
        "ln(max)/C, or a little beyond, since entries of unit keys are below 1.",
    )
    table = Table(("dtype", "C", "ln(max)/C, nats per token", "first overflow", "measured / predicted"), rows, 2)
    seen = all(r["overflow"] is not None for r in line["rows"])
    return Claim(title, "holds" if seen else "holds in part", says, table, COMMAND)


def _anchors(line: Line | None) -> Claim:
    title = "The safe gate's local anchors are stable and lose nothing"
    if line is None:
        return Claim(title, NOT_RUN, (), None, COMMAND)
    rows, fine = [], True
    for r in line["rows"]:
        ratios = {n: number(x) for n, x in r["ratios"].items()}
        others = max((x for n, x in ratios.items() if n != "dg" and not math.isnan(x)), default=math.nan)
        bad = r["verdict"] == "fail"
        cells = (Cell(show(x), tables.level(x, "fail" if x > LIMIT else "pass")) for x in (others, ratios["dg"]))
        rows.append((Cell(r["dtype"]), Cell(r["gates"]), Cell(r["path"]),
                     Cell(f"{r['nonfinite']:,}", "fail" if r["nonfinite"] else ""), *cells))  # fmt: skip
        fine &= not (bad and r["path"] == "local anchors")
    says = (
        "Error over the noise floor of the first way, one exponential for each pair. Gates: -5 nats per token "
        "everywhere, and half of the channels fast and half slow. One anchor for the whole chunk is what local anchors "
        "avoid.",
    )
    table = Table(("dtype", "gates", "decay through", "not finite", "worst other output", "dg"), tuple(rows), 3)
    return Claim(title, "holds" if fine else "does not hold", says, table, COMMAND)


def _recompute(line: Line | None, lines: Sequence[Line]) -> Claim:
    title = "Recomputing intermediates in the backward saves memory"
    command = "verikda report verikda (on a GPU)"
    if line is None:
        told = [x for x in lines if x["kind"] == "claim" and x.get("claim") == "recompute" and x.get("detail")]
        return Claim(title, NOT_RUN, tuple(x["detail"] for x in told[-1:]), None, command)
    rows = tuple(
        (
            Cell(name),
            *(Cell(f"{r[k] / 2**20:,.0f}") for k in ("held_bytes", "peak_bytes")),
            Cell(show(r["milliseconds"])),
        )
        for name, r in line["rows"].items()
    )
    less = line["rows"]["recomputed"]["held_bytes"] < line["rows"]["kept"]["held_bytes"]
    says = (f"B,T,H,K = {','.join(map(str, line['shape']))}, bfloat16, {line['device']}; median of {line['repeats']}.",)
    table = Table(("intermediates", "held until the backward, MiB", "peak, MiB", "forward and backward, ms"), rows)
    return Claim(title, "holds" if less else "does not hold", says, table, command)
