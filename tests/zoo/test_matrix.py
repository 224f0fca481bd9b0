"""The kill matrix: a search ends at the first failing case, its record resumes, and its page says what is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from verikda.case import Case
from verikda.cli import main
from verikda.run_case import run_case
from verikda.zoo import kills, matrix, page, tables
from verikda.zoo.kills import Kill, hunt
from verikda.zoo.specimens import HEALTHY, SPECIMENS, specimen


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["zoo", "--kill-matrix", *arguments])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of three cases, for tests of the record."""
    monkeypatch.setattr(kills, "settings", lambda seed: kills.Settings(cases=3, stratified=3, turns=0, seed=seed))


def test_a_hunt_ends_at_the_first_failing_case() -> None:
    kill = hunt(specimen("state_transposed"), 0)
    assert kill.killed
    assert kill.cases < 5
    assert kill.seconds > 0
    assert "floor" in kill.fails
    assert kill.case is not None
    case = Case.from_dict(kill.case)
    assert run_case(SPECIMENS["STATE_TRANSPOSED"].make(), case).verdict == "fail"
    assert run_case(HEALTHY.make(), case).verdict == "pass"
    assert Kill.from_line(json.loads(json.dumps(kill.to_line()))) == kill


def test_another_seed_is_another_search() -> None:
    first, second = (hunt(specimen("DH0_OFF"), seed) for seed in (1, 2))
    assert first.killed
    assert second.killed
    assert first.case != second.case
    again = hunt(specimen("DH0_OFF"), 1)
    assert (again.case, again.cases, again.fails) == (first.case, first.cases, first.fails)


@pytest.mark.usefixtures("small")
def test_health_is_searched_to_the_end() -> None:
    kill = hunt(HEALTHY, 0)
    assert (kill.killed, kill.cases, kill.check) == (False, 3, "")


@pytest.mark.usefixtures("small")
def test_the_user_can_interrupt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was found before stays in the record, and the same command goes on from there."""
    real, calls = kills.hunt, []

    def tired(subject: Any, seed: int) -> Kill:
        calls.append(subject.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(subject, seed)

    monkeypatch.setattr(kills, "hunt", tired)
    record = tmp_path / "zoo.jsonl"
    arguments = ("--fault", "STATE_TRANSPOSED", "--fault", "RULE_BETA_TWICE", "--json", str(record))
    stopped = run(*arguments)
    assert "interrupted; the same command goes on from here" in stopped.output
    assert stopped.exit_code == 0, stopped.output
    assert calls == ["STATE_TRANSPOSED", "RULE_BETA_TWICE"]
    done = run(*arguments)
    assert calls[2:] == ["RULE_BETA_TWICE", "NONE"]
    assert "2 of 2 searches found their fault (100.0 %)" in done.output
    assert "0 false alarms in 1 searches, 3 cases" in done.output
    assert done.exit_code == 0


@pytest.mark.usefixtures("small")
def test_a_missed_fault_is_listed_and_fails_the_command(tmp_path: Path) -> None:
    report = tmp_path / "zoo.md"
    result = run("--fault", "LATE_2048", "--report", str(report))
    assert result.exit_code == 1
    assert "Never found: LATE_2048." in result.output
    text = report.read_text()
    assert "`LATE_2048` (after 2,048 tokens of a row" in text
    assert "found with 0 of 1 seeds" in text


def test_processes_find_the_same() -> None:
    wanted = [("STATE_TRANSPOSED", 0), ("RULE_BETA_TWICE", 3)]
    alone, together = (
        {(k.specimen, k.seed): (k.killed, k.cases, k.case) for k in kills.hunt_all(wanted, jobs)} for jobs in (1, 2)
    )
    assert alone == together
    assert set(alone) == set(wanted)


def line(name: str, seed: int, killed: bool = True, **more: Any) -> dict[str, Any]:
    found = {"check": "floor", "output": "dq", "fails": ["floor"], "case": Case().to_dict()} if killed else {}
    kill = Kill(name, seed, killed, **({"cases": 4, "seconds": 1.0} | found | more))
    return json.loads(json.dumps(kill.to_line()))


def test_totals_are_those_of_the_record() -> None:
    lines = [
        line("DQ_OFF", 0, seconds=1.0), line("DQ_OFF", 1, seconds=3.0, check="adjoint"), line("DQ_OFF", 2, seconds=2.0),
        line("DK_OFF", 0, cases=9, seconds=7.0), line("DK_OFF", 1, killed=False), line("DK_OFF", 2, killed=False),
        line("DV_OFF", 0, killed=False), line("NONE", 0, killed=False, cases=250), line("NONE", 1, cases=17),
    ]  # fmt: skip
    results = matrix.kills(lines)
    rows = {r.subject.name: r for r in matrix.rows(results)}
    assert list(rows) == ["DQ_OFF", "DK_OFF", "DV_OFF"]
    assert (rows["DQ_OFF"].seconds, rows["DQ_OFF"].slowest, rows["DQ_OFF"].first) == (2.0, 3.0, ("floor", "dq"))
    t = matrix.totals(results)
    assert (t.specimens, t.searches, t.killed, t.always) == (3, 7, 4, 1)
    assert (t.never, t.sometimes) == (("DV_OFF",), ("DK_OFF",))
    assert (t.cases, t.seconds) == (6.5, 4.5)
    assert t.slowest is not None
    assert t.slowest.subject.name == "DK_OFF"
    assert (t.healthy, t.alarms, t.healthy_cases) == (2, 1, 267)
    assert "4 of 7 searches" in tables.sentences(t)[0]


def test_the_page_holds_every_row_and_every_public_report() -> None:
    text = page.page([line(name, 0) for name in SPECIMENS] + [line("DQ_OFF", 4)])
    assert "--kill-matrix --seeds 5 --json" in text
    for name in SPECIMENS:
        assert f"| `{name}` |" in text
    assert "fla #99, fla #111" in text
    assert "Every fault that is in the zoo was found with every seed." in text
    widths = {row.count(" | ") for row in text.splitlines() if row.startswith("| `")}
    assert len(widths) == 1


def test_a_record_of_another_search_is_refused(tmp_path: Path) -> None:
    record = tmp_path / "zoo.jsonl"
    record.write_text('{"kind": "zoo", "budget": {"cases": 3}, "environment": {}}\n')
    result = run("--fault", "DQ_OFF", "--json", str(record))
    assert result.exit_code == 2
    assert "name a new file" in result.output
    record.write_text("[1]\n")
    assert "is no record of the zoo" in run("--fault", "DQ_OFF", "--json", str(record)).output


def test_the_list_names_every_fault_and_a_wrong_name_leads_to_it() -> None:
    def zoo(*words: str) -> Any:
        return CliRunner().invoke(main, ["zoo", *words])

    listed = zoo("--list")
    assert listed.exit_code == 0
    assert {line.split()[0] for line in listed.stdout.splitlines() if line.split()} >= set(SPECIMENS)
    only = zoo("--list", "--where", "boundary").stdout
    assert all((f" {n} " in only) == (s.where == "boundary") for n, s in SPECIMENS.items())
    for words in (("zoo:nothing_like_it",), ("--kill-matrix",), ("--compare",), ("--jobs", "2"), ("--json", "x.jsonl")):
        assert zoo("--list", *words).exit_code == 2
    for words in (["check", "zoo:nothing_like_it"], ["zoo", "--fault", "nothing_like_it"]):
        wrong = CliRunner().invoke(main, words)
        assert wrong.exit_code == 2
        assert "; `verikda zoo --list` lists all" in wrong.stderr
