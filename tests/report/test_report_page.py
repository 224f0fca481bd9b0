"""The page, its Markdown and the terminal's table, from fixed lines.

Each number is looked for where a reader would find it. What could go wrong here: a failure shown as a pass, a number
that is not that of the data, a section that vanishes, a page that loads something or runs something.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from report_lines import BASE, OUTPUTS, lines, outputs, point, write

from verikda.case import Case
from verikda.cli import main
from verikda.finding import load_case
from verikda.report import charts, tables
from verikda.report.captions import CAPTIONS
from verikda.report.page import Page

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Reader(HTMLParser):
    """Checks that tags nest, and collects texts by section, tags, attributes and cells."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.text: dict[str, str] = {"": ""}
        self.cells: list[tuple[str, str, str]] = []
        self.section, self._cell = "", ""
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {k: v or "" for k, v in attrs}
        self.tags.add(tag)
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "h2":
            self.section = given["id"]
            self.text[self.section] = ""
        self.links += [given[k] for k in ("href", "src", "xlink:href", "srcset", "data") if k in given]
        if tag == "td":
            self.cells.append((self.section, given.get("class", ""), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        self.text[self.section] += data
        if self.open and self.open[-1] == "td" and self.cells:
            where, kind, text = self.cells[-1]
            self.cells[-1] = (where, kind, text + data)


@pytest.fixture(scope="module")
def html() -> str:
    return Page.of(lines()).html()


def test_the_page_is_valid_self_contained_and_runs_nothing(html: str) -> None:
    page = Reader(html)
    assert html.startswith("<!DOCTYPE html>")
    assert not page.tags & {"script", "iframe", "object", "embed", "link", "img"}
    assert page.links
    assert all(link.startswith("#") for link in page.links), [x for x in page.links if not x.startswith("#")]
    assert "http" not in html
    assert not re.search(r"@import|url\((?!#)", html)
    assert len(page.ids) == len(set(page.ids)), "an id is given twice"
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert not re.search(r"\son\w+=", html)


def test_every_section_is_there_with_charts_or_a_table(html: str) -> None:
    page = Reader(html)
    for name in ("verdicts", *CAPTIONS, "claims", "worst", "environment"):
        assert name in page.text, name
    assert {n for n in page.text if "not run" in page.text[n]} == {"flags"}
    parts = re.split(r'<h2 id="', html)
    drawn = {p.split('"')[0]: p.count("<svg") for p in parts[1:]}
    assert drawn["gates"] == 2
    assert all(drawn[n] >= 1 for n in ("keys", "ulp", "position", "stages", "bias"))
    assert drawn["claims"] == 4


def test_numbers_are_those_of_the_data(html: str) -> None:
    page = Reader(html)
    verdicts = [(kind, text) for where, kind, text in page.cells if where == "verdicts"]
    assert ("fail", "123") in verdicts
    assert ("b", "0.855") in verdicts
    frontier = [text for where, _, text in page.cells if where == "frontier"]
    assert frontier.count("0.811") == 15
    assert {"0.693", "5.55"} <= set(frontier)  # ln(65504)/16, ln(max float32)/16
    assert [t for w, _, t in page.cells if w == "safe"].count("0.833") == 6 * len(OUTPUTS)
    assert [t for w, _, t in page.cells if w == "contracts"].count("2.35") + [
        t for w, _, t in page.cells if w == "contracts"
    ].count("2.34") == 3 * len(OUTPUTS)
    claims = page.text["claims"]
    for text in (
        "0.000111",
        "0.000222",
        "not finite",
        "2,621,440",
        "41,664",
        "0.771",
        "0.61",
        "0.62",
        "GPU of paper",
        "1.25",
    ):
        assert text in claims, text
    assert "0123456789abcdef" in page.text["environment"]
    assert "verikda report toy" in page.text["environment"]


def test_the_measured_frontier_is_where_things_stop_being_finite_and_right() -> None:
    table = tables.gate_map(lines())
    assert table is not None
    rows = {(r[1].text, r[2].text): r for r in table.rows}
    bad, fine = rows["float32", "16"], rows["float32", "64"]
    assert [c.text for c in bad[-2:]] == ["2", "2"]
    assert [c.text for c in fine[-2:]] == ["≥ 8", "≥ 8"]
    assert [c.edge for c in bad[3:6]] == [False, False, True]  # 5.5 lies between 2 and 8
    assert [c.edge for c in rows["float16", "16"][3:6]] == [False, True, False]


def test_a_failure_is_shown_as_one(html: str) -> None:
    page = Reader(html)
    cells = [(kind, text) for where, kind, text in page.cells if where == "frontier"]
    assert ("fail", "123") in cells
    assert all(kind != "fail" for kind, text in cells if text == "0.811")
    assert "dg is <wrong> | off" in page.text["worst"]
    assert "<wrong>" not in html, "text of the data is not escaped"
    ring = charts.gates(lines())[1].svg
    quiet = [point(x["series"], Case.from_dict(x["case"]), 0.8) for x in lines() if x.get("series") == "gates"]
    assert ring.count("var(--fail)") == 0, "no case at C = 64 fails"
    bad = outputs(0.8, dg={"verdict": "fail", "ratio": 9.0})
    quiet[-1] = point("gates", Case.from_dict(quiet[-1]["case"]), 0.8, outputs=bad)
    assert "var(--fail)" in charts.gates(quiet)[1].svg
    assert "var(--fail)" not in charts.gates(quiet)[0].svg


def test_worst_cases_can_be_replayed(html: str, tmp_path: Path) -> None:
    worst = Page.of(lines()).worst[0]
    assert (worst.output, worst.ratio, worst.verdict) == ("dg", "123", "fail")
    (tmp_path / worst.file).write_text(worst.json)
    case, target, _ = load_case(tmp_path / worst.file)
    assert (target, case.gate_magnitude, case.chunk_size) == ("toy", 8.0, 16)
    assert f"verikda replay {worst.file} toy" in Reader(html).text["worst"]


def test_bias_is_the_mean_over_heads_and_its_standard_error() -> None:
    found = tables.bias(lines())["toy", "float32", "o"]
    assert found[0] == pytest.approx(-0.005)
    assert found[1] == pytest.approx(0.015 * (6 / 5) ** 0.5 / 6**0.5)
    assert found[2] == 6


def test_what_was_not_measured_says_so(tmp_path: Path) -> None:
    one = [point("other", Case(**{"lengths": (3,), "K": 2, "V": 2}), 0.5)]
    page = Reader(Page.of(one).html())
    for name in CAPTIONS:
        assert "not run" in page.text[name], name
    assert page.text["claims"].count("not run") == 4
    text = Page.of(one).markdown()
    assert text.count("not run") >= 8
    claims_only = Page.of([x for x in lines() if x["kind"] == "claim"])
    assert "not run" in Reader(claims_only.html()).text["verdicts"]


def test_a_target_that_does_not_support_a_dtype_is_named_with_the_reason() -> None:
    line: dict[str, Any] = point("regimes", Case(**{"lengths": (3,)}), 0.5)
    line |= {"verdict": "not run", "detail": "the target does not support dtype float32"}
    del line["outputs"]
    page = Page.of([*lines(), line | {"target": "shy"}])
    assert "v-not-run" in page.html()
    for text in (Reader(page.html()).text["verdicts"], page.markdown()):
        assert "shy, 1 point: the target does not support dtype float32" in text


def test_a_run_that_was_cut_short_says_so(html: str) -> None:
    assert "cut short" not in html
    assert "cut short" in Page.of(lines()[:-1]).html()
    stopped = [*lines()[:-1], {"kind": "end", "interrupted": True, "lines": 3}]
    assert "cut short" in Page.of(stopped).markdown()


def test_targets_stand_in_the_order_in_which_they_were_asked_for() -> None:
    case = Case(**BASE)
    opening = {**lines()[0], "targets": ["own", "other"]}
    page = Page.of([opening, *(point("regimes", case, 1.0, name) for name in ("other", "own, fast math", "own"))])
    assert [x["target"] for x in page.lines if "target" in x] == ["own", "other", "own, fast math"]


def test_the_last_measurement_of_a_point_counts() -> None:
    case = Case(**{"lengths": (3,), "K": 2, "V": 2})
    page = Page.of([point("regimes", case, 3.21), point("regimes", case, 0.12)])
    assert page.strip is not None
    assert page.strip.rows[0][3].text == "0.12"


def test_markdown_has_the_same_tables(tmp_path: Path) -> None:
    text = Page.of(lines()).markdown()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert any(r.startswith("| toy | float16 | **fail** |") or r.startswith("| toy | float16 | fail |") for r in rows)
    assert "**123**" in text
    assert "| toy | float32 | 16 | 5.55 | **2** | **2** |" in rows
    widths: dict[int, int] = {}
    for i, row in enumerate(text.splitlines()):
        if set(row) == {"|", "-"}:
            widths[i] = row.count("|")
            header, first = text.splitlines()[i - 1], text.splitlines()[i + 1]
            assert header.count("|") == first.replace("\\|", "").count("|") == widths[i], (header, row, first)
    assert len(widths) >= 7


def test_drawings_are_equal_in_every_process_and_round_their_numbers(html: str) -> None:
    assert Page.of(lines()).html() == html
    drawn = re.findall(r"<svg.*?</svg>", html, flags=re.S)
    assert all(not re.search(r'(?: d|x|y|points)="[^"]*\d\.\d{3,}', s) for s in drawn)
    assert sum(map(len, drawn)) < 400_000


def test_the_command_renders_earlier_files(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", lines())
    out = CliRunner().invoke(
        main,
        ["report", "--from", str(path), "--html", str(tmp_path / "a/p.html"), "--markdown", str(tmp_path / "p.md")],
    )
    assert out.exit_code == 1, out.output  # a case failed
    assert "123" in out.stdout
    assert "The safe gate's local anchors are stable and lose nothing\": holds" in out.stdout
    assert Reader((tmp_path / "a/p.html").read_text()).text["verdicts"]
    good = [x for x in lines() if x.get("verdict") != "fail"]
    assert CliRunner().invoke(main, ["report", "--from", str(write(path, good))]).exit_code == 0
    assert CliRunner().invoke(main, ["report", "--from", str(write(path, lines()[-5:]))]).exit_code == 2
