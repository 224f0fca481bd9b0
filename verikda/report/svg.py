"""Small charts as inline SVG. Matplotlib draws in colours that stand for CSS variables: light and dark are one file."""

from __future__ import annotations

import html
import io
import math
import re
import zlib
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

INK, MUTED, GRID, FAIL = "#000001", "#000002", "#000003", "#000008"
"""Stand-ins; the page gives each a colour for light and for dark."""
COLOURS = {"float32": "#000005", "bfloat16": "#000006", "float16": "#000007"}
MARKERS = {"float32": "o", "bfloat16": "s", "float16": "^"}
DASHES = {"float32": "-", "bfloat16": (0, (5, 2)), "float16": (0, (1.5, 1.5))}
_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "rule", FAIL: "fail"} | {c: d for d, c in COLOURS.items()}
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "verikda", "font.size": 11, "axes.edgecolor": MUTED, "axes.linewidth": 0.8,
    "axes.labelcolor": INK, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK,
    "ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False, "grid.color": GRID,
    "grid.linewidth": 0.7, "axes.labelsize": 11, "axes.unicode_minus": True, "mathtext.default": "regular",
    "xtick.labelsize": 10, "ytick.labelsize": 10,
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """One chart: title above it, what it shows for those who cannot see it, and the drawing."""

    title: str
    text: str
    svg: str


def power(x: float, position: float = 0.0) -> str:
    """A tick of a logarithmic axis: 0.1, 1, 10 and 100 as they are, else a power of ten."""
    if 0.05 < x < 200:
        return f"{x:g}"
    exponent = round(math.log10(x))
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


class Drawing:
    """One pair of axes, `width` by `height` CSS pixels."""

    def __init__(self, width: int = 360, height: int = 270) -> None:
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        self.figure.patch.set_alpha(0)
        self.axes = self.figure.add_subplot()
        self.axes.patch.set_alpha(0)
        self.axes.grid(True)
        self.axes.set_axisbelow(True)
        self.axes.tick_params(length=3, which="major")
        self.axes.tick_params(length=0, which="minor")

    def log_y(self, low: float, high: float) -> None:
        """Decades on the y axis, from below `low` to above `high`."""
        self.axes.set_yscale("log")
        self.axes.set_ylim(low, high)
        self.axes.minorticks_off()
        self.axes.yaxis.set_major_formatter(power)

    def log_x(self, low: float, high: float) -> None:
        """Decades on the x axis, from `low` to `high`."""
        self.axes.set_xscale("log")
        self.axes.set_xlim(low, high)
        self.axes.minorticks_off()
        self.axes.xaxis.set_major_formatter(power)

    def label_ends(self, ends: Sequence[tuple[float, float, str, str]], gap: float = 13.0) -> None:
        """Text (x, y, text, colour) to the right of the ends of lines, moved apart where it would overlap."""
        self.figure.draw_without_rendering()
        to_pixels, back = self.axes.transData.transform, self.axes.transData.inverted().transform
        scale = self.figure.dpi / 72
        low, high = (self.axes.transAxes.transform((0, y))[1] for y in (0, 1))
        ends = sorted(ends, key=lambda e: e[1])
        at = [list(to_pixels((x, y))) for x, y, _, _ in ends]
        for i, place in enumerate(at):
            place[1] = min(max(place[1], low if i == 0 else at[i - 1][1] + gap * scale), high)
        for i in reversed(range(len(at) - 1)):
            at[i][1] = min(at[i][1], at[i + 1][1] - gap * scale)
        for place, (_, _, text, colour) in zip(at, ends, strict=True):
            self.axes.annotate(
                text, tuple(back(place)), xytext=(6, 0), textcoords="offset points", color=colour, va="center",
                annotation_clip=False, fontsize=10,
            )  # fmt: skip

    def panel(self, title: str, text: str) -> Panel:
        """The finished chart."""
        buffer = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        self.figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
        return Panel(title, text, inline(buffer.getvalue(), title, text, self.width, self.height))


@contextmanager
def style() -> Any:
    """Matplotlib's settings while charts are drawn."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def inline(text: str, title: str, says: str, width: int, height: int) -> str:
    """Matplotlib's file as an element of a page: ids of its own, CSS colours and fonts, two decimals."""
    body = text[text.index("<svg") :]
    body = body[body.index(">") + 1 :]
    body = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>|font-family: [^;]*; ", "", body, flags=re.S)
    body = re.sub(r' transform="rotate\(-0 [^"]*"', "", body)
    prefix = f"c{zlib.crc32((title + says + body).encode()):08x}"
    body = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r'xlink:href="#', f'href="#{prefix}-', body)
    body = re.sub(r"url\(#", f"url(#{prefix}-", body)
    body = re.sub(r"<[^>]*>", _rounded, body)
    for colour, name in _VARIABLES.items():
        body = body.replace(colour, f"var(--{name})")
    body = re.sub(r"\s*\n\s*", "\n", body)
    label = html.escape(f"{title}. {says}", quote=True)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg role="img" aria-label="{label}" {size}>{body}'


def _rounded(tag: re.Match[str]) -> str:
    return re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), tag[0])
