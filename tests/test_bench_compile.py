"""`verikda bench --compile-jobs`: every config of a tuner is compiled by a process, and none is timed."""

from __future__ import annotations

import math
import sys
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from verikda.bench import compile_ahead as ahead
from verikda.bench import peers
from verikda.bench.peers import Peer
from verikda.bench.workloads import Workload
from verikda.cli import main
from verikda.interrupts import ALONE

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")


class Tuner:
    """As much of Triton's Autotuner as the bench relies on."""

    def __init__(self, count: int) -> None:
        self.configs = [f"config {i}" for i in range(count)]
        self.ran: Counter[str] = Counter()
        self._do_bench: Any = None
        self.do_bench = self.measure  # what a cached property leaves behind

    @staticmethod
    def measure(call: Any, quantiles: Any) -> list[float]:
        for _ in range(100):
            call()
        return [1.0] * 3

    def _bench(self, *args: Any, config: str, **meta: Any) -> list[float]:
        timing = self.__dict__.get("do_bench", self._do_bench)
        found: list[float] = timing(lambda: self.ran.update([config]), quantiles=(0.5, 0.2, 0.8))
        return found


@pytest.mark.parametrize(("configs", "parts"), [(1, 4), (3, 16), (16, 16), (20, 16), (7, 2)])
def test_every_config_runs_once_and_every_process_has_one(configs: int, parts: int) -> None:
    ran: Counter[str] = Counter()
    for part in range(parts):
        tuner = Tuner(configs)
        bench = ahead.only_share(Tuner._bench, part, parts)
        times = {config: bench(tuner, config=config) for config in tuner.configs}
        assert set(tuner.ran.values()) == {1}, "each once"
        assert {c for c, t in times.items() if t[0] != math.inf} == set(tuner.ran), "the others are never chosen"
        ran.update(tuner.ran)
    assert set(ran) == {f"config {i}" for i in range(configs)}
    if configs >= parts:
        assert set(ran.values()) == {1}


def test_a_share_makes_the_calls_of_the_bench_and_tells_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []

    def peer(name: str, fails: bool) -> Peer:
        def make(torch: Any, w: Workload) -> Any:
            def forward(x: Any) -> None:
                made.append((name, "forward"))
                if fails:
                    raise RuntimeError("out of shared memory\nmore")

            return types.SimpleNamespace(
                take=lambda given: given, forward=forward, both=lambda x: made.append((name, "both")), wait=lambda: None
            )

        return Peer(name, {"fast": "toy"}, make)

    tuner = types.SimpleNamespace(_bench=len)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(
        sys.modules, "triton.runtime", types.SimpleNamespace(autotuner=types.SimpleNamespace(Autotuner=tuner))
    )  # type: ignore[arg-type]
    monkeypatch.setattr(ahead, "cuda_torch", lambda: types.SimpleNamespace(cuda=types.SimpleNamespace(empty_cache=int)))
    monkeypatch.setattr(ahead, "PEERS", {"fla": peer("fla", False), "fla:safe": peer("fla:safe", True)})
    monkeypatch.setattr(ahead.shapes, "draw", lambda torch, w, seed: {})
    monkeypatch.setattr(ahead, "small_call", lambda *args: None)
    small = types.SimpleNamespace(
        capabilities=types.SimpleNamespace(backward=True), run=lambda call: made.append(("small", "run"))
    )
    monkeypatch.setattr(ahead, "resolve", lambda name: small)
    kept = ("FLA_CACHE_RESULTS", "TRITON_CACHE_AUTOTUNING")
    for name in kept:
        monkeypatch.setenv(name, "1")
    todo = [Workload(1, 8, 2, "fast"), Workload(1, 8, 2, "none")]
    found = ahead._compile_share(["fla", "fla:safe"], todo, 0, 1)
    assert found == ["fla:safe, KDA, fast gates 1,8,2: RuntimeError: out of shared memory"]
    assert made == [("small", "run"), ("fla", "forward"), ("fla", "both"), ("small", "run"), ("fla:safe", "forward")]
    assert tuner._bench is not len
    assert [ahead.os.environ[name] for name in kept] == ["0", "0"], "times that mean nothing stay on no disk"


def test_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def pool(jobs: int) -> Any:
        with ThreadPoolExecutor(jobs) as made:
            yield made

    monkeypatch.setattr(ahead, "processes", pool)
    monkeypatch.setattr(ahead, "_compile_share", lambda names, todo, part, parts: [f"{','.join(names)} of {parts}"])
    told: list[str] = []
    ahead.compile_ahead(["verikda", "fla", "jla"], [Workload(1, 8, 2, "fast")], 3, told.append)
    assert told == ["compiling what the tuners of fla try, in 3 processes", "not compiled ahead: fla of 3"]

    def crash(*given: Any) -> list[str]:
        raise ChildProcessError(f"one of 3 processes ended with exit status 9 before its work; {ALONE}")

    monkeypatch.setattr(ahead, "_compile_share", crash)
    told.clear()
    ahead.compile_ahead(["fla:safe"], [], 3, told.append)
    assert told[1:] == ["not compiled ahead: one of 3 processes ended with exit status 9 before its work"]

    def lack(*given: Any) -> list[str]:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(ahead, "_compile_share", lack)
    told.clear()
    ahead.compile_ahead(["fla"], [], 3, told.append)
    assert told[1:] == ["not compiled ahead: ModuleNotFoundError: No module named 'triton'"]
    told.clear()
    ahead.compile_ahead(["verikda"], [], 3, told.append)
    assert told == []


def test_the_bench_compiles_first_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from verikda.bench import command

    order: list[Any] = []

    def stop(*given: Any) -> None:
        order.append("bench")
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "cuda_torch", lambda: None)
    monkeypatch.setattr(command, "bench", stop)
    monkeypatch.setattr(command, "compile_ahead", lambda names, todo, jobs, say: order.append((names, len(todo), jobs)))
    options = ["bench", "verikda", "fla", "--shapes", "1,8,2", "--kinds", "fast"]
    CliRunner().invoke(main, [*options, "--compile-jobs", "5"])
    CliRunner().invoke(main, options)
    assert order == [(["verikda", "fla"], 1, 5), "bench", "bench"]
    assert set(ahead.TUNED) <= set(peers.PEERS)
