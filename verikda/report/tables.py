"""What a report says in tables, from its lines alone; None or nothing where nothing was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oracles.problem import GRADIENTS, OUTPUTS
from verikda.case import DTYPES, Case
from verikda.floor import LIMIT
from verikda.report.exponentials import frontier
from verikda.report.lines import Line, number
from verikda.report.measure import PROBABILITIES
from verikda.strategies import describe

NAMES = (*OUTPUTS, *GRADIENTS)
LEVELS = ((0.5, "a"), (1.0, "b"), (2.0, "c"), (LIMIT, "d"))
"""Largest ratio of each shade of a cell."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table: text, shade ("a" to "d", "fail", "inf", "unknown", ""), longer text, a line before it."""

    text: str
    level: str = ""
    title: str = ""
    edge: bool = False


@dataclass(frozen=True)
class Table:
    """Headers and rows of cells; the first `keys` columns name the row."""

    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    keys: int = 1


def show(x: Any) -> str:
    """A number of a line in three digits."""
    value = number(x)
    return "-" if math.isnan(value) else f"{value:.3g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def points(lines: Sequence[Line], *series: str) -> list[Line]:
    """Lines of points whose call was made, of some series or of all."""
    return [x for x in lines if x["kind"] == "point" and "outputs" in x and (not series or x["series"] in series)]


def identity(x: Line) -> tuple[str, ...]:
    """What makes two lines of a point or of stages the same measurement."""
    return (x["kind"], x["target"], x.get("series", ""), json.dumps(x["case"], sort_keys=True))


def targets(lines: Sequence[Line]) -> list[str]:
    """Names of targets with lines, as they come."""
    return list(dict.fromkeys(x["target"] for x in lines if x["kind"] in ("point", "stages")))


def dtypes(lines: Iterable[Line]) -> list[str]:
    """Dtypes with lines, in the usual order."""
    found = {x["dtype"] for x in lines if "dtype" in x}
    return [d for d in DTYPES if d in found]


def level(ratio: float, verdict: str) -> str:
    """Shade of a ratio."""
    if verdict == "fail":
        return "fail" if math.isfinite(ratio) or math.isnan(ratio) else "inf"
    if math.isnan(ratio):
        return "unknown"
    return next((name for top, name in LEVELS if ratio <= top), "fail")


def worst_cell(found: Sequence[Line], name: str) -> Cell:
    """The worst ratio of an output over some points."""
    outputs = [x["outputs"][name] for x in found if name in x["outputs"]]
    if not outputs:
        return Cell("", "")
    ratios = [number(o["ratio"]) for o in outputs]
    known = [r for r in ratios if not math.isnan(r)]
    failed = sum(o["verdict"] == "fail" for o in outputs)
    unsure = sum(o["verdict"] == "inconclusive" for o in outputs)
    worst = max(known, default=math.nan)
    says = f"{len(outputs)} cases, {failed} failed" + (f", {unsure} inconclusive" if unsure else "")
    return Cell(show(worst), level(worst, "fail" if failed else "pass"), f"{name}: {says}")


def strip(lines: Sequence[Line]) -> Table | None:
    """Worst ratio by target, dtype and output."""
    names = [n for n in NAMES if any(n in x["outputs"] for x in points(lines))]
    rows = []
    for target in targets(lines):
        mine = [x for x in lines if x["kind"] == "point" and x["target"] == target]
        for dtype in dtypes(mine):
            found = [x for x in mine if x["dtype"] == dtype]
            made = [x for x in found if "outputs" in x]
            verdict, cases = _verdict(found)
            says = replace(cases, title="" if made else verdict.title)
            rows.append((Cell(target), Cell(dtype), verdict, *(worst_cell(made, n) for n in names), says))
    return Table(("target", "dtype", "verdict", *names, "cases"), tuple(rows), 2) if rows else None


VERDICTS = ("pass", "fail", "inconclusive", "refused", "not run")


def _verdict(found: Sequence[Line]) -> tuple[Cell, Cell]:
    """The verdict over some points with its first reason, and how many have which."""
    counts = {v: sum(x["verdict"] == v for x in found) for v in VERDICTS}
    verdict = next((v for v in ("fail", "pass", "inconclusive", "refused") if counts[v]), "not run")
    why = next((x["detail"] for x in found if x["verdict"] == verdict and x["detail"]), "")
    says = ", ".join(f"{n} {v}" for v, n in counts.items() if n)
    return Cell(verdict, f"v-{verdict.replace(' ', '-')}", why), Cell(says)


def builds(lines: Sequence[Line]) -> Table | None:
    """By build and dtype the worst ratio of any output, and of each output the largest share of changed values."""
    names = [n for n in NAMES if any(n in x.get("changed", ()) for x in points(lines))]
    rows = []
    for target in targets(lines):
        for dtype in dtypes(lines):
            found = [x for x in lines if x["target"] == target and x["dtype"] == dtype]
            made = points(found)
            shares = ([x["changed"][n] for x in made if n in x.get("changed", ())] for n in names)
            changed = (Cell(_percent(max(x)) if x else "") for x in shares)
            rows.append((Cell(target), Cell(dtype), *_verdict(found), _worst_of(made), *changed))
    return Table(("build", "dtype", "verdict", "cases", "worst ratio", *names), tuple(rows), 2) if rows else None


def _worst_of(found: Sequence[Line]) -> Cell:
    ratios = [(number(o["ratio"]), n) for x in found for n, o in x["outputs"].items()]
    ratio, name = max((r for r in ratios if not math.isnan(r[0])), default=(math.nan, ""))
    failed = any(x["verdict"] == "fail" for x in found)
    return Cell(f"{show(ratio)} {name}".strip(), level(ratio, "fail" if failed else "pass"))


def _percent(share: float) -> str:
    return f"{float(f'{100 * share:.2g}'):g} %" if share else "0"


def knob(line: Line, name: str) -> Any:
    """A knob of the case of a line."""
    return getattr(Case.from_dict(line["case"]), name)


def gate_map(lines: Sequence[Line]) -> Table | None:
    """Worst ratio of all outputs by gate and chunk size; the analytic frontier a line, the measured one numbers."""
    found = points(lines, "gates")
    gates = sorted({knob(x, "gate_magnitude") for x in found})
    rows = []
    for target in targets(found):
        for dtype in dtypes(found):
            mine = [x for x in found if x["target"] == target and x["dtype"] == dtype]
            for chunk in sorted({knob(x, "chunk_size") for x in mine}):
                by_gate = {knob(x, "gate_magnitude"): x for x in mine if knob(x, "chunk_size") == chunk}
                edge = frontier(dtype, chunk)
                after = next((m for m in gates if m > edge), None)
                cells = [_worst_output(by_gate.get(m), m == after) for m in gates]
                finite, within = (_reach(by_gate, gates, ok) for ok in (_finite, _passes))
                rows.append((Cell(target), Cell(dtype), Cell(str(chunk)), *cells, Cell(f"{edge:.3g}"), finite, within))
    headers = ("target", "dtype", "C", *(f"{m:.3g}" for m in gates), "ln(max)/C", "finite to", "within 4 to")
    return Table(headers, tuple(rows), 3) if rows else None


def lengths(lines: Sequence[Line]) -> Table | None:
    """Worst ratio of all outputs by number of tokens."""
    found = points(lines, "lengths")
    tokens = sorted({knob(x, "T") for x in found})
    rows = []
    for target in targets(found):
        for dtype in dtypes(found):
            mine = {knob(x, "T"): x for x in found if (x["target"], x["dtype"]) == (target, dtype)}
            if mine:
                rows.append((Cell(target), Cell(dtype), *(_worst_output(mine.get(n), False) for n in tokens)))
    return Table(("target", "dtype", *(f"T = {n}" for n in tokens)), tuple(rows), 2) if rows else None


def _worst_output(line: Line | None, edge: bool) -> Cell:
    if line is None:
        return Cell("", "", "", edge)
    ratios = {n: number(o["ratio"]) for n, o in line["outputs"].items()}
    name = max(ratios, key=lambda n: -1.0 if math.isnan(ratios[n]) else ratios[n])
    return Cell(show(ratios[name]), level(ratios[name], line["verdict"]), f"worst: {name}; {line['verdict']}", edge)


def _finite(line: Line) -> bool:
    return all(not o.get("nonfinite") for o in line["outputs"].values())


def _passes(line: Line) -> bool:
    return bool(line["verdict"] == "pass")


def _reach(by_gate: dict[float, Line], gates: Sequence[float], ok: Any) -> Cell:
    """Largest gate up to which everything measured is fine; beyond the last one, the last one."""
    measured = [m for m in gates if m in by_gate]
    bad = next((i for i, m in enumerate(measured) if not ok(by_gate[m])), None)
    if bad is None:
        return Cell(f"≥ {measured[-1]:.3g}", "b", "every gate that was measured")
    return Cell(f"{measured[bad - 1]:.3g}" if bad else "none", "fail")


def contracts(lines: Sequence[Line]) -> Table | None:
    """Worst ratio of the same results under other contracts."""
    found = [x for x in points(lines) if "contracts" in x]
    names = [n for n in NAMES if any(n in x["outputs"] for x in found)]
    rows = []
    for target in targets(found):
        for dtype in dtypes(found):
            mine = [x for x in found if x["target"] == target and x["dtype"] == dtype]
            if not mine:
                continue
            rows.append((Cell(target), Cell(dtype), Cell(f"{mine[0]['contract']} (declared)"),
                         *(worst_cell(mine, n) for n in names)))  # fmt: skip
            for other in dict.fromkeys(c for x in mine for c in x["contracts"]):
                ratios = {
                    n: [number(x["contracts"][other].get(n)) for x in mine if other in x["contracts"]] for n in names
                }
                tops = {n: max((r for r in rs if not math.isnan(r)), default=math.nan) for n, rs in ratios.items()}
                # another contract was not promised, so nothing is a failure here
                cells = (Cell(show(r), "unknown" if r > LIMIT else level(r, "pass")) for r in tops.values())
                rows.append((Cell(target), Cell(dtype), Cell(other), *cells))
    return Table(("target", "dtype", "judged as", *names), tuple(rows), 3) if rows else None


def ulps(lines: Sequence[Line]) -> Table | None:
    """Median, 99th percentile and largest error in ulp, by output."""
    found = [x for x in points(lines) if x.get("ulps")]
    names = [n for n in NAMES if any(n in x["ulps"] for x in found)]
    wanted = {"median": 0.5, "99 %": 0.99, "largest": 1.0}
    rows = []
    for x in sorted(found, key=lambda x: targets(found).index(x["target"])):
        for label, p in wanted.items():
            at = PROBABILITIES.index(p)
            cells = [Cell(f"{show(x['ulps'][n][at])}" if x["ulps"].get(n) else "") for n in names]
            rows.append((Cell(x["target"]), Cell(x["dtype"]), Cell(label), *cells))
    kinds = {n: {x["outputs"][n]["dtype"] for x in found if n in x["outputs"]} for n in names}
    heads = (f"{n} ({min(kind)})" if len(kind) == 1 and len(dtypes(found)) > 1 else n for n, kind in kinds.items())
    return Table(("target", "dtype", "error", *heads), tuple(rows), 3) if rows else None


def bias(lines: Sequence[Line]) -> dict[tuple[str, str, str], tuple[float, float, int]]:
    """(target, dtype, output) -> (mean signed error in units of the root mean square, its standard error, heads).

    Each head of each seed is one independent draw; the standard error is that of their mean.
    """
    pooled: dict[tuple[str, str, str], list[float]] = {}
    for x in points(lines, "seeds"):
        for name, means in x.get("bias", {}).items():
            pooled.setdefault((x["target"], x["dtype"], name), []).extend(number(m) for m in means)
    out = {}
    for key, means in pooled.items():
        n = len(means)
        if n < 2:
            continue
        mean = sum(means) / n
        spread = math.sqrt(sum((m - mean) ** 2 for m in means) / (n - 1) / n)
        out[key] = (mean, spread, n)
    return out


def safe(lines: Sequence[Line]) -> Table | None:
    """Ratios of the default path and of the safe gate, side by side."""
    grouped: dict[tuple[str, str, str, str], list[Line]] = {}
    found = points(lines, "safe")
    for x in found:
        case = Case.from_dict(x["case"])
        gates, path = f"{case.gate_regime} {case.gate_magnitude:g}", "safe gate" if case.safe_gate else "default"
        grouped.setdefault((x["target"], x["dtype"], gates, path), []).append(x)
    names = [n for n in NAMES if any(n in x["outputs"] for x in found)]
    place = targets(found).index
    rows = tuple(
        (*(Cell(k) for k in key), *(worst_cell(mine, n) for n in names))
        for key, mine in sorted(grouped.items(), key=lambda item: (place(item[0][0]), item[0][1:]))
    )
    return Table(("target", "dtype", "gates", "path", *names), rows, 4) if rows else None


@dataclass(frozen=True)
class Worst:
    """One of the worst cases: where, how bad, in words, and the file that replays it."""

    target: str
    dtype: str
    output: str
    ratio: str
    verdict: str
    says: str
    case: str
    json: str
    file: str


def worst(lines: Sequence[Line], n: int = 12) -> list[Worst]:
    """The points with the worst ratios, one for each target, dtype and output."""
    best: dict[tuple[str, str, str], tuple[float, Line]] = {}
    for x in points(lines):
        if x["series"] == "flags":
            continue
        for name, o in x["outputs"].items():
            ratio = number(o["ratio"])
            key = (x["target"], x["dtype"], name)
            if not math.isnan(ratio) and (key not in best or ratio > best[key][0]):
                best[key] = (ratio, x)
    out = []
    for (target, dtype, name), (ratio, x) in sorted(best.items(), key=lambda item: -item[1][0])[:n]:
        o = x["outputs"][name]
        text = json.dumps({"schema": 1, "target": target, "case": x["case"]})
        says = o.get("message") or f"relative error {show(o.get('error'))}, relative floor {show(o.get('floor'))}"
        case = describe(Case.from_dict(x["case"]))
        slug = f"{target.replace(':', '-')}-{dtype}-{name}.json"
        out.append(Worst(target, dtype, name, show(ratio), o["verdict"], says, case, text, slug))
    return out
