"""README.md and reports/h200/README.md say of speed and errors what reports/h200/bench.jsonl says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from verikda.bench.workloads import Workload
from verikda.false_alarm import recorded, table
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
    assert len(bench) == 6
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


def test_random_searches() -> None:
    readme, report = (ROOT / "README.md").read_text(), (ROOT / "reports/h200/README.md").read_text()
    lines = [json.loads(text) for text in (ROOT / "reports/h200/searches.jsonl").read_text().splitlines()]
    counts = {
        verdict: sum(x["verdicts"].get(verdict, 0) for x in lines) for verdict in ("pass", "inconclusive", "fail")
    }
    total = sum(sum(x["verdicts"].values()) for x in lines)
    assert counts["fail"] == 0
    assert f"{total:,} cases over the whole scope, through all checks: {counts['pass']:,} pass," in report
    assert f" {counts['inconclusive']}\nare inconclusive" in report
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
