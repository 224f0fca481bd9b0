"""The search for false alarms of the floor: it finds none here, shows one that is planted, and can be repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
from floor_problems import DTYPES

from verikda.floor import LIMIT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", ["emulator", "zoo"])
def test_no_false_alarm_on_drawn_cases(target: str, dtype: str) -> None:
    """A handful of what `python -m verikda.false_alarm` does by the ten thousand."""
    from verikda.false_alarm import run_share

    share = run_share(target, None, dtype, 0, 0, 12)
    assert not share["failures"]
    assert share["verdicts"]["pass"] >= 9
    assert sum(share["verdicts"].values()) == 12
    assert 0.3 < max(ratio for ratio, _ in share["worst"].values()) < LIMIT


def test_the_evidence_would_show_an_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An implementation with a fault fails the run, is counted in the table and listed with a case that fails again."""
    from verikda.case import Case
    from verikda.checks import named
    from verikda.false_alarm import main
    from verikda.run_case import run_case
    from verikda.targets import resolve

    record = str(tmp_path / "shares.jsonl")
    options = ["--dtype", "float32", "--cases", "8", "--json", record]
    assert main(["--target", "zoo:DV_OFF", *options]) == 1
    assert main(["--target", "zoo", *options]) == 0
    assert main(["--target", "zoo", "--seed", "1", *options]) == 0
    capsys.readouterr()
    assert main(["--table", record]) == 1
    rows = capsys.readouterr().out.splitlines()
    healthy, faulty = ([x.strip() for x in rows[i].split("|")[1:-1]] for i in (3, 2))
    assert healthy[:6] == ["zoo:NONE", "float32", "16", "16", "0", "0"]
    assert faulty[:3] == ["zoo:DV_OFF", "float32", "8"]
    assert int(faulty[5]) >= 5
    assert rows[4].startswith("FAIL zoo:DV_OFF float32: dv[")
    case = Case.from_json(rows[5])
    assert run_case(resolve("zoo:DV_OFF"), case, named(("floor",))).verdict == "fail"


def test_a_share_is_the_same_whatever_else_runs() -> None:
    from verikda.false_alarm import run_share

    assert run_share("emulator", None, "float32", 5, 1, 3) == run_share("emulator", None, "float32", 5, 1, 3)
    assert run_share("emulator", None, "float32", 5, 1, 3) != run_share("emulator", None, "float32", 5, 2, 3)
