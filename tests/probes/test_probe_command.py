"""`verikda probe` as a user meets it: exit statuses, tables, the record, findings, and Ctrl-C.

What could go wrong here: a failing probe that exits with 0, a record lost by Ctrl-C, a finding that does not replay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import verikda
from losing import LOST, Losing

from verikda.call import Call
from verikda.choose import choose_listed
from verikda.finding import load_case
from verikda.probes import command
from verikda.probes.frontier import Frontier, frontier
from verikda.targets.base import Target, TargetError
from verikda.zoo.faults import Fault, forget
from verikda.zoo.target import ZooTarget


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dtype and chunk size, and small pools: the command is tested here, not the probes."""

    def some(target: Target, seed: int = 0) -> Iterator[Frontier]:
        for kind in ("constant", "reset"):
            found = frontier(target, kind, "float32", 64, seed)
            assert found is not None
            yield found

    monkeypatch.setattr(command, "frontiers", some)
    monkeypatch.setattr(
        command, "run_pool", lambda target, seed: command_run_pool(target, seed=seed, examples=6, steps=5, shrink=False)
    )


command_run_pool = command.run_pool


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.usefixtures("_few")
def test_a_healthy_target_passes_every_probe() -> None:
    result = verikda("probe", "zoo", "--tokens", "128", "--json", "a.jsonl")
    assert result.exit_code == 0, result.output
    for part in ("none up to 1000", "1.39", "2.77", "yes", "flat", "pass  zoo:NONE: frontier, drift, pool"):
        assert part in result.output
    record = lines("a.jsonl")
    assert [x["kind"] for x in record[:3]] == ["run", "frontier", "frontier"]
    assert {x["kind"] for x in record} == {"run", "frontier", "drift", "pool", "end"}
    assert record[-1] == {"schema": 1, "kind": "end", "verdict": "pass", "interrupted": False}
    assert record[0]["settings"] == {"probes": ["frontier", "drift", "pool"], "seed": 0, "tokens": 128}
    assert not Path("verikda-findings").exists()


@pytest.mark.usefixtures("_few")
def test_a_frontier_ends_with_a_finding_that_replays() -> None:
    result = verikda("probe", "zoo:ANCHOR_CHUNK_START", "--only", "frontier", "--json", "a.jsonl")
    assert result.exit_code == 1
    assert "as if anchored at start" in result.output
    file = next(x["file"] for x in lines("a.jsonl") if x["kind"] == "finding")
    assert f"verikda replay {file}" in result.output
    case, target, check = load_case(Path(file))
    assert (target, check, case.gate_regime) == ("zoo:ANCHOR_CHUNK_START", "floor", "bound")
    assert 1.3 < case.gate_magnitude < 1.5
    assert verikda("replay", file).exit_code == 1
    assert verikda("replay", file, "zoo").exit_code == 0


@pytest.mark.usefixtures("_few")
def test_a_replay_line_is_one_line_however_long_its_path() -> None:
    folder = "f" * 150
    result = verikda("probe", "zoo:ANCHOR_CHUNK_START", "--only", "frontier", "--findings", folder)
    (file,) = Path(folder).glob("*.json")
    assert f"  replay: verikda replay {file}" in result.output.splitlines()


@pytest.mark.usefixtures("_few")
def test_a_pool_ends_with_the_steps() -> None:
    result = verikda("probe", "zoo:STATE_IN_PLACE", "--only", "pool", "--json", "a.jsonl")
    assert result.exit_code == 1
    assert "the pool is wrong after" in result.output
    assert "the call changed h0" in result.output
    pool = next(x for x in lines("a.jsonl") if x["kind"] == "pool")
    assert pool["steps"][0].startswith("start: ")
    assert pool["check"] == "inputs_unchanged"
    assert (pool["verdict"], pool["repeats"]) == ("fail", True)


def test_a_drift_is_told_with_its_window() -> None:
    result = verikda("probe", "zoo:STATE_WINDOW_RESTARTS", "--only", "drift", "--tokens", "576", "--json", "a.jsonl")
    assert result.exit_code == 1
    assert "times the noise floor in tokens" in result.output
    assert '"lengths": [576]' in result.output
    drifts = [x for x in lines("a.jsonl") if x["kind"] == "drift"]
    assert {x["dtype"] for x in drifts} == {"float16", "bfloat16", "float32"}
    assert all(len(x["ratios"]) == 16 for x in drifts if x["output"] == "o")


def test_ctrl_c_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(target: Target, seed: int = 0) -> Iterator[Frontier]:
        found = frontier(target, "reset", "float32", 16, seed)
        assert found is not None
        yield found
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "frontiers", interrupted)
    result = verikda("probe", "zoo", "--json", "a.jsonl")
    assert result.exit_code == 0
    assert "pass  zoo:NONE: frontier, drift, pool (interrupted)" in result.output
    assert "reset" in result.output
    assert [x["kind"] for x in lines("a.jsonl")] == ["run", "frontier", "end"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("probe", "nope"), "verikda: target 'nope' is not known"),
        (("probe", "zoo", "--only", "drif"), "there is no probe 'drif'; the probes are frontier, drift, pool"),
        (("probe", "zoo", "--only", ","), "--only names no probe; give one or more of frontier, drift, pool"),
        (("probe", "zoo", "--tokens", "3"), "3 is not in the range x>=64"),
    ],
)
def test_unusable_input_is_one_line(words: tuple[str, ...], message: str) -> None:
    result = verikda(*words)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_the_order_of_probes_is_fixed() -> None:
    assert choose_listed("--only", "probe", command.PROBES, "pool, frontier") == ("frontier", "pool")
    assert choose_listed("--only", "probe", command.PROBES, None) == ("frontier", "drift", "pool")


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize("only", ["frontier", "drift", "pool"])
def test_a_call_that_ends_the_cuda_context_is_told_and_fails(only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "resolve", lambda name, contract=None: Losing(lambda call, n: n == 1))
    result = verikda("probe", "zoo", "--only", only, "--json", "p.jsonl", "--tokens", "64")
    assert result.exit_code == 1, result.output
    said = " ".join(result.output.split())
    assert "a call ended the CUDA context (" in said
    assert f"{LOST}; nothing can be run after it in this process" in said
    kinds = {line["kind"]: line for line in lines("p.jsonl")}
    assert LOST in kinds["lost"]["detail"]
    assert kinds["end"]["verdict"] == "fail"


def test_a_target_that_cannot_be_called_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(ZooTarget):
        def run(self, call: Call) -> Any:
            raise TargetError("the card was taken out")

    monkeypatch.setattr(command, "resolve", lambda name, contract=None: Gone(Fault.NONE))
    result = verikda("probe", "zoo", "--only", "drift", "--tokens", "64")
    assert (result.exit_code, "the card was taken out" in result.output) == (2, True)
