"""The charts of a report, from its lines alone: one idea each, an empty list where nothing was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from verikda.dtypes import format_of
from verikda.floor import LIMIT
from verikda.report import tables
from verikda.report.exponentials import frontier
from verikda.report.lines import Line, number
from verikda.report.measure import PROBABILITIES
from verikda.report.stages import STAGES
from verikda.report.svg import COLOURS, DASHES, FAIL, INK, MARKERS, MUTED, Drawing, Panel

SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
TOP = 10.0
"""Relative errors beyond this are drawn at the upper edge: nothing is left to lose."""
KEY_LABELS = {
    "orthogonal": "orthogonal\ncos 0", "random": "random\ncos ~0", "alternating": "alternating\ncos ±0.999",
    "collinear": "collinear\ncos 0.999", "repeated": "repeated\ncos 1",
}  # fmt: skip


def _line_style(dtype: str) -> dict[str, Any]:
    return {"color": COLOURS[dtype], "linestyle": DASHES[dtype], "marker": MARKERS[dtype], "markersize": 4.5, "lw": 1.6}


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Whole decades around what is positive and finite."""
    known = [v for v in values if v > 0 and math.isfinite(v)]
    if not known:
        return 1e-8, 1.0
    low, high = min(known) / 1.5, min(max(known) * 1.5, TOP)
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(max(high, 10 * low)))


def _errors(found: Sequence[Line], output: str) -> list[tuple[float, float, str]]:
    """(error, floor, verdict) of an output at each point."""
    o = [x["outputs"].get(output, {}) for x in found]
    return [(number(x.get("error")), number(x.get("floor")), str(x.get("verdict", ""))) for x in o]


def gates(lines: Sequence[Line], outputs: Sequence[str] = ("o", "dg")) -> list[Panel]:
    """Relative error against the strength of all gates, floors as bands, ln(max)/C as vertical lines."""
    found = tables.points(lines, "gates")
    if not found:
        return []
    chunk = max(tables.knob(x, "chunk_size") for x in found)
    found = [x for x in found if tables.knob(x, "chunk_size") == chunk]
    values = [v for name in outputs for e, f, _ in _errors(found, name) for v in (e, f, LIMIT * f)]
    low, high = _limits(values)
    panels = []
    for name in outputs:
        for target in tables.targets(found):
            d = Drawing()
            ends = []
            for dtype in tables.dtypes(found):
                mine = [x for x in found if (x["target"], x["dtype"]) == (target, dtype) and name in x["outputs"]]
                mine.sort(key=lambda x: float(tables.knob(x, "gate_magnitude")))
                xs = [float(tables.knob(x, "gate_magnitude")) for x in mine]
                if ends_here := _curve(d, xs, _errors(mine, name), dtype, high):
                    ends.append(ends_here)
            d.axes.set_xscale("log", base=2)
            d.log_y(low, high)
            d.axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}" if x >= 1 else f"1/{1 / x:g}")
            for dtype, label in (("float16", "fp16"), ("float32", "fp32")):
                edge = frontier(dtype, chunk)
                d.axes.axvline(edge, color=MUTED, lw=1, ls=(0, (4, 3)))
                d.axes.annotate(
                    f"naive {label}", (edge, 1), (3, -3), xycoords=("data", "axes fraction"), rotation=90,
                    textcoords="offset points", ha="left", va="top", fontsize=8.5, color=MUTED,
                )  # fmt: skip
            d.axes.set_xlabel(f"gate |g|, nats per token (C = {chunk})")
            d.axes.set_ylabel(f"relative error of {name}")
            d.label_ends(ends)
            panels.append(d.panel(f"{target}: {name}", "Relative error by gate and dtype, with noise floors as bands."))
    return panels


def _curve(
    d: Drawing, xs: Sequence[float], errors: Sequence[tuple[float, float, str]], dtype: str, top: float
) -> tuple[float, float, str, str] | None:
    """A measured line over the band from its floor to four times that; the end of the line, for a label."""
    if not errors:
        return None
    measured, floor = [e for e, _, _ in errors], [f for _, f, _ in errors]
    d.axes.fill_between(xs, floor, [LIMIT * f for f in floor], color=COLOURS[dtype], alpha=0.2, lw=0)
    d.axes.plot(xs, measured, **_line_style(dtype))
    for x, (e, _, verdict) in zip(xs, errors, strict=True):
        if verdict == "fail":
            y = e if 0 < e < top else top
            d.axes.plot([x], [y], marker="o", ms=9, mfc="none", mec=FAIL, mew=1.6, clip_on=False)
    last = measured[-1] if measured[-1] > 0 else top
    return xs[-1], min(last, top), SHORT[dtype], COLOURS[dtype]


def keys(lines: Sequence[Line], output: str = "o") -> list[Panel]:
    """Relative error by kind of keys, the floor as a bar beside each dot."""
    found = tables.points(lines, "keys")
    names = list(dict.fromkeys(str(tables.knob(x, "key_regime")) for x in found))
    low, high = _limits([v for e, f, _ in _errors(found, output) for v in (e, f, LIMIT * f)])
    panels = []
    for target in tables.targets(found):
        d = Drawing()
        ends = []
        for shift, dtype in enumerate(tables.dtypes(found)):
            mine = {str(tables.knob(x, "key_regime")): x for x in found if (x["target"], x["dtype"]) == (target, dtype)}
            xs = [i + 0.2 * (shift - 1) for i, n in enumerate(names) if n in mine]
            errors = _errors([mine[n] for n in names if n in mine], output)
            for x, (e, f, verdict) in zip(xs, errors, strict=True):
                d.axes.plot([x, x], [f, LIMIT * f], color=COLOURS[dtype], alpha=0.3, lw=7, solid_capstyle="butt")
                edge = FAIL if verdict == "fail" else COLOURS[dtype]
                d.axes.plot([x], [e], marker=MARKERS[dtype], ms=6, color=COLOURS[dtype], mec=edge, ls="")
            if errors and errors[-1][0] > 0:
                ends.append((xs[-1], errors[-1][0], SHORT[dtype], COLOURS[dtype]))
        d.log_y(low, high)
        d.axes.set_xlim(-0.5, len(names) - 0.4)
        d.axes.set_xticks(range(len(names)), [KEY_LABELS.get(n, n) for n in names], fontsize=9)
        d.axes.grid(False, axis="x")
        d.axes.set_ylabel(f"relative error of {output}")
        d.label_ends(ends)
        panels.append(
            d.panel(f"{target}: {output}", "Relative error by kind of keys and dtype, with noise floors as bars.")
        )
    return panels


def ulps(lines: Sequence[Line], output: str = "o") -> list[Panel]:
    """Share of elements with at most this error, in ulp."""
    found = [x for x in tables.points(lines) if x.get("ulps", {}).get(output)]
    largest = [number(e) for x in found for e in x["ulps"][output]]
    top = 10.0 ** math.ceil(math.log10(max((e for e in largest if 1 < e < math.inf), default=10.0)))
    panels = []
    for target in tables.targets(found):
        d = Drawing()
        widths = {"float16": 4.5, "bfloat16": 2.6, "float32": 1.3}  # equal distributions stay visible
        for dtype, width in widths.items():
            for x in (x for x in found if (x["target"], x["dtype"]) == (target, dtype)):
                errors = [max(number(e), 1e-3) for e in x["ulps"][output]]
                d.axes.plot(errors, PROBABILITIES, color=COLOURS[dtype], lw=width, label=SHORT[dtype])
        d.log_x(0.02, top)
        d.axes.axvline(0.5, color=MUTED, lw=1, ls=(0, (4, 3)))
        d.axes.annotate("0.5: rounded once", (0.5, 0.02), (4, 0), textcoords="offset points", fontsize=9, color=MUTED)
        d.axes.set_ylim(0, 1.03)
        d.axes.set_xlabel(f"error of {output} in ulp of its dtype")
        d.axes.set_ylabel("share of elements with at most that")
        d.axes.legend(frameon=False, loc="center right")
        panels.append(d.panel(f"{target}: {output}", "Cumulative distribution of the error in ulp, by dtype."))
    return panels


def positions(lines: Sequence[Line], outputs: Sequence[str] = ("o", "dk")) -> list[Panel]:
    """Root mean square error along the sequence, in units of the output's own size, floors as bands."""
    found = [x for x in tables.points(lines) if "positions" in x]
    found = [x for x in found if any(n in x["positions"] for n in outputs)]
    scaled: dict[tuple[str, str, str], tuple[list[float], list[float]]] = {}
    for x in found:
        for n in outputs:
            if n in x["positions"]:
                p = x["positions"][n]
                size = math.sqrt(sum(number(v) ** 2 for v in p["truth"]) / len(p["truth"])) or 1.0
                scaled[x["target"], x["dtype"], n] = tuple([number(v) / size for v in p[k]] for k in ("error", "floor"))  # type: ignore[assignment]
    low, high = _limits([v for e, f in scaled.values() for v in (*e, *(LIMIT * y for y in f))])
    panels = []
    for n in outputs:
        for target in tables.targets(found):
            d = Drawing()
            ends = []
            for x in (x for x in found if x["target"] == target and n in x["positions"]):
                dtype, xs = x["dtype"], [number(t) for t in x["positions"]["tokens"]]
                error, floor = scaled[target, dtype, n]
                d.axes.fill_between(xs, floor, [LIMIT * f for f in floor], color=COLOURS[dtype], alpha=0.2, lw=0)
                d.axes.plot(xs, error, color=COLOURS[dtype], ls=DASHES[dtype], lw=1.5)
                ends.append((xs[-1], error[-1], SHORT[dtype], COLOURS[dtype]))
            d.log_y(low, high)
            d.axes.set_xlim(left=0)
            d.axes.set_xlabel("token")
            d.axes.set_ylabel(f"rms error of {n} / rms of {n}")
            d.label_ends(ends)
            panels.append(d.panel(f"{target}: {n}", "Error along the sequence by dtype, with noise floors as bands."))
    return panels


def stages(lines: Sequence[Line]) -> list[Panel]:
    """Relative error of every intermediate, in the order of the algorithm, beside one rounding of each dtype."""
    found = [x for x in lines if x["kind"] == "stages" and x["errors"]]
    low, high = _limits([number(e) for x in found for e in x["errors"].values() if number(e) > 1e-8])
    panels = []
    for target in tables.targets(found):
        mine = [x for x in found if x["target"] == target]
        names = [n for n in STAGES if any(n in x["errors"] for x in mine)]
        d = Drawing(360, 100 + 17 * len(names))
        for x in mine:
            dtype = x["dtype"]
            unit = format_of(dtype).unit_roundoff
            d.axes.axvline(unit, color=COLOURS[dtype], lw=1, ls=DASHES[dtype])
            d.axes.annotate(
                SHORT[dtype], (unit, 1), (0, 3), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", va="bottom", fontsize=10, color=COLOURS[dtype],
            )  # fmt: skip
            shown = [(number(x["errors"][n]), i) for i, n in enumerate(names) if n in x["errors"]]
            d.axes.plot(
                [max(e, low) for e, _ in shown], [i for _, i in shown], ls="", marker=MARKERS[dtype], ms=5.5,
                color=COLOURS[dtype],
            )  # fmt: skip
        d.log_x(low, high)
        d.axes.set_ylim(len(names) - 0.5, -0.5)
        d.axes.set_yticks(range(len(names)), names)
        d.axes.set_xlabel("relative error; lines: one rounding")
        panels.append(d.panel(target, "Relative error of each intermediate of the algorithm, by dtype."))
    return panels


def bias(lines: Sequence[Line]) -> list[Panel]:
    """Mean signed error over its standard error, by output and dtype."""
    found = tables.bias(lines)
    panels = []
    for target in dict.fromkeys(t for t, _, _ in found):
        names = [n for n in tables.NAMES if any((target, d, n) in found for d in COLOURS)]
        d = Drawing(360, 90 + 24 * len(names))
        reach = 4.0
        for shift, dtype in enumerate(SHORT):
            for i, n in enumerate(names):
                if (target, dtype, n) in found:
                    mean, error, _ = found[target, dtype, n]
                    z = mean / error if error else 0.0
                    reach = max(reach, abs(z) * 1.1)
                    d.axes.plot(
                        [z], [i + 0.22 * (shift - 1)], ls="", marker=MARKERS[dtype], ms=5.5, color=COLOURS[dtype]
                    )
        d.axes.axvspan(-3, 3, color=MUTED, alpha=0.15, lw=0)
        d.axes.axvline(0, color=INK, lw=0.8)
        d.axes.set_xlim(-reach, reach)
        d.axes.set_ylim(len(names) - 0.5, -0.5)
        d.axes.set_yticks(range(len(names)), names)
        d.axes.set_xlabel("mean signed error / its standard error")
        panels.append(d.panel(target, "Bias of each output in standard errors, by dtype."))
    return panels


def inverse(claim: Line | None) -> list[Panel]:
    """Error of the two inverses against the cosine between keys, one chart per dtype."""
    if claim is None:
        return []
    cosines = [number(c) for c in claim["cosines"]]
    low, high = 1e-9, 1e16
    panels = []
    for dtype, errors in claim["errors"].items():
        d = Drawing()
        ends = []
        for name, marker, dash in (("substitution", "o", "-"), ("neumann", "s", (0, (5, 2)))):
            values = [number(e) for e in errors[name]]
            known = [(c, e) for c, e in zip(cosines, values, strict=True) if 0 < e < math.inf]
            over = [c for c, e in zip(cosines, values, strict=True) if e == math.inf]
            d.axes.plot(*zip(*known, strict=True), color=COLOURS[dtype], ls=dash, marker=marker, ms=4, lw=1.6)
            d.axes.plot(over, [high / 4] * len(over), ls="", marker="x", ms=6, mew=1.8, color=FAIL)
            label = {"substitution": "substitution", "neumann": "Neumann"}[name]
            ends.append((*known[min(len(known) - 1, 6)], label, (-6, 4) if len(known) > 6 else (6, -4)))
        for x, y, label, shift in ends:
            side = "right" if shift[0] < 0 else "left"
            d.axes.annotate(label, (x, y), shift, textcoords="offset points", color=COLOURS[dtype], ha=side)
        if over:
            d.axes.annotate(
                "not finite", (over[0], high / 4), (0, -14), textcoords="offset points", color=FAIL, fontsize=10
            )
        d.axes.axhline(1, color=MUTED, lw=1, ls=(0, (4, 3)))
        d.axes.annotate(
            "as large as A", (1, 1), (4, 3), textcoords="offset points", color=MUTED, fontsize=9, ha="right"
        )
        d.log_y(low, high)
        d.axes.set_xlabel("cosine between keys of a chunk")
        d.axes.set_ylabel("relative error of A")
        panels.append(d.panel(SHORT[dtype], "Error of Neumann series and substitution against key correlation."))
    return panels


def exponentials(claim: Line | None) -> list[Panel]:
    """First gate at which separate exponentials overflow, against ln(max)/C."""
    if claim is None:
        return []
    d = Drawing()
    ends = []
    for dtype in ("float32", "float16"):
        mine = [r for r in claim["rows"] if r["dtype"] == dtype]
        xs = [number(r["chunk"]) for r in mine]
        fine = [16 * 2 ** (i / 16) for i in range(-2, 35)]
        d.axes.plot(fine, [frontier(dtype, 1) / x for x in fine], color=COLOURS[dtype], lw=1.2, ls="-")
        ys = [number(r["overflow"]) for r in mine]
        d.axes.plot(xs, ys, ls="", marker=MARKERS[dtype], ms=7, color=COLOURS[dtype])
        label = "fp16" if dtype == "float16" else "bf16, fp32"
        d.axes.annotate(label, (xs[-1], ys[-1]), (2, 8), textcoords="offset points", color=COLOURS[dtype], fontsize=10)
        ends.append(ys)
    d.axes.set_xscale("log", base=2)
    d.axes.set_xlim(14, 80)
    d.axes.set_xticks([16, 32, 64], ["16", "32", "64"])
    d.log_y(0.1, 10)
    d.axes.set_xlabel("chunk size C")
    d.axes.set_ylabel("gate |g|, nats per token")
    return [
        d.panel(
            "Naive exponentials: first overflow", "Lines are ln(max)/C, markers the first overflow that was measured."
        )
    ]
