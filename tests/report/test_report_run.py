"""The loop that measures, the files it writes, and files that are none.

What could go wrong here: an interrupted run that loses its lines, lines that cannot be read back, half of a file read
in silence.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import verikda
from report_lines import lines, write

from verikda.report import flags, grid, run
from verikda.report.grid import Grid
from verikda.report.lines import number, read_lines
from verikda.targets import resolve

ROOT = Path(__file__).parents[2]
TINY = Grid("quick", 1, 4, 10, (0.5,), (16,), ("random",), (5, 20), 2, (("random", 1.0, "random", "random"),))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grid.GRIDS, "quick", TINY)
    monkeypatch.setattr(run, "CLAIMS", ("recompute",))


@pytest.mark.usefixtures("tiny")
def test_a_run_writes_every_point_and_renders_it(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    result = verikda(
        "report", "emulator", "--json", path, "--html", tmp_path / "p.html", "--markdown", tmp_path / "p.md"
    )
    assert result.exit_code == 0, result.output
    found = read_lines(path)
    assert [x["kind"] for x in found[:2]] == ["report", "point"]
    assert found[-1] == {"schema": 1, "kind": "end", "interrupted": False, "lines": len(found) - 2}
    wanted = list(grid.points(TINY))
    assert len([x for x in found if x["kind"] in ("point", "stages")]) == len(wanted)
    assert {x["series"] for x in found if x["kind"] == "point"} == {p.series for p in wanted} - {"stages"}
    assert all(x["verdict"] == "pass" for x in found if x["kind"] == "point")
    assert found[0]["targets"] == ["emulator"]
    again = verikda("report", "--from", path, "--html", tmp_path / "again.html")
    assert again.exit_code == 0
    assert (tmp_path / "again.html").read_text() == (tmp_path / "p.html").read_text()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(("wanted", "target"), [(True, "verikda"), (True, "emulator"), (False, "verikda")])
def test_other_flags_are_measured_where_a_grid_asks_and_the_kernels_are_there(
    wanted: bool, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verikda.report import command

    monkeypatch.setitem(grid.GRIDS, "quick", replace(TINY, flags=wanted))
    monkeypatch.setattr(flags, "flag_targets", lambda: (resolve("emulator"), resolve("zoo")))
    monkeypatch.setattr(run, "_targets", lambda names: (resolve("emulator"),))
    monkeypatch.setattr(command, "resolve", lambda name: resolve("emulator"))
    verikda("report", target, "--json", tmp_path / "r.jsonl")
    every = list(grid.flag_points(TINY))
    builds = [x["target"] for x in read_lines(tmp_path / "r.jsonl") if x.get("series") == "flags"]
    assert builds == (["emulator", "zoo:NONE"] * len(every) if wanted and target == "verikda" else [])


@pytest.mark.usefixtures("tiny")
def test_a_target_with_a_fault_ends_with_status_1(tmp_path: Path) -> None:
    result = verikda("report", "zoo", "zoo:DV_OFF", "--json", tmp_path / "r.jsonl")
    assert result.exit_code == 1
    found = [x for x in read_lines(tmp_path / "r.jsonl") if x["kind"] == "point"]
    assert {x["target"] for x in found if x["verdict"] == "fail"} == {"zoo:DV_OFF"}
    assert {n for x in found for n, o in x["outputs"].items() if o["verdict"] == "fail"} == {"dv"}


def test_what_is_timed_is_measured_when_the_processes_that_share_the_points_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timed() -> list[dict[str, Any]]:
        return [{"kind": "claim", "children": len(multiprocessing.active_children())}]

    monkeypatch.setattr("verikda.report.memory.memory_lines", timed)
    found: list[Any] = []
    assert run.measure_all([(("emulator",), "recompute"), (("emulator",), next(grid.points(TINY)))], 2, found.extend)
    assert [x["kind"] for x in found] == ["point", "claim"]
    assert found[1]["children"] == 0


def test_points_are_shared_between_processes_and_none_is_lost() -> None:
    every = run.items(TINY, ("emulator",), False)
    todo = [(names, x) for names, x in every if not isinstance(x, str) and x.series in ("regimes", "keys")]
    one: list[Any] = []
    two: list[Any] = []
    assert run.measure_all(todo, 1, one.extend)
    assert run.measure_all(todo, 2, two.extend)

    def known(some: list[Any]) -> list[str]:
        return sorted(json.dumps({k: x[k] for k in ("series", "case", "outputs")}) for x in some)

    assert known(one) == known(two)


def test_no_target_waits_for_another_at_a_point() -> None:
    names = ("emulator", "zoo")
    points = [(given, x) for given, x in run.items(TINY, names, True) if not isinstance(x, str) and x.series != "flags"]
    assert len(points) == 2 * len(list(grid.points(TINY)))
    assert {given for given, _ in points} == {("emulator",), ("zoo",)}


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("after", [1, 0])
def test_ctrl_c_keeps_every_finished_line(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = run.lines_of, iter(range(9))

    def press(*given: Any) -> list[dict[str, Any]]:
        if next(calls) == after:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(run, "lines_of", press)
    path, page = tmp_path / "r.jsonl", tmp_path / "p.html"
    result = verikda("report", "emulator", "--json", path, "--html", page)
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert [x["kind"] for x in found] == ["report", *["point"] * after, "end"]
    assert (found[-1]["interrupted"], found[-1]["lines"]) == (True, after)
    if after:  # what was measured passed
        assert result.exit_code == 0
        assert "cut short" in result.output
        assert "Not reached: 4 of 4 claims of reading notes.\n" in result.output
        assert "not run" not in result.output
        assert "cut short" in page.read_text()
    else:
        assert (result.exit_code, result.stderr) == (2, "verikda: interrupted before there was anything to tell\n")


def test_a_last_line_without_its_end_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", lines())
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert read_lines(path) == lines()[:-1]
    path.write_text(whole.rstrip("\n"))
    assert read_lines(path) == lines()
    path.write_text(whole[:100] + "\n" + whole)
    with pytest.raises(ValueError, match=r"r\.jsonl, line 1: not JSON"):
        read_lines(path)


def test_numbers_that_json_lacks_come_back() -> None:
    assert number("inf") == float("inf")
    assert number(2) == 2.0
    assert number(None) != number(None)


BAD = {
    "empty": ("", "holds no line"),
    "array": ("[1]\n", "line 1: it holds a list"),
    "schema": ('{"schema": 2, "kind": "point"}\n', "schema is 2, only 1"),
    "kind": ('{"schema": 1}\n', "kind is None"),
    "other": ('{"schema": 1, "kind": "case", "case": {}, "checks": {}}\n', "lines of kind case hold no measurement"),
    "bytes": ("\udcff\n", "not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_none_gets_one_sentence(name: str, tmp_path: Path) -> None:
    text, says = BAD[name]
    path = tmp_path / "r.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    result = verikda("report", "--from", path, "--html", tmp_path / "p.html")
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "p.html").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--from", "nothing.jsonl"), "nothing.jsonl: No such file"),
        (("emulator", "--from", "r.jsonl"), "leave out TARGETS"),
        (("--json", "new.jsonl", "--from", "r.jsonl"), "runs nothing, and goes with --html and --markdown only"),
        (("--from", "r.jsonl", "--grid", "quick", "--jobs", "1"), "leave out --grid, --jobs"),
        (("emulator", "--grid", "huge"), "no grid 'huge'; the grids are quick, wide, full"),
        (("nobody",), "target 'nobody' is not known"),
    ],
)
def test_wishes_that_cannot_be_met_get_one_sentence(
    words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "r.jsonl", lines())
    result = verikda("report", *words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.jsonl"]


def test_a_page_without_its_libraries_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    path = write(tmp_path / "r.jsonl", lines())
    result = verikda("report", "--from", path, "--html", tmp_path / "p.html")
    assert result.exit_code == 2
    assert "pip install 'verikda[report]'" in result.stderr
    assert verikda("report", "--from", path).exit_code == 1, "the terminal's table needs neither"


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    modules = ("cli", "report.page", "report.charts", "report.command", "report.run")
    code = f"import sys, {', '.join(f'verikda.{m}' for m in modules)}\n"
    code += "print({'matplotlib', 'jinja2', 'torch', 'cupy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=250, check=True
    )
    assert done.stdout.strip() == "set()"
