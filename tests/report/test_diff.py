"""`verikda diff`: planted regressions are found, and nothing else is called one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from command_line import verikda
from report_lines import lines, write

Lines = list[dict[str, Any]]

RUN: Lines = [
    {"schema": 1, "kind": "run", "target": "toy"},
    {"schema": 1, "kind": "case", "case": {"schema": 1, "lengths": [5]}, "verdict": "pass",
     "checks": {"floor": "pass", "repeat": "pass"}, "ratios": {"floor": {"o": 1.2, "dg": 0.5}}},
]  # fmt: skip
BENCH: Lines = [
    {"schema": 1, "kind": "bench", "device": "GPU of paper"},
    {"schema": 1, "kind": "timing", "target": "toy", "workload": {"B": 1, "T": 8}, "reason": "", "errors": {"o": 3e-3},
     "floor_ratio": 1.1,
     "times": {"fwd": {"method": "graph", "median": 100.0, "low": 98.0, "high": 103.0}}},
]  # fmt: skip


def diff(tmp_path: Path, before: Lines, after: Lines, *words: str) -> Result:
    a, b = write(tmp_path / "a.jsonl", before), write(tmp_path / "b.jsonl", after)
    return verikda("diff", a, b, *words)


def changed(some: Lines, change: Callable[[Lines], None]) -> Lines:
    made = copy.deepcopy(some)
    change(made)
    return made


def first(some: Lines, kind: str) -> dict[str, Any]:
    return next(x for x in some if x["kind"] == kind)


def set_ratio(ratio: Any) -> Callable[[Lines], None]:
    def change(some: Lines) -> None:
        first(some, "point")["outputs"]["dk"]["ratio"] = ratio

    return change


def fail_one(some: Lines) -> None:
    first(some, "point")["outputs"]["dk"]["verdict"] = "fail"
    first(some, "point")["verdict"] = "fail"


def raise_error(some: Lines) -> None:
    first(some, "point")["outputs"]["dk"]["error"] = 2e-3


def lose_stage(some: Lines) -> None:
    first(some, "stages")["errors"]["A"] = 9e-4


def fail_check(some: Lines) -> None:
    some[1]["checks"]["repeat"] = "fail"


def raise_check(some: Lines) -> None:
    some[1]["ratios"]["floor"]["o"] = 2.4


def raise_floor_ratio(some: Lines) -> None:
    some[1]["floor_ratio"] = 3.0


def slower(some: Lines) -> None:
    some[1]["times"]["fwd"] |= {"median": 110.0, "low": 105.0, "high": 112.0}


def wrong(some: Lines) -> None:
    some[1] |= {"reason": "wrong: relative L2", "times": {}}


PLANTED: dict[str, tuple[Lines, Callable[[Lines], None], str]] = {
    "ratio": (lines(), set_ratio(1.6), "dk ratio"),
    "ratio to infinity": (lines(), set_ratio("inf"), "dk ratio"),
    "verdict": (lines(), fail_one, "dk verdict"),
    "error": (lines(), raise_error, "dk error"),
    "intermediate": (lines(), lose_stage, "intermediate A error"),
    "check": (RUN, fail_check, "repeat verdict"),
    "ratio of a check": (RUN, raise_check, "floor, o ratio"),
    "ratio of bench": (BENCH, raise_floor_ratio, "worst ratio"),
    "time": (BENCH, slower, "time of fwd"),
    "wrong, so not timed": (BENCH, wrong, "verdict"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_regression_is_found_and_its_mending_is_none(name: str, tmp_path: Path) -> None:
    before, change, what = PLANTED[name]
    after = changed(before, change)
    found = diff(tmp_path, before, after)
    assert found.exit_code == 1, found.output
    assert what in found.stdout
    assert "worse" in found.stdout
    mended = diff(tmp_path, after, before)
    assert mended.exit_code == 0, mended.output
    assert " 0 worse, " in mended.stdout
    assert " 0 better" not in mended.stdout


@pytest.mark.parametrize("some", [lines(), RUN, BENCH])
def test_equal_files_differ_in_nothing(some: Lines, tmp_path: Path) -> None:
    result = diff(tmp_path, some, some)
    assert result.exit_code == 0
    assert "0 worse, 0 better" in result.stdout


def test_noise_is_no_news(tmp_path: Path) -> None:
    """Below a perfect implementation, within the factor, or within the spread of a time."""
    assert diff(tmp_path, changed(lines(), set_ratio(0.2)), changed(lines(), set_ratio(0.95))).exit_code == 0
    assert diff(tmp_path, changed(lines(), set_ratio(2.0)), changed(lines(), set_ratio(2.9))).exit_code == 0
    assert (
        diff(tmp_path, changed(lines(), set_ratio(2.0)), changed(lines(), set_ratio(2.9)), "--factor", "1.2").exit_code
        == 1
    )

    def within(some: Lines) -> None:
        some[1]["times"]["fwd"] |= {"median": 103.0, "low": 102.0, "high": 106.0}

    assert diff(tmp_path, BENCH, changed(BENCH, within)).exit_code == 0


def test_times_of_different_devices_are_not_compared(tmp_path: Path) -> None:
    def elsewhere(some: Lines) -> None:
        slower(some)
        some[0]["device"] = "another"

    result = diff(tmp_path, BENCH, changed(BENCH, elsewhere))
    assert result.exit_code == 0
    assert "times are not compared: they are of GPU of paper and of another" in result.stdout


def test_the_last_of_several_measurements_counts(tmp_path: Path) -> None:
    result = diff(tmp_path, lines(), [*changed(lines(), set_ratio(1.6)), *lines()])
    assert result.exit_code == 0


def test_what_only_one_file_has_is_counted(tmp_path: Path) -> None:
    result = diff(tmp_path, lines(), [x for x in lines() if x["kind"] != "stages"])
    assert result.exit_code == 0
    assert "9 numbers are only in" in result.stdout


@pytest.mark.parametrize(
    ("after", "words", "says"),
    [
        (RUN, (), "have no measurement in common"),
        (
            [{"schema": 1, "kind": "summary", "target": "toy"}],
            (),
            " and 0 numbers); compare --json files of the same",
        ),
        (lines(), ("--factor", "1"), "--factor is 1, it must be above 1"),
        (lines(), ("--factor", "nan"), "not a finite number"),
    ],
)
def test_what_cannot_be_compared_gets_one_sentence(
    after: Lines, words: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    result = diff(tmp_path, lines(), after, *words)
    assert result.exit_code == 2
    assert says in result.stderr
