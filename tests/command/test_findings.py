"""Files and messages: a finding read back is the same, a record is strict JSON Lines, a corpus only grows."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from verikda.case import Case
from verikda.checking import replay_command
from verikda.checks import named
from verikda.checks.base import Failure, Outcome
from verikda.finding import Finding, hex_of, load_case, message
from verikda.inputs import make_call
from verikda.record import Record, case_line
from verikda.run_case import CaseReport, run_case
from verikda.snippet import write_snippet
from verikda.status import FAIL
from verikda.targets import resolve
from verikda.worst import Corpus
from verikda.zoo.faults import Fault, forget
from verikda.zoo.target import ZooTarget

CASE = Case(lengths=(5,), K=3, V=2, overrides=(("g", 0, -math.inf),))
FAILURE = Failure("floor", "dq", "dq[0, 1, 0, 2] is off", (0, 1, 0, 2), 1.0, math.nan, "bfloat16", math.inf)


def finding(**changes: object) -> Finding:
    return replace(Finding("zoo:DQ_OFF", "floor", CASE, True, (FAILURE,), CASE, "ran here"), **changes)


def test_a_finding_is_strict_json_and_its_case_comes_back(tmp_path: Path) -> None:
    path = finding().write(tmp_path)
    data = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert data["failures"][0]["expected"] == {"value": "1.0", "hex": "0x3f80"}
    assert data["failures"][0]["actual"]["value"] == "nan"
    assert load_case(path) == (CASE, "zoo:DQ_OFF", "floor")
    assert finding().write(tmp_path) == path
    assert finding(case=Case()).write(tmp_path) != path


def test_the_message_says_what_where_how_much_and_how_to_run_it_again() -> None:
    text = message("zoo:DQ_OFF", (FAILURE,), CASE, "verikda replay x.json")
    for part in ("FAIL  zoo:DQ_OFF", "floor / dq", "[0, 1, 0, 2]", "expected 1 (bfloat16 0x3f80)", "got nan",
                 "noise floor = inf", "T=5", "K=3 V=2", "replay: verikda replay x.json"):  # fmt: skip
        assert part in text
    assert "and 3 more" in message("t", (FAILURE,) * 9, CASE, "r")


@pytest.mark.parametrize(
    ("minimal", "words"),
    [(True, "  smallest case: kda"), (False, "  case (not shrunk to the end): kda"), (None, "  case: kda")],
)
def test_a_case_is_called_the_smallest_only_where_it_was_shrunk(minimal: bool | None, words: str) -> None:
    assert words in message("t", (FAILURE,), CASE, "r", minimal=minimal)


def test_replay_does_not_call_its_case_the_smallest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "case.json"
    path.write_text(Case(lengths=(5,)).to_json())
    assert replay_command(path, "zoo:DV_OFF", None, None) == FAIL
    assert "  case: kda" in capsys.readouterr().out


def test_bits_of_a_number_outside_its_dtype_are_marked() -> None:
    assert hex_of(1.0, "float32") == "0x3f800000"
    assert hex_of(1.0 + 2**-40, "float32") == "~0x3f800000"


@pytest.mark.parametrize(
    "left", ["", '{"sch', '{"schema": 1, "kind": "case", "case": {"K"', '{"schema": 1, "kind": "b"}']
)
def test_a_half_written_last_line_costs_no_other_line(tmp_path: Path, left: str) -> None:
    """A run was killed while it wrote; the next one appends to its file."""
    for before in ("", '{"schema": 1, "kind": "a"}\n'):
        path = tmp_path / f"run{len(before)}.jsonl"
        path.write_text(before + left)
        record = Record(path)
        record.write({"kind": "c"})
        record.close()
        kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
        assert kinds == ["a"] * bool(before) + ["b"] * left.endswith("}") + ["c"]


def test_the_record_is_appended_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    outcome = Outcome("floor", "fail", (FAILURE,), {"dq": math.inf, "o": 0.5}, "why")
    report = CaseReport(CASE, (outcome,), {}, "ran", 3, 0.25)
    for _ in range(2):
        record = Record(path)
        record.write({"kind": "run"})
        record.write(case_line(report))
        record.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "case"] * 2
    assert all(line["schema"] == 1 for line in lines)
    assert lines[1]["ratios"]["floor"] == {"dq": "inf", "o": 0.5}
    assert Case.from_dict(lines[1]["case"]) == CASE


def test_a_line_is_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    record = Record(tmp_path / "run.jsonl")
    record.write({"kind": "run"})
    assert (tmp_path / "run.jsonl").read_text().endswith("\n")


def report_of(case: Case, ratio: float, verdict: str = "pass") -> CaseReport:
    return CaseReport(case, (Outcome("floor", verdict, (), {"dg": ratio}),), {}, "", 1, 0.1)


def test_the_corpus_grows_by_records_only_and_comes_back_worst_first(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    first, second = Case(lengths=(2,)), Case(lengths=(3,))
    assert not corpus.offer("t", report_of(first, 1.2))
    assert corpus.offer("t", report_of(first, 1.6))
    assert not corpus.offer("t", report_of(second, 1.9))
    assert corpus.offer("t", report_of(second, 2.1))
    assert not corpus.offer("t", report_of(Case(lengths=(4,)), 50.0, "fail"))
    assert corpus.offer("t", report_of(replace(first, dtype="float16"), 1.6))
    again = Corpus(tmp_path)
    assert again.cases()[0] == second
    assert len(again.cases()) == 3 == len(list(tmp_path.glob("*.json")))


def test_a_corpus_without_a_folder_writes_nothing() -> None:
    assert not Corpus(None).offer("t", report_of(CASE, 3.0))


def test_loading_a_case_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "evil.json"
    evil = json.loads(finding().to_json())
    evil["target"] = "os:system"
    path.write_text(json.dumps(evil))
    case, target, _ = load_case(path)
    assert (case, target) == (CASE, "os:system")  # named, neither imported nor called


CHANGED = """
import functools
import torch
import toy_kda


def changed(f):
    @functools.wraps(toy_kda.chunk_kda)
    def chunk_kda(*given, **named):
        return f(*toy_kda.chunk_kda(*given, **named))
    return chunk_kda


def steep(o, ht):
    o = o.clone()
    if o.requires_grad:
        o.register_hook(lambda d: 1.25 * d)
    return o, ht


def unwritten(o, ht):
    whole = o.new_empty_strided(o.shape, o.stride())  # where rows were right a moment ago
    whole[:, :-1] = o[:, :-1]
    return whole, ht


def crash(o, ht):
    raise RuntimeError("no such kernel")


healthy = changed(lambda o, ht: (o, ht))
large = changed(lambda o, ht: (o * 1.25, ht))
state = changed(lambda o, ht: (o, ht + 0.1))
nan = changed(lambda o, ht: (torch.where(o > 0, torch.nan, o), ht))
gradients = changed(steep)
leaves_a_row = changed(unwritten)
crashes = changed(crash)
more = changed(lambda o, ht: (o, ht, None, 1))
listed = changed(lambda o, ht: [o, ht])
"""


@pytest.mark.parametrize(
    "name", ["healthy", "large", "state", "nan", "gradients", "leaves_a_row", "crashes", "more", "listed"]
)
def test_a_standalone_script_judges_as_the_floor_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="the script calls a torch function")
    toy = Path(__file__).parents[1] / "targets"
    monkeypatch.syspath_prepend(toy)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "changed_kda.py").write_text(CHANGED)
    sys.modules.pop("changed_kda", None)
    target = resolve(f"changed_kda:{name}")
    case = Case(lengths=(6, 9), packed=True, K=3, V=2, h0="random", dht=True, gate_in_kernel=True, A_log=True,
                state_v_first=True)  # fmt: skip
    script = tmp_path / "show.py"
    write_snippet(script, target, make_call(case), f"changed_kda:{name}")
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, check=False,
        env={**os.environ, "PYTHONPATH": str(toy)},
    )  # fmt: skip
    floor = run_case(target, case, named(("floor",)))
    assert run.returncode == (floor.verdict == "fail") == (name not in ("healthy", "more", "listed")), (
        run.stdout + run.stderr
    )
    if name == "crashes":
        assert run.stderr.endswith("RuntimeError: no such kernel\n")
        return
    judged = {line.split()[1].rstrip(":"): line for line in run.stdout.splitlines() if line[4:5] == " " and ":" in line}
    ratios = floor.outcomes[0].ratios
    assert set(ratios) <= set(judged)
    for output, line in judged.items():
        assert line.startswith("FAIL" if output in {f.output for f in floor.failures} else "PASS")
        ratio = float(line.partition("block = ")[2].partition(",")[0])
        assert ratio == pytest.approx(ratios[output], rel=0.5)  # here by more runs
    assert "np.float" not in run.stdout


def test_replay_of_a_finding_fails_on_the_faulty_target_and_passes_on_the_healthy_one() -> None:
    forget()
    case = Case(lengths=(5,), K=3, V=2)
    assert run_case(ZooTarget(Fault.DV_OFF), case).verdict == "fail"
    assert run_case(ZooTarget(), case).verdict == "pass"
