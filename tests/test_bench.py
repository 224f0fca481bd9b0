"""The bench: floors, who is timed and who is not, turns, reports. No GPU is needed; timing itself is run on one."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from oracles.recurrence import forward_reverse
from verikda import bench
from verikda import bench_shapes as shapes
from verikda.bench import Row, Timing, exit_status, markdown, objection
from verikda.bench_shapes import Workload, least_bytes, relative_l2, workloads
from verikda.cli import main
from verikda.record import Record

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")
SMALL = Workload(2, 24, 3, "fast")


def recurrence(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any = None, initial_state: Any = None, output_final_state=False
) -> tuple[Any, Any]:
    """The token recurrence in float32."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    f = [x.float() for x in (q, k, v, g, beta)]
    S = f[0].new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    rows = []
    for q_t, k_t, v_t, g_t, b_t in zip(*(x.unbind(1) for x in f), strict=True):
        S = S * g_t.exp()[..., None]
        r = v_t - torch.einsum("bhk,bhkv->bhv", k_t, S)
        S = S + torch.einsum("bhk,bhv->bhkv", b_t[..., None] * k_t, r)
        rows.append(scale * torch.einsum("bhk,bhkv->bhv", q_t, S))
    return torch.stack(rows, 1).to(q.dtype), S if output_final_state else None


def delta(
    q: Any, k: Any, v: Any, beta: Any, scale: Any = None, initial_state: Any = None, output_final_state=False
) -> tuple[Any, Any]:
    return recurrence(q, k, v, torch.zeros_like(q), beta, scale, initial_state, output_final_state)


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    return shapes.truth(shapes.slice_problem(shapes.draw(torch, SMALL, 0, "cpu"), shapes.sampled_heads(SMALL)))


@pytest.mark.parametrize(
    ("w", "forward", "both"),
    [
        (Workload(1, 8192, 32, "fast"), 94, 266),
        (Workload(8, 2048, 32, "slow"), 188, 532),
        (Workload(1, 8192, 32, "none"), 63, 172),
        (Workload(8, 2048, 32, "none"), 125, 344),
    ],
)
def test_floors_are_those_counted_by_hand(w: Workload, forward: int, both: int) -> None:
    """Microseconds at 4.3 TB/s; per token and head 1540 and 2824 bytes of KDA, 1026 and 1796 of DeltaNet."""
    n = w.B * w.T * w.H
    per = (1540, 1540 + 2824) if w.rule == "kda" else (1026, 1026 + 1796)
    assert (least_bytes(w, False), least_bytes(w, True)) == (n * per[0], n * per[1])
    assert [round(1e6 * least_bytes(w, back) / 4.3e12) for back in (False, True)] == [forward, both]


@pytest.mark.parametrize("w", [Workload(1, 20, 2, "fast"), Workload(1, 20, 2, "none")])
def test_the_fewest_bytes_are_those_of_the_tensors(w: Workload) -> None:
    given = shapes.draw(torch, w, 0, "cpu")
    size = {n: x.numel() * x.element_size() for n, x in given.items()}
    inputs = sum(size.values()) - size["do"]
    assert least_bytes(w, False) == inputs + size["v"]
    assert least_bytes(w, True) == (inputs + size["v"]) + (inputs + size["do"] + inputs)


def test_inputs_leave_the_cache_and_every_peer_meets_every_set() -> None:
    big = Workload(1, 8192, 32, "fast")
    assert shapes.input_sets(big, 2) == 3
    tiny = Workload(1, 256, 1, "fast")
    assert shapes.input_sets(tiny, 2) * least_bytes(tiny, False) >= 2 * shapes.L2_BYTES


def test_gates_are_as_fast_and_as_slow_as_said() -> None:
    for gates, mean, low in (("fast", -2.5, -5.0), ("slow", -0.02, -0.04)):
        given = shapes.draw(torch, Workload(1, 64, 2, gates), 0, "cpu")
        assert float(given["g"].detach().mean()) == pytest.approx(mean, rel=0.05)
        assert low <= given["g"].min().item() <= given["g"].max().item() < 0
        assert torch.linalg.norm(given["k"].detach().float(), dim=-1).sub(1).abs().max() < 0.01
        again = shapes.draw(torch, Workload(1, 64, 2, gates), 0, "cpu")
        assert all(torch.equal(x, again[n]) for n, x in given.items())
        assert not torch.equal(given["q"], shapes.draw(torch, Workload(1, 64, 2, gates), 1, "cpu")["q"])


def test_some_heads_alone_have_the_truth_of_the_whole(wanted: dict[str, Any]) -> None:
    every = [(b, h) for b in range(SMALL.B) for h in range(SMALL.H)]
    whole = forward_reverse(shapes.slice_problem(shapes.draw(torch, SMALL, 0, "cpu"), every))
    for n, x in wanted.items():
        np.testing.assert_array_equal(x, whole[n][:, :, [0, -1]])


def test_relative_l2_never_passes_what_is_not_a_number() -> None:
    one = np.ones((2, 3))
    assert relative_l2(one * 1.01, one) == pytest.approx(0.01)
    assert relative_l2(np.array([1.0, math.nan]), np.ones(2)) == math.inf
    assert relative_l2(np.array([1.0, math.inf]), np.ones(2)) == math.inf
    assert relative_l2(np.ones(3), np.ones(2)) == math.inf
    assert relative_l2(np.zeros(2), np.zeros(2)) == 0.0
    assert relative_l2(np.ones(2), np.zeros(2)) == math.inf


def checked(function: Any, w: Workload, wanted: dict[str, Any]) -> Row:
    row = Row("toy", w)
    bench.compare(row, bench.answers(torch, row, function, "cpu"), wanted)
    return row


def test_a_right_target_is_timed(wanted: dict[str, Any]) -> None:
    row = checked(recurrence, SMALL, wanted)
    assert row.reason == ""
    assert set(row.errors) == {"o", "dq", "dk", "dv", "dg", "dbeta", "o without gradients"}
    assert max(row.errors.values()) < 5e-3
    assert row.floor_verdict.startswith("pass, worst")


def test_a_right_delta_rule_is_timed() -> None:
    w = Workload(1, 24, 2, "none")
    truth = shapes.truth(shapes.slice_problem(shapes.draw(torch, w, 0, "cpu"), shapes.sampled_heads(w)))
    row = checked(delta, w, truth)
    assert (row.reason, "dg" in row.errors) == ("", False)


def late(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
    o, S = recurrence(q, k, v, g, beta, **options)
    return torch.cat([o[:, :, :-1], 1.05 * o[:, :, -1:]], 2), S


def detached(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
    return recurrence(q, k, v, g + 0.1 * (g - g.detach()), beta, **options)


def only_training(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
    o, S = recurrence(q, k, v, g, beta, **options)
    return (o if torch.is_grad_enabled() else o * 1.1), S


def poisoned(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
    o, S = recurrence(q, k, v, g, beta, **options)
    return torch.where(torch.arange(o.shape[1])[:, None, None] == 3, torch.nan, o), S


@pytest.mark.parametrize(
    ("fault", "output"), [(late, "o"), (detached, "dg"), (only_training, "o without gradients"), (poisoned, "o inf")]
)
def test_a_wrong_target_is_not_timed_and_says_why(
    fault: Any, output: str, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "floor_verdict", lambda *a: "pass, worst 1.00 (o)")
    row = checked(fault, SMALL, wanted)
    assert row.reason.startswith("wrong: relative L2")
    assert output in row.reason
    assert exit_status([row]) == 1
    assert row.reason in markdown([row], 4.3e12, "X")


def test_an_error_that_the_relative_l2_lets_pass_is_seen_by_the_floor() -> None:
    def rough(
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: Any = None,
        initial_state: Any = None,
        output_final_state=False,
    ) -> Any:
        """One row of 130 off by 0.2: a relative L2 of 0.2 / sqrt(130) = 0.0175."""
        o, S = recurrence(q, k, v, g, beta, scale, initial_state, output_final_state)
        return torch.where(torch.arange(o.shape[1])[:, None, None] == 17, o * 1.2, o), S

    call = bench.small_call("fast")
    assert bench.floor_verdict(recurrence, "toy", call).startswith("pass")
    assert bench.floor_verdict(rough, "toy", call).startswith("fail")


def test_no_check_is_no_pass() -> None:
    good = {"o": 1e-3}
    assert objection(good, "pass, worst 1.00 (o)") == ""
    assert objection({}, "pass, worst 1.00 (o)") != ""
    assert objection(good, "") != ""
    assert objection(good, "inconclusive").startswith("not shown right")
    assert objection({"o": math.nan}, "pass, worst 1.00 (o)") != ""
    assert objection(good, "fail, worst 9.00 (o)").startswith("wrong")


def test_a_peer_that_is_not_installed_says_so() -> None:
    found = bench.functions_of("fla")
    assert not isinstance(found, str) or "cannot be imported: ModuleNotFoundError" in found
    assert set(bench.functions_of("verikda")) == {"kda", "delta"}
    with pytest.raises(ValueError, match="bench knows no target 'nobody'; use verikda or fla"):
        bench.functions_of("nobody")


class FakeCuda:
    """Events on a clock that runs advance, to see who runs when and what is counted."""

    def __init__(self) -> None:
        self.now, fake = 0.0, self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = fake.now

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at)

        self.Event = Event

    def synchronize(self) -> None:
        pass


def test_peers_take_turns_and_each_is_timed_alone() -> None:
    class Fake:
        cuda = FakeCuda()

    calls: list[tuple[str, int]] = []

    def run(name: str, milliseconds: float) -> Any:
        def one(i: int) -> None:
            calls.append((name, i))
            Fake.cuda.now += milliseconds

        return one

    a, b = bench.sample(Fake, [run("a", 0.2), run("b", 0.7)], 5)
    np.testing.assert_allclose(a, [200.0] * 5)
    np.testing.assert_allclose(b, [700.0] * 5)
    assert [name for name, _ in calls] == ["a", "b"] * (bench.WARM_UP + 5)
    timed = [i for _, i in calls[2 * bench.WARM_UP :]]
    assert timed == list(range(10))
    assert {i % 3 for name, i in calls if name == "a"} == {0, 1, 2}


def test_a_row_is_written_with_its_floor_and_spread(tmp_path: Path) -> None:
    timing = bench.summarise([float(x) for x in range(100, 150)], "graph", 31.125, 7_000_000)
    assert (timing.median, timing.low, timing.high) == (124.5, 105.0, 144.0)
    assert timing.fraction == 0.25
    row = Row("verikda", Workload(1, 8192, 32, "fast"), {"o": 3.3e-3}, "pass, worst 1.20 (o)", "", {"fwd": timing})
    text = markdown([row], 4.3e12, "NVIDIA H200")
    assert (
        "| 1,8192,32 | KDA, fast gates | fwd | verikda | 124 (105 to 144) | 31 | 25% | 7 | graph |" in text.splitlines()
    )
    assert "| 1,8192,32 | KDA, fast gates | verikda | 3.3e-03 | pass, worst 1.20 (o) |" in text.splitlines()
    record = Record(tmp_path / "b.jsonl")
    bench.record_rows(record, [row, Row("fla", row.workload, reason="cannot be imported: x")], 4.3e12)
    record.close()
    first, second = (json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines())
    assert (first["kind"], first["bandwidth"], len(first["kernels"])) == ("timing", 4.3e12, 16)
    assert first["times"]["fwd"]["median"] == 124.5
    assert (second["times"], second["reason"]) == ({}, "cannot be imported: x")


def test_a_crash_while_timing_costs_one_workload_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    todo = workloads("quick")[:2]

    class Fake:
        class cuda:  # noqa: N801
            @staticmethod
            def empty_cache() -> None:
                pass

            @staticmethod
            def get_device_name() -> str:
                return "NVIDIA H200"

    def time_rows(torch: Any, rows: Any, known: Any, bandwidth: float) -> None:
        if rows[0].workload == todo[0]:
            raise RuntimeError("illegal memory access\nmore")
        rows[0].times["fwd"] = Timing("graph", 4.0, 4.0, 4.0, 1.0, 0)

    monkeypatch.setattr(bench, "cuda_torch", lambda: Fake)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda torch: 4.3e12)
    monkeypatch.setattr(bench, "answers", lambda torch, row, function: {})
    monkeypatch.setattr(bench, "compare", lambda row, found, wanted: None)
    monkeypatch.setattr(bench, "time_rows", time_rows)
    monkeypatch.setattr(shapes, "workloads", lambda name: todo)
    monkeypatch.setattr(shapes, "draw", lambda torch, w, seed: {})
    monkeypatch.setattr(shapes, "slice_problem", lambda given, where: None)
    monkeypatch.setattr(shapes, "truth", lambda problem: {})
    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda n, mp_context: ThreadPoolExecutor(n))
    files = ["--json", str(tmp_path / "b.jsonl"), "--summary", str(tmp_path / "out" / "b.md")]
    result = CliRunner().invoke(main, ["bench", "verikda", *files])
    assert result.exit_code == 1
    lines = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [x["kind"] for x in lines] == ["bench", "timing", "timing"]
    assert lines[1]["reason"] == "crashed while it was timed: RuntimeError: illegal memory access"
    assert lines[2]["times"]["fwd"]["median"] == 4.0
    text = (tmp_path / "out" / "b.md").read_text()
    assert "| fwd | verikda | 4 (4 to 4) | 1 | 25% |" in text
    assert "not timed: crashed while" in text


def test_exit_status_tells_timed_wrong_and_nothing_apart() -> None:
    w = Workload(1, 8192, 32, "fast")
    timed = Row("verikda", w, times={"fwd": Timing("graph", 1.0, 1.0, 1.0, 1.0, 0)})
    missing = Row("fla", w, reason="cannot be imported: x")
    assert exit_status([timed, missing]) == 0
    assert exit_status([missing]) == 2
    assert exit_status([]) == 2
    assert exit_status([timed, Row("fla", w, reason="crashed: x")]) == 1


def test_shapes_have_names() -> None:
    quick, full = workloads("quick"), workloads("full")
    assert len(quick) == 6
    assert set(quick) < set(full)
    with pytest.raises(ValueError, match="shapes is 'huge'; use quick or full"):
        workloads("huge")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_one_sentence_and_status_2() -> None:
    result = CliRunner().invoke(main, ["bench", "verikda"])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert "needs a CUDA GPU" in result.output


@pytest.mark.parametrize("arguments", [["nobody"], ["--shapes", "huge"]])
def test_unusable_arguments_are_said_before_anything_runs(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 2
    assert "use " in result.output
