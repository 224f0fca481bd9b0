"""A whole bench on the CPU: verdicts, records, files and what is said, on a clock that the calls advance."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")

import torch
from test_bench import H200, delta, fused, late, recurrence
from test_bench_clocks import FakeCuda

from verikda.bench import check, command, peers, run
from verikda.bench import workloads as shapes
from verikda.bench.gpu import REPEATS
from verikda.bench.output import markdown, write_pytest_benchmark
from verikda.bench.peers import JaxRunner, Peer, TorchRunner
from verikda.bench.rows import Row, Timing, compare
from verikda.bench.workloads import Workload
from verikda.cli import main

FUNCTIONS = {"fast": recurrence, "slow": recurrence, "fused": fused, "none": delta}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Torch with that torch.cuda, small channels, one thread instead of processes."""
    monkeypatch.setattr(shapes, "DEVICE", "cpu")
    monkeypatch.setattr(shapes, "L2_BYTES", 1)
    monkeypatch.setattr(shapes, "K", 8)
    monkeypatch.setattr(shapes, "V", 8)
    monkeypatch.setenv("VERIKDA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run, "pool_of", lambda jobs: ThreadPoolExecutor(1))
    monkeypatch.setattr(run, "measure_device", lambda torch: H200)
    made = types.SimpleNamespace(
        cuda=FakeCuda(tick=0.5),
        **{n: getattr(torch, n) for n in ("Generator", "randn", "bfloat16", "float32", "nn", "no_grad")},
    )
    made.autograd, made.tensor = torch.autograd, torch.tensor
    monkeypatch.setattr(command, "cuda_torch", lambda: made)
    run.small_verdict.__globals__["small_call"].cache_clear()
    yield made
    run.small_verdict.__globals__["small_call"].cache_clear()


def peer(name: str, change: Any = None, **more: Any) -> Peer:
    judged = {"fast": "test_bench:recurrence", "fused": "test_bench:fused", "none": "test_bench:delta"}

    def make(torch: Any, w: Workload) -> TorchRunner:
        return TorchRunner(torch, change or FUNCTIONS[w.gates], {})

    return Peer(name, judged, make, **more)  # type: ignore[arg-type]


def bench(arguments: list[str], monkeypatch: pytest.MonkeyPatch, *given: Peer) -> Any:
    monkeypatch.setattr(peers, "PEERS", {p.name: p for p in given})
    return CliRunner().invoke(main, ["bench", *arguments])


def test_every_kind_and_mode_is_checked_timed_and_written(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "out" / name for name in ("b.jsonl", "b.md", "b.json")]
    options = ["--json", str(files[0]), "--summary", str(files[1]), "--benchmark-json", str(files[2])]
    kinds = ["--kinds", "fast", "--kinds", "fused", "--kinds", "none"]
    shape = ["--shapes", "1,24,2", *kinds]
    given = (peer("a"), peer("b", forward_only=("fused",)))
    result = bench([*shape, *options], monkeypatch, *given)
    assert result.exit_code == 0, result.output
    first, *rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert (first["kind"], first["device"], first["bandwidth"]) == ("bench", "NVIDIA H200", 4.3e12)
    assert [(r["target"], r["workload"]["gates"]) for r in rows] == [
        (t, g) for g in ("fast", "fused", "none") for t in ("a", "b")
    ]
    for r in rows:
        only = r["target"] == "b" and r["workload"]["gates"] == "fused"
        assert list(r["times"]) == (["forward"] if only else ["forward", "backward", "forward+backward"])
        assert ("dq" in r["errors"]) != only
        assert (r["reason"], r["floor_verdict"][:4]) == ("", "pass")
        for t in r["times"].values():
            assert (t["method"], t["median"], t["events"], t["peak"]) == ("graph", 750.0, 500.0, 7_000_000)
            assert t["wall"] > 0
            assert t["floor"] > 0
    text = files[1].read_text()
    assert text.count("| 750 (750 to 750) |") == 3 * 3 * 2 - 2
    stored = json.loads(files[2].read_text())
    assert len(stored["benchmarks"]) == 3 * 3 * 2 - 2
    one = stored["benchmarks"][0]
    assert (one["name"], one["stats"]["median"], one["stats"]["rounds"]) == (
        "a[KDA, fast gates 1,24,2 forward]",
        750e-6,
        REPEATS,
    )
    earlier = files[2].with_name("earlier.json")
    earlier.write_text(files[2].read_text())
    shown = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "compare", str(earlier), str(files[2])],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "a[KDA, fast gates 1,24,2 forward]" in shown.stdout


def test_what_cannot_be_captured_is_timed_by_events(fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake.cuda.captures = False
    path = tmp_path / "b.jsonl"
    options = ["--shapes", "1,24,2", "--kinds", "fast", "--modes", "backward", "--json", str(path)]
    assert bench(options, monkeypatch, peer("a")).exit_code == 0
    (row,) = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert list(row["times"]) == ["backward"]
    found = row["times"]["backward"]
    assert (found["method"], found["median"]) == ("events (RuntimeError under capture)", 500.0)


def test_what_is_wrong_refuses_crashes_or_is_not_here(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def crash(**given: Any) -> Any:
        raise RuntimeError("illegal memory access\nmore")

    def absent(torch: Any, w: Workload) -> Any:
        raise ImportError("no module named nowhere")

    missing = Peer("missing", {"fast": "test_bench:recurrence"}, absent)
    delta_only = Peer("delta", {"none": "test_bench:delta"}, absent)
    given = (peer("late", late), peer("crash", crash), missing, delta_only, peer("right"))
    path = tmp_path / "b.jsonl"
    options = ["--shapes", "1,24,2", "--kinds", "fast", "--modes", "forward", "--json", str(path)]
    result = bench(options, monkeypatch, *given)
    assert result.exit_code == 1
    rows = {r["target"]: r for r in map(json.loads, path.read_text().splitlines()) if r["kind"] == "timing"}
    assert rows["late"]["reason"].startswith("wrong: relative L2 against float64 of o without gradients 0.0")
    assert rows["crash"]["reason"] == "crashed: RuntimeError: illegal memory access"
    assert rows["missing"]["reason"] == "not here: no module named nowhere"
    assert rows["delta"]["reason"] == "not supported: KDA, fast gates"
    assert [t for t, r in rows.items() if r["times"]] == ["right"]
    assert "- crash, KDA, fast gates 1,24,2: crashed: RuntimeError" in result.output
    path.unlink()
    assert bench([*options, "--also-wrong"], monkeypatch, *given).exit_code == 1
    rows = {r["target"]: r for r in map(json.loads, path.read_text().splitlines()) if r["kind"] == "timing"}
    assert [t for t, r in rows.items() if r["times"]] == ["late", "right"]
    assert rows["late"]["reason"].startswith("wrong: relative L2")


def test_a_crash_while_timing_costs_that_target_only(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Full(TorchRunner):
        def backward(self, x: Any) -> Any:
            raise RuntimeError("out of memory")

    full = Peer("full", {"fast": "test_bench:recurrence"}, lambda torch, w: Full(torch, recurrence, {}))
    path = tmp_path / "b.jsonl"
    result = bench(["--shapes", "1,24,2", "--kinds", "fast", "--json", str(path)], monkeypatch, full, peer("a"))
    assert result.exit_code == 1
    first, second = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert (list(first["times"]), list(second["times"])) == (["forward"], list(shapes.MODES))
    assert first["reason"] == "crashed while backward was timed: RuntimeError: out of memory"
    assert second["reason"] == ""


class LosingCuda(FakeCuda):
    """Its context ends in `lose`; after it nothing works."""

    def __init__(self) -> None:
        super().__init__(tick=0.5)
        self.lost = False

    def lose(self) -> None:
        self.lost = True
        self.synchronize()

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    empty_cache = synchronize


@pytest.mark.parametrize("when", ["in turns", "alone", "checked"])
def test_a_lost_context_ends_the_bench_with_a_sentence_and_all_rows(
    when: str, fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While all take turns nobody can tell whose kernel it was."""
    fake.cuda = cuda = LosingCuda()
    at = {"checked": 1, "alone": 3, "in turns": 30}[when]

    class Losing(TorchRunner):
        calls = 0

        def backward(self, x: Any) -> Any:
            call = super().backward(x)

            def counted() -> Any:
                Losing.calls += 1
                if Losing.calls >= at:
                    cuda.lose()
                return call()

            return counted

        def both(self, x: Any) -> Any:
            return cuda.lose() if when == "checked" else super().both(x)

    def make(torch: Any, w: Workload) -> TorchRunner:
        kind = Losing if w.gates == "slow" else TorchRunner
        return kind(torch, recurrence, {})

    judged = {"fast": "test_bench:recurrence", "slow": "test_bench:recurrence"}
    given = (Peer("a", judged, lambda torch, w: TorchRunner(torch, recurrence, {})), Peer("bad", judged, make))
    path, table = tmp_path / "b.jsonl", tmp_path / "b.md"
    kinds = ["--kinds", "fast", "--kinds", "slow", "--modes", "forward", "--modes", "backward"]
    files = ["--json", str(path), "--summary", str(table)]
    result = bench(["--shapes", "1,24,2", "--shapes", "1,25,2", *kinds, *files], monkeypatch, *given)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1
    title = "KDA, slow gates 1,24,2"
    says = {
        "checked": f"bad was called on {title}; run the others without bad",
        "alone": f"backward of {title} was timed on bad alone; run the others without bad",
        "in turns": f"backward of {title} was timed on a, bad in turns; run the targets apart to see whose it is",
    }[when]
    *_, last = result.output.strip().splitlines()
    assert last.startswith("ended in workload ")
    assert last.endswith(f" of 4: the CUDA context was lost while {says}")
    rows = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert rows[-1]["reason"].startswith("crashed")
    before, (a, bad) = rows[:-2], rows[-2:]
    assert [r["reason"] for r in before] == [""] * len(before) != []
    assert (a["workload"]["gates"], a["target"], bad["target"]) == ("slow", "a", "bad")
    assert says in a["reason"] or (when == "in turns" and a["reason"].startswith("crashed"))
    assert list(a["times"]) == ([] if when == "checked" else ["forward"])
    assert "(wrong)" not in table.read_text()
    assert f"- bad, {title}: crashed" in table.read_text()


def test_an_interrupt_tells_the_workloads_that_are_done(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def press(**given: Any) -> Any:
        raise KeyboardInterrupt

    stopped = Peer("a", {"fast": "test_bench:recurrence", "none": "test_bench:delta"},
                   lambda torch, w: TorchRunner(torch, press if w.gates == "none" else recurrence, {}))  # fmt: skip
    path = tmp_path / "b.jsonl"
    kinds = ["--kinds", "fast", "--kinds", "none", "--modes", "forward"]
    result = bench(["--shapes", "1,24,2", *kinds, "--json", str(path)], monkeypatch, stopped)
    assert result.exit_code == 0, result.output
    assert "interrupted after 1 of 2 workloads" in result.output
    assert "| KDA, fast gates | 1,24,2 | forward | a |" in result.output
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["bench", "timing"]
    nothing = bench(["--shapes", "1,24,2", "--kinds", "none"], monkeypatch, stopped)
    assert (nothing.exit_code, nothing.stderr) == (2, "verikda: interrupted before there was anything to tell\n")


def test_jax_is_asked_for_each_mode_as_a_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a stand-in for JAX made of torch; arrays stay tensors."""
    waited: list[Any] = []

    def vjp(function: Any, x: Any) -> Any:
        leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
        o = function(leaves)
        grad = torch.autograd.grad
        return o.detach(), lambda do: (
            dict(zip(leaves, grad(o, list(leaves.values()), do, retain_graph=True), strict=True)),
        )

    jax = types.ModuleType("jax")
    jax.jit, jax.vjp, jax.block_until_ready = lambda f: f, vjp, waited.append  # type: ignore[attr-defined]
    jax.dlpack = types.SimpleNamespace(from_dlpack=lambda x: x)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setattr(shapes, "DEVICE", "cpu")
    monkeypatch.setenv("VERIKDA_CACHE", str(tmp_path))

    def operator(kind: str, q: Any, k: Any, v: Any, *, impl: str, **gates: Any) -> Any:
        assert (kind, impl, set(gates)) == ("kda", "mosaic_gpu", {"g", "beta"})
        return recurrence(q, k, v, **gates)

    w = Workload(1, 24, 2, "fast")
    runner = JaxRunner(operator, "mosaic_gpu", "kda")
    found = check.answers(torch, w, peer("jla"), runner)
    with ThreadPoolExecutor(1) as pool:
        wanted = check.together(w, [t.result() for t in check.ask_truth(pool, w, shapes.draw(torch, w, 0))])
    row = Row("jla", w, floor_verdict="pass")
    compare(row, found, wanted, backward=True)
    assert (row.reason, "dg" in row.errors) == ("", True)
    backward = runner.backward(runner.take(shapes.draw(torch, w, 1)))
    backward()
    runner.wait()
    assert set(waited[-1]) == {"q", "k", "v", "g", "beta"}


def test_the_tables_of_a_row(tmp_path: Path) -> None:
    timing = Timing("graph", tuple(float(x) for x in range(100, 150)), 31.125, 180.0, 130.0, 7_000_000)
    assert (timing.median, timing.low, timing.high, timing.fraction) == (124.5, 105.0, 144.0, 0.25)
    w = Workload(1, 8192, 32, "fast")
    row = Row("verikda", w, {"o": 3.3e-3, "dq": 5e-3}, "pass, worst 1.20 (o)", 1.2, "", {"forward": timing})
    text = markdown([row], H200).splitlines()
    time = "124 (105 to 144) | 31 | 25% | graph | 180 | 7 | 5.0e-03 | 1.20 |"
    assert f"| KDA, fast gates | 1,8192,32 | forward | verikda | {time}" in text
    assert "| KDA, fast gates | 1,8192,32 | verikda | 3.3e-03 | 5.0e-03 | pass, worst 1.20 (o) |" in text
    assert "4.3e+12 bytes/s" in text[2]
    assert "samples" not in row.line()["times"]["forward"]
    assert row.line()["times"]["forward"]["median"] == 124.5


def test_without_pytest_benchmark_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pytest_benchmark", None)
    with pytest.raises(ValueError, match=r"--benchmark-json needs pytest-benchmark, .*: pip install 'verikda\[test\]'"):
        write_pytest_benchmark(tmp_path / "b.json", [], H200)
