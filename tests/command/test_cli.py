"""The command line as a user meets it: exit statuses, what is printed, and what is written.

What could go wrong here: a failure reported as success, a record lost or cut off, a traceback in place of a
sentence, escape codes in a pipe, a module of the current folder that is not found.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from command_line import verikda

from verikda import show, targets
from verikda.case import Case
from verikda.cli import main
from verikda.finding import load_case
from verikda.targets import TargetError, resolve
from verikda.zoo.faults import forget

ROOT = Path(__file__).parents[2]
CASE = Case(lengths=(5,), K=3, V=2)
QUICK = ("--cases", "4", "--checks", "floor")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.chdir(tmp_path)


def process(*words: object, module: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-m", "verikda"] if module else []), *(str(w) for w in words)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


def strict(path: Path) -> list[dict[str, Any]]:
    """Lines of a JSON Lines file; the last one must have its end."""
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    refuse = {"parse_constant": lambda literal: pytest.fail(f"{literal} is no JSON")}
    return [json.loads(line, **refuse) for line in text.splitlines()]


def the_finding(folder: str = "verikda-findings") -> Path:
    (path,) = Path(folder).glob("*.json")
    return path


def test_a_healthy_target_passes_and_every_output_has_its_verdict() -> None:
    result = verikda("check", "zoo", "--cases", 4)
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.split()}
    for output in ("o", "ht", "dq", "dk", "dv", "dg", "dbeta"):
        assert rows[output][3] == "pass"
        assert 0 < float(rows[output][2]) <= 4
    assert rows["floor"][1:5] == ["4", "0", "0", "0"]
    assert "pass  zoo:NONE: 4 cases" in result.stdout
    assert not Path("verikda-findings").exists()


def test_a_fault_is_found_written_and_replayed() -> None:
    found = verikda("check", "zoo:DV_OFF", *QUICK)
    assert found.exit_code == 1
    path = the_finding()
    for part in ("FAIL  zoo:DV_OFF", "floor / dv:", "expected", "0x", f"replay: verikda replay {path}"):
        assert part in found.stdout
    assert load_case(path)[1:] == ("zoo:DV_OFF", "floor")
    again = verikda("replay", path)
    assert again.exit_code == 1
    assert "FAIL  zoo:DV_OFF" in again.stdout
    healthy = verikda("replay", path, "zoo")
    assert healthy.exit_code == 0, healthy.output
    assert "pass  zoo:NONE" in healthy.stdout


def test_a_bare_case_needs_a_target() -> None:
    Path("case.json").write_text(CASE.to_json())
    alone = verikda("replay", "case.json")
    assert alone.exit_code == 2
    assert alone.stderr == (
        "verikda: case.json holds a bare case and names no target; say which: verikda replay case.json TARGET\n"
    )
    assert verikda("replay", "case.json", "zoo").exit_code == 0


def test_a_case_that_cannot_tell_is_neither_pass_nor_fail() -> None:
    zero = Case(lengths=(4,), K=2, V=2, value_regime="zero", do_regime="zero")
    Path("case.json").write_text(zero.to_json())
    result = verikda("replay", "case.json", "emulator")
    assert result.exit_code == 2
    assert "inconclusive  emulator" in result.stdout


def test_targets_and_doctor() -> None:
    listed = verikda("targets")
    assert listed.exit_code == 0
    for name in ("verikda", "emulator", "zoo", "transformers", "module:function"):
        assert any(line.split()[:1] == [name] for line in listed.stdout.splitlines())
    for name in targets.BUILT_IN:
        (line,) = (line for line in listed.stdout.splitlines() if line.split()[:1] == [name])
        try:
            resolve(name)
        except TargetError:
            assert line.split()[1] == "no"
        else:
            assert line.split()[1] == "yes"
    healthy = verikda("doctor")
    assert healthy.exit_code == 0
    assert "GPU" in healthy.stdout
    assert "numpy" in healthy.stdout


def test_the_record_is_strict_and_appended() -> None:
    options = ("--checks", "floor", "--json", "new/run.jsonl", "--summary", "new/sum.jsonl")
    assert verikda("check", "zoo:DV_OFF", "--cases", 4, *options).exit_code == 1
    assert verikda("check", "zoo", "--cases", 2, *options).exit_code == 0
    lines = strict(Path("new/run.jsonl"))
    kinds = [line["kind"] for line in lines]
    assert kinds.count("run") == kinds.count("end") == 2
    assert kinds.count("case") == 6
    assert kinds.count("finding") == 1
    assert [line["verdict"] for line in strict(Path("new/sum.jsonl"))] == ["fail", "pass"]
    for line in lines:
        if line["kind"] in ("case", "finding"):
            Case.from_dict(line["case"])
        if line["kind"] == "finding":
            assert load_case(Path(line["file"]))[0] == Case.from_dict(line["case"])


def test_worst_cases_are_kept_and_tried_first() -> None:
    Path("reports/worst").mkdir(parents=True)
    data = {"schema": 1, "target": "zoo", "output": "o", "ratio": 3.5, "case": CASE.to_dict()}
    Path("reports/worst/one.json").write_text(json.dumps(data))
    assert verikda("check", "zoo", "--cases", 1, "--checks", "floor", "--json", "run.jsonl").exit_code == 0
    (line,) = (line for line in strict(Path("run.jsonl")) if line["kind"] == "case")
    assert Case.from_dict(line["case"]) == CASE


def test_piped_output_is_plain_and_errors_go_to_the_other_stream() -> None:
    good = process("check", "zoo", "--cases", 1, "--checks", "floor")
    assert (good.returncode, good.stderr) == (0, "")
    assert "\x1b" not in good.stdout
    assert good.stdout.isprintable() or all(c.isprintable() or c == "\n" for c in good.stdout)
    bad = process("check", "zoo:DV_OF")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "'DV_OF'" in bad.stderr
    assert "DV_OFF" in bad.stderr
    assert bad.stderr.count("\n") == 1


def test_a_function_of_the_current_folder_and_its_standalone_script() -> None:
    pytest.importorskip("torch", reason="the function takes torch tensors")
    shutil.copy(ROOT / "tests/targets/toy_kda.py", "toy.py")
    with Path("toy.py").open("a", encoding="utf-8") as file:
        file.write("\n\ndef too_large(q, k, v, g, beta, initial_state=None, output_final_state=False):\n")
        file.write("    o, ht = chunk_kda(q, k, v, g, beta, None, initial_state, output_final_state)\n")
        file.write("    return o * 1.25, ht\n")
    good = process("check", "toy:chunk_kda", "--cases", 1, "--checks", "floor")
    assert good.returncode == 0, good.stdout + good.stderr
    Path("case.json").write_text(CASE.to_json())
    bad = process("replay", "case.json", "toy:too_large", "--snippet", "show.py")
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert "FAIL  toy:too_large" in bad.stdout
    script = process("show.py", module=False)
    assert script.returncode == 1, script.stdout + script.stderr
    assert "FAIL o: " in script.stdout
    assert "FAIL: o" in script.stderr
    healthy = process("replay", "case.json", "toy:chunk_kda", "--snippet", "show.py")
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    script = process("show.py", module=False)
    assert script.returncode == 0, script.stderr
    assert script.stdout.endswith("\nPASS\n")


@pytest.mark.parametrize(
    ("words", "title", "total"),
    [
        (("check", "zoo", *QUICK), "zoo:NONE", 4),
        (("check", "zoo", *QUICK, "--jobs", 2), "zoo:NONE", 4),
        (("zoo", "zoo", "--fault", "DV_OFF", "--fault", "DG_OFF"), "zoo:NONE", 2),
    ],
)
def test_a_pipe_is_told_how_far_it_is(
    words: tuple[object, ...], title: str, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def progress() -> list[str]:
        lines = verikda(*words).stdout.splitlines()
        return [line.partition(" after ")[0] for line in lines if line.endswith(" s") and " after " in line]

    monkeypatch.setattr("verikda.show.EVERY", 3600.0)
    assert not progress(), "it ends sooner"
    monkeypatch.setattr("verikda.show.EVERY", 0.0)
    assert progress() == [f"{title}: {i + 1} of {total}" for i in range(total)]


def test_ctrl_c_before_the_first_result_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*args: object, **options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("verikda.checking.check_command", press)
    result = verikda("check", "zoo")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "verikda: interrupted before there was anything to tell\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("option", ["--json", "--summary"])
def test_a_disk_that_is_full_is_told_with_the_option(option: str) -> None:
    done = process("check", "zoo", *QUICK, option, "/dev/full")
    assert done.returncode == 2
    assert done.stderr == f"verikda: {option} /dev/full: No space left on device\n"


def test_cases_that_a_check_other_than_floor_judged_are_counted() -> None:
    result = verikda("check", "zoo", "--cases", 4, "--checks", "v_first,repeat")
    (line,) = (x for x in result.stdout.splitlines() if x.split()[:1] == ["dv"])
    assert line.split()[1] == "4"


def test_two_processes_share_the_cases_of_one() -> None:
    options = ("--checks", "floor", "--cases", 6, "--json")
    assert verikda("check", "zoo", *options, "one.jsonl").exit_code == 0
    shared = verikda("check", "zoo", *options, "two.jsonl", "--jobs", 2)
    assert shared.exit_code == 0, shared.output
    assert "pass  zoo:NONE: 6 cases" in shared.stdout
    one, two = ([x for x in strict(Path(p)) if x["kind"] == "case"] for p in ("one.jsonl", "two.jsonl"))
    both = [{Case.from_dict(x["case"]): (x["verdict"], x["ratios"]) for x in lines} for lines in (one, two)]
    assert both[0] == both[1]
    assert len(both[0]) == 6


def test_brackets_of_an_extra_reach_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verikda[cuda13]` in a table is text, not a style."""
    from verikda import doctor

    probes = (("GPU", "kernels", lambda: "no: pip install 'verikda[cuda13]'"),)
    monkeypatch.setattr(doctor, "PROBES", probes)
    result = CliRunner().invoke(main, ["doctor"])
    assert "verikda[cuda13]" in result.output


DECLARED = """
from toy_kda import chunk_kda as healthy


def plain(q, k, v, g, beta):
    return healthy(q, k, v, g, beta)[0]


def declares(q, k, v, g, beta):
    return healthy(q, k, v, g, beta)[0]


declares.verikda_contract = "float32"
"""


@pytest.mark.parametrize(
    ("target", "options", "judged", "default"),
    [
        ("own:plain", (), {"storage-bfloat16", "storage-float16", "float32"}, True),
        ("own:plain", ("--contract", "recurrent32"), {"float32-recurrent"}, False),
        ("own:declares", (), {"float32"}, False),
        ("zoo", (), {"storage-bfloat16", "storage-float16", "float32"}, False),
    ],
)
def test_what_a_target_is_judged_under_is_said(
    target: str, options: tuple[str, ...], judged: set[str], default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target != "zoo":
        pytest.importorskip("torch", reason="the function takes torch tensors")
    monkeypatch.syspath_prepend(ROOT / "tests/targets")
    monkeypatch.syspath_prepend(Path.cwd())
    Path("own.py").write_text(DECLARED)
    sys.modules.pop("own", None)
    result = verikda("check", target, "--cases", 12, "--checks", "floor", "--summary", "sum.jsonl", *options)
    assert result.exit_code == 0, result.output
    (ran,) = (line for line in result.stdout.splitlines() if line.startswith("ran ("))
    said = ran.partition("; judged under ")[2]
    assert {part.split(" (")[0] for part in said.split(", ")} == judged
    assert ("declares no contract, so it is judged under storage16" in result.stdout) == default
    assert ("token by token can fail under any but recurrent32" in result.stdout) == default
    (line,) = strict(Path("sum.jsonl"))
    (counts,) = line["contracts"].values()
    assert set(counts) == judged
    assert sum(counts.values()) == 12
    Path("case.json").write_text(CASE.to_json())
    again = verikda("replay", "case.json", target, *options)
    assert any(f"; judged under {name}\n" in again.stdout for name in judged)


def test_a_name_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    show.console().print("mymodule:bug: 60 cases")
    assert capsys.readouterr().out.startswith("mymodule:bug: 60 cases")
