"""Evidence from a GPU: its state is told apart by the hash of the sources, and each item sees the fault it is for."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from kernels_cuda.sources import source_hash
from verikda import evidence
from verikda import evidence_items as items
from verikda.evidence import CHANGED, ITEMS, NEVER, SANITIZERS, item_command, proven, run_item


def write(folder: Path, verdicts: dict[str, str], *, kernels: str | None = None, time: str = "2026-01-01T00:00:00",
          file: str = "evidence.jsonl") -> None:  # fmt: skip
    with (folder / file).open("a") as out:
        for item, verdict in verdicts.items():
            line = {"kind": "evidence", "item": item, "verdict": verdict, "kernels": kernels or source_hash(),
                    "device": "NVIDIA H200", "time": time}  # fmt: skip
            out.write(json.dumps(line) + "\n")


ALL = dict.fromkeys(ITEMS, "pass")


def test_proven_changed_and_never_are_told_apart(tmp_path: Path) -> None:
    assert proven(tmp_path) == NEVER == "never run on a GPU"
    assert proven(tmp_path / "missing") == NEVER
    write(tmp_path, ALL, kernels="0" * 16)
    assert proven(tmp_path) == CHANGED == "kernels changed since the last GPU run: unproven"
    write(tmp_path, ALL, file="later.json", time="2026-01-02T00:00:00")
    assert proven(tmp_path) == "proven on NVIDIA H200"


def test_other_records_are_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "bench.jsonl").write_text(json.dumps({"kind": "bench", "kernels": source_hash()}) + "\n[1]\nnot JSON\n")
    assert proven(tmp_path) == NEVER


@pytest.mark.parametrize("verdict", ["fail", "not run"])
def test_a_failure_and_an_item_left_out_prove_nothing(tmp_path: Path, verdict: str) -> None:
    write(tmp_path, {**ALL, "repeat": verdict})
    assert proven(tmp_path) == f"unproven: repeat {verdict}"
    write(tmp_path, {"repeat": "pass"}, time="2026-01-02T00:00:00")
    assert proven(tmp_path) == "proven on NVIDIA H200"


def test_a_later_failure_counts_wherever_it_is_written(tmp_path: Path) -> None:
    write(tmp_path, ALL, file="z.jsonl")
    write(tmp_path, {"graph": "fail"}, file="a.jsonl", time="2026-01-02T00:00:00")
    assert proven(tmp_path) == "unproven: graph fail"


def test_a_missing_item_proves_nothing(tmp_path: Path) -> None:
    write(tmp_path, {n: v for n, v in ALL.items() if n != "large"})
    assert proven(tmp_path) == "unproven: large missing"


def test_one_changed_byte_of_a_kernel_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels_cuda import sources

    write(tmp_path, ALL)
    root = tmp_path / "kernels"
    shutil.copytree(sources.ROOT, root, ignore=shutil.ignore_patterns("__pycache__"))
    for name, path in (("ROOT", root), ("INCLUDE", root / "include"), ("HOST", root / "host")):
        monkeypatch.setattr(sources, name, path)
    assert proven(tmp_path) == "proven on NVIDIA H200"
    with (root / "state.cu").open("a") as out:
        out.write(" ")
    assert proven(tmp_path) == CHANGED


def test_the_doctor_shows_it() -> None:
    from verikda.doctor import PROBES

    assert [find() for what, _, find in PROBES if what == "GPU evidence"] == [proven()]


def test_the_repository_says_one_of_the_known_sentences() -> None:
    said = proven()
    assert said in (NEVER, CHANGED) or said.startswith(("proven on NVIDIA", "unproven: "))


def test_a_process_that_hangs_dies_or_says_nothing_is_a_failure() -> None:
    def python(code: str, limit: float = 30) -> dict[str, Any]:
        return run_item("graph", [sys.executable, "-c", code], limit)

    assert python("import time; time.sleep(60)", 0.5)["says"] == "did not end within 0.5 s"
    assert python("import os; os.abort()")["verdict"] == "fail"
    assert python("raise SystemExit('lost the device')")["says"] == "ended with status 1: lost the device"
    assert python("pass")["verdict"] == "fail"
    good = 'print("noise"); print(\'{"verdict": "pass", "says": "s", "numbers": {}}\'); print("more")'
    assert python(good) == {"verdict": "pass", "says": "s", "numbers": {}}


def test_what_an_item_has_started_ends_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    starts = (
        "import pathlib, subprocess, sys\n"
        "started = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(started.pid))\n"
        "started.wait()"
    )
    assert run_item("graph", [sys.executable, "-c", starts], 5)["says"] == "did not end within 5 s"
    last = monotonic() + 30
    while words_of(pid.read_text()):
        assert monotonic() < last, "it is left behind"


def words_of(pid: str) -> bytes:
    """The command line of a process; one that has ended has none."""
    with suppress(OSError):
        return Path("/proc", pid, "cmdline").read_bytes()
    return b""


def test_every_item_has_a_title_a_limit_and_a_function() -> None:
    assert set(ITEMS) - set(SANITIZERS) | {"cover"} == set(items.RUN)
    assert all(item_command(item)[-1] in items.RUN for item in ITEMS)


def test_a_sanitizer_that_finds_errors_or_is_missing_is_told_apart() -> None:
    report = (
        "print('========= COMPUTE-SANITIZER\\n========= Invalid __global__ read of size 4 bytes'); raise SystemExit(9)"
    )
    found = run_item("memcheck", [sys.executable, "-c", report], 30)
    assert (found["verdict"], found["says"]) == ("fail", "memcheck found: Invalid __global__ read of size 4 bytes")
    missing = run_item("memcheck", ["no-such-sanitizer"], 30)
    assert missing["verdict"] == "not run"
    assert "no-such-sanitizer is not installed" in missing["says"]


def test_cover_sees_a_kernel_that_no_call_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from verikda.ops import engine

    monkeypatch.setattr(engine, "backend", cache(engine.backend.__wrapped__))  # nothing launched before counts
    first = next(iter(items.covering_cases(("bfloat16",))))
    passed, says, numbers = items.cover(None, "host", [first])
    assert not passed
    assert "never launched: " in says
    assert "clear_tail" in says
    assert numbers["calls"] == 1


class Gpu:
    """A torch with a GPU, as far as `main` asks."""

    class cuda:  # noqa: N801
        @staticmethod
        def get_device_name() -> str:
            return "NVIDIA H200"


@pytest.mark.parametrize(("verdict", "status"), [("pass", 0), ("fail", 1), ("not run", 2)])
def test_each_item_prints_and_records_one_line(
    verdict: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from verikda import bench

    monkeypatch.setattr(bench, "cuda_torch", lambda: Gpu)
    results = {n: {"verdict": "pass", "says": "fine", "numbers": {"x": 1}} for n in ITEMS} | {
        "large": {"verdict": verdict, "says": "why", "numbers": {}}
    }
    monkeypatch.setattr(evidence, "run_item", results.__getitem__)
    assert evidence.main(["--json", str(tmp_path / "e.jsonl")]) == status
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(ITEMS)
    assert printed[0] == f"PASS {ITEMS['long'][0]}: fine"
    assert printed[2].startswith({"pass": "PASS ", "fail": "FAIL ", "not run": "not run: "}[verdict])
    assert "why" in printed[2]
    lines = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert [(x["item"], x["kernels"], x["device"]) for x in lines] == [(n, source_hash(), "NVIDIA H200") for n in ITEMS]
    assert all("versions" in x["environment"] for x in lines)
    assert (proven(tmp_path) == "proven on NVIDIA H200") is (status == 0)


def test_unknown_items_and_no_gpu_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        evidence.main(["--items", "nothing"])
    assert stopped.value.code == 2
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        assert evidence.main([]) == 2
        assert "needs a CUDA GPU" in capsys.readouterr().err


def test_bits_are_compared_not_values() -> None:
    torch = pytest.importorskip("torch")
    nan = torch.tensor([float("nan"), 0.0])
    assert items.same_bits(torch, nan, nan.clone())
    assert not items.same_bits(torch, torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not items.same_bits(torch, torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    assert not items.same_bits(torch, torch.zeros(2), torch.zeros(3))
    assert items.different(torch, {"a": nan}, {"a": nan, "b": nan}) == ["b"]


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plant a fault in what the items call: `planted(change)` runs `change(o, state, given)` on every result."""
    import verikda

    def plant(change: Any) -> None:
        from test_bench import recurrence

        def faulty(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
            return change(*recurrence(q, k, v, g, beta, **options), q)

        monkeypatch.setattr(verikda, "chunk_kda", faulty, raising=False)

    return plant


def test_long_sees_errors_at_the_end(planted: Any) -> None:
    torch = pytest.importorskip("torch")
    planted(lambda o, S, q: (o, S))
    passed, says, numbers = items.long(torch, "cpu", 1100)
    assert passed, says
    assert "o of the last 1024" in numbers
    planted(lambda o, S, q: (torch.cat([o[:, :-400], 1.05 * o[:, -400:]], 1), S))
    assert not items.long(torch, "cpu", 1100)[0]


def test_large_sees_a_sample_that_is_elsewhere(planted: Any) -> None:
    torch = pytest.importorskip("torch")
    planted(lambda o, S, q: (o, S))
    sizes = {"T": 9, "H": 3, "K": 16}
    assert items.large(torch, "cpu", **sizes)[0]

    def lost(o: Any, S: Any, q: Any) -> Any:
        o = o.clone()
        if o.shape[0] > 1:
            o[-1, -1, -1] = o[0, -1, -1]
        return o, S

    planted(lost)
    passed, says, _ = items.large(torch, "cpu", **sizes)
    assert not passed
    assert "o of sample 1, head 2" in says
    planted(lambda o, S, q: (o * 0, S))
    assert not items.large(torch, "cpu", **sizes)[0]


def test_repeat_sees_one_bit_in_one_call(planted: Any) -> None:
    torch = pytest.importorskip("torch")
    calls = {"n": 0}

    def flips(o: Any, S: Any, q: Any) -> Any:
        calls["n"] += 1
        return (o + (2.0**-6 if calls["n"] == 9 else 0.0) * (torch.arange(o.shape[1]) == 4)[:, None, None], S)

    planted(lambda o, S, q: (o, S))
    assert items.repeat(torch, "cpu", (1, 8, 1), 5)[0]
    planted(flips)
    passed, says, numbers = items.repeat(torch, "cpu", (1, 8, 1), 5)
    assert not passed
    assert numbers["differing"] == {"another stream busy": 1}, says
