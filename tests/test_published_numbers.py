"""README.md and the pages of reports/ say what their records say."""

from __future__ import annotations

import json
import re
from collections import Counter
from html import unescape
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from verikda.bench.workloads import Workload, workloads
from verikda.checks import CHECKS
from verikda.false_alarm import recorded, table
from verikda.finding import load_case
from verikda.floor import LIMIT
from verikda.report.flags import FLAGS
from verikda.report.lines import read_lines
from verikda.report.page import Page
from verikda.report.tables import builds
from verikda.zoo.specimens import SPECIMENS

ROOT = Path(__file__).parents[1]
PEERS = ("fla", "fla:safe", "jla", "cudnn")
OUTPUTS = ("o", "dq", "dk", "dv", "dbeta", "dg", "dA_log", "ddt_bias")

Rows = dict[Workload, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def bench() -> Rows:
    rows: Rows = {}
    for text in (ROOT / "reports/h200/bench.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["kind"] == "timing":
            w = line["workload"]
            rows.setdefault(Workload(**{**w, "lengths": tuple(w["lengths"])}), {})[line["target"]] = line
    return rows


def times(row: dict[str, Any], field: str = "median") -> str:
    """Forward / forward and backward."""
    if not row["times"]:
        return "not supported"
    modes = (row["times"].get(mode) for mode in ("forward", "forward+backward"))
    text = " / ".join("not supported" if t is None else f"{t[field]:,.0f}" for t in modes)
    return text + (" (wrong)" if row["reason"].startswith("wrong") and field == "median" else "")


def test_times(bench: Rows) -> None:
    readme, report = (ROOT / "README.md").read_text(), (ROOT / "reports/h200/README.md").read_text()
    assert set(bench) == set(workloads(["full"]))
    for w, rows in bench.items():
        cells = [times(rows["verikda"], "floor"), times(rows["verikda"]), *(times(rows[name]) for name in PEERS)]
        assert f"| {w.title} | {w.shape} | {' | '.join(cells)} |\n" in report
        if w.shape == "1,8192,32":
            assert f"| {w.title} | {' | '.join(cells)} |\n" in readme


def test_errors(bench: Rows) -> None:
    report = (ROOT / "reports/h200/README.md").read_text()
    for w, rows in bench.items():
        if w.shape != "1,8192,32":
            continue
        first = True
        for name in PEERS:
            own, others = rows["verikda"]["errors"], rows[name]["errors"]
            if "dq" not in others:
                continue  # not supported, or the forward alone
            ratios = [f"{own[n] / others[n]:.2f}" if n in own else "" for n in OUTPUTS]
            cells = " | ".join([w.title if first else "", name, *ratios])
            assert "| " + " ".join(cells.split()) + " |\n" in report, cells
            first = False


def test_ratios_of_times(bench: Rows) -> None:
    report = (ROOT / "reports/h200/README.md").read_text()

    def ratios(names: tuple[str, ...], gates: tuple[str, ...], mode: str = "forward+backward") -> str:
        found = [
            min(rows[n]["times"][mode]["median"] for n in names if rows[n]["times"])
            / rows["verikda"]["times"][mode]["median"]
            for w, rows in bench.items()
            if w.gates in gates and any(mode in rows[n]["times"] for n in names)
        ]
        return f"{min(found):.2f} to {max(found):.2f}"

    kda = ("fast", "slow", "fused")
    assert f"| fla on its faster path, KDA | {ratios(('fla', 'fla:safe'), kda)} |" in report
    assert f"| jla, KDA | {ratios(('jla',), kda)} |" in report
    assert f"others' error) | {ratios(('cudnn',), ('fast',))} |" in report
    assert f"| cudnn, slow gates | {ratios(('cudnn',), ('slow',))} |" in report
    assert f"| fla, DeltaNet | {ratios(('fla',), ('none',))} |" in report
    assert f"| jla, DeltaNet | {ratios(('jla',), ('none',))} |" in report
    delta = bench[Workload(1, 8192, 32, "none")]
    own, fla, jla = (f"{delta[n]['times']['backward']['median']:,.0f}" for n in ("verikda", "fla", "jla"))
    assert f"alone takes {own} at 1,8192,32 against fla's {fla} and jla's {jla}, and its forward" in report


def test_nothing_is_lost_to_fla(bench: Rows) -> None:
    for rows in bench.values():
        for name in ("fla", "fla:safe"):
            own, others = rows["verikda"]["errors"], rows[name]["errors"]
            for n in set(own) & set(others) - {"dA_log", "ddt_bias"}:
                assert own[n] <= 1.001 * others[n], (name, n)


def test_precision_table() -> None:
    readme, report = (ROOT / "README.md").read_text(), (ROOT / "reports/h200/README.md").read_text()
    strip = Page.of(read_lines(ROOT / "reports/h200/report.jsonl")).strip
    assert strip is not None
    measured = [[cell.text for cell in row] for row in strip.rows if row[2].text != "not run"]
    assert {row[0] for row in measured} == {"verikda", "fla", "jla", "cudnn"}
    for row in measured:
        assert f"| {' | '.join(row)} |\n" in report
        assert f"| {' | '.join(row[:-1])} |\n" in readme


@pytest.mark.parametrize("place", ["cpu", "h200"])
def test_the_pages_are_what_their_lines_give(place: str) -> None:
    """The drawings of the HTML page depend on the version of matplotlib, its words and the Markdown do not."""
    folder = ROOT / "reports" / place
    page = Page.of(read_lines(folder / "report.jsonl"))
    assert (folder / "report.md").read_text() == page.markdown()
    words = unescape((folder / "report.html").read_text())
    assert all(section.says in words for section in page.sections)


def test_compiler_flags() -> None:
    text = " ".join((ROOT / "reports/h200/README.md").read_text().split())
    table = builds([x for x in read_lines(ROOT / "reports/h200/report.jsonl") if x.get("series") == "flags"])
    assert table is not None
    rows = {
        (row[0].text, row[1].text): dict(zip(table.headers, (c.text for c in row), strict=True)) for row in table.rows
    }
    assert {row["verdict"] for row in rows.values()} == {"pass"}
    assert {name for name, _ in rows} == {f"verikda, {label}" for label in FLAGS}
    shipped, fast = rows["verikda, as shipped", "float32"], rows["verikda, fast math", "float32"]
    before, after = (row["worst ratio"].split()[0] for row in (shipped, fast))
    assert f"in float32, where the worst ratio grows from {before} to {after}." in text
    unfused = rows["verikda, no fused multiply-add", "float32"]
    assert f"Without fused multiply-add {unfused['dg']} of dg take other values" in text
    divided = rows["verikda, fast division and root", "float32"]
    for row, least in ((divided, 10), (fast, 80)):
        assert all(float(row[n].removesuffix(" %")) > least for n in OUTPUTS)


def test_transformers() -> None:
    page = (ROOT / "reports/cpu/transformers.md").read_text()
    (text,) = (ROOT / "reports/cpu/transformers.jsonl").read_text().splitlines()
    line = json.loads(text)
    assert set(line["settings"]["checks"]) == {check.name for check in CHECKS}, "of an earlier search: run it again"
    for name, worst in line["worst"].items():
        passes = worst["ratio"] <= LIMIT
        fails = f"| **{name}** | **{worst['ratio']:.2g}** | **fail** ({line['verdicts']['fail']} of 250 cases) |"
        assert (f"| {name} | {worst['ratio']:.2f} | pass |" if passes else fails) in page
    assert sum(line["verdicts"].values()) == 250
    assert f"It took {line['seconds']:.0f} s" in page


def test_findings() -> None:
    text = (ROOT / "reports/findings/README.md").read_text()
    for path in (ROOT / "reports/findings").glob("*.json"):
        load_case(path)
        name = path.stem
        digest = name.rpartition("-")[2]
        assert name in text or f"-{digest}" in text or name.startswith("transformers-"), name
    table = text[text.index("| target | cases of `check` |") :].split("\n\n")[0].splitlines()[2:]
    lines = [json.loads(line) for line in (ROOT / "reports/findings/checks.jsonl").read_text().splitlines()]
    for row, line in zip(table, lines, strict=True):
        target, cases = (cell.strip() for cell in row.split("|")[1:3])
        assert target.split(",")[0] == line["target"]
        assert cases.split(":")[0].split(" of ")[0].split(",")[0] == str(sum(line["verdicts"].values()))
        for verdict, n in line["verdicts"].items():
            words = ("declined", "not told") if verdict == "refused" else (verdict,)
            assert any(f"{n} {word}" in cases for word in words), (target, verdict)
    printed = (ROOT / "reports/findings/zoo.txt").read_text()
    ends = re.findall(r"^(?:pass|fail)  (\S+): (\d+) known faults: (.*)$", printed, re.MULTILINE)
    assert {target for target, *_ in ends} == {line["target"] for line in lines}
    for target, faults, counts in ends:
        of = [row for row in table if row.startswith(f"| {target} ") or row.startswith(f"| {target},")]
        row = next(row for row in of if (f"of {faults}:" in row) == (faults != "145"))
        words = row.rsplit("|", 2)[1]
        for count in counts.split(", "):
            assert count.replace("refused", "not told") in words, (target, count)
    passed, unsure = (
        int(re.search(rf"^pass  fla: 145 known faults: .*?(\d+) {word}", printed, re.MULTILINE)[1])
        for word in ("pass", "inconclusive")
    )
    readme = (ROOT / "README.md").read_text()
    assert [row for row in table if row in readme] == [row for row in table if "included |" not in row]
    told = f"without such rows {passed} of the {passed + unsure} known faults that it can be asked about do not show"
    assert f"{told} and {unsure} cannot be told" in readme


def test_random_searches() -> None:
    readme, report = (ROOT / "README.md").read_text(), (ROOT / "reports/h200/README.md").read_text()
    lines = [json.loads(text) for text in (ROOT / "reports/h200/searches.jsonl").read_text().splitlines()]
    counts = {
        verdict: sum(x["verdicts"].get(verdict, 0) for x in lines) for verdict in ("pass", "inconclusive", "fail")
    }
    total = sum(sum(x["verdicts"].values()) for x in lines)
    assert counts["fail"] == 0
    assert f"Of {total:,} cases over the whole scope, {counts['pass']:,} pass, {counts['inconclusive']}\nare" in report
    names = ("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias")
    worst = {n: max(x["worst"][n]["ratio"] for x in lines) for n in names}
    assert f"| {' | '.join(f'{worst[n]:.2f}' for n in names)} |\n" in report
    assert f"0 of {total:,} random cases fail (worst ratio {max(worst.values()):.2f}, limit 4)" in readme


def test_kill_matrix() -> None:
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "reports/cpu/zoo.md").read_text()
    text = (ROOT / "reports/cpu/zoo.jsonl").read_text()
    kills = [x for x in map(json.loads, text.splitlines()) if x["kind"] == "kill" and x["specimen"] != "NONE"]
    assert len({(x["specimen"], x["seed"]) for x in kills}) == len(kills)
    found = [x for x in kills if x["check"]]
    assert f"- {len(found)} of {len(kills)} searches found their fault" in page
    cuda = {x["specimen"] for x in kills if x["specimen"].startswith("CUDA")}
    others = {x["specimen"] for x in kills} - cuda
    assert cuda | others == set(SPECIMENS), "the zoo has changed since"
    for names, words in ((others, "planted faults"), (cuda, "planted in the CUDA sources and run on the CPU")):
        (seeds,) = set(Counter(x["specimen"] for x in kills if x["specimen"] in names).values())  # as many for each
        assert f"all {len(names)} {words} with each of {seeds} seeds" in readme
    assert found == kills
    seconds = [x["seconds"] for x in kills]
    medians = f"after {median(x['cases'] for x in kills):.0f} cases and {median(seconds):.1f} s of one core (medians; "
    assert f"{medians}slowest {max(seconds):.0f} s)" in readme


def test_false_alarms() -> None:
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "reports/cpu/false_alarm.md").read_text()
    lines = recorded([ROOT / "reports/cpu/false_alarm.jsonl"])
    cases = sum(x["cases"] for x in lines)
    worst = max(ratio for x in lines for ratio, _ in x["worst"].values())
    assert table(lines) in page
    assert f"0 of {cases:,} random cases on two healthy implementations fail" in readme
    assert f"worst ratio {worst:.2f}, limit 4" in readme
