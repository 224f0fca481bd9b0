"""The bench: floors, workloads, who is called right. No GPU is needed; timing itself is run on one."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from oracles.recurrence import forward_reverse
from verikda.bench import check
from verikda.bench import workloads as shapes
from verikda.bench.gpu import Device
from verikda.bench.output import markdown
from verikda.bench.peers import PEERS, Peer, TorchRunner, chosen, offsets
from verikda.bench.rows import OBJECTIONS, Row, Timing, compare, exit_status, objection
from verikda.bench.workloads import PACK, Workload, least_bytes, least_flops, relative_l2, workloads
from verikda.cli import main
from verikda.permits import permits
from verikda.targets import resolve

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")
SMALL = Workload(2, 24, 3, "fast")
H200 = Device("NVIDIA H200", 4.3e12, 7.9e14)


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


def fused(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any = None, initial_state: Any = None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log: Any = None, dt_bias: Any = None,
    lower_bound: Any = None, use_beta_sigmoid_in_kernel=False,
) -> tuple[Any, Any]:  # fmt: skip
    if use_qk_l2norm_in_kernel:
        q, k = (x * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    if use_gate_in_kernel:
        g = lower_bound * torch.sigmoid(A_log.exp()[:, None] * (g.float() + dt_bias.reshape(*g.shape[2:])))
    if use_beta_sigmoid_in_kernel:
        beta = beta.float().sigmoid()
    o, S = recurrence(q, k, v, g, beta, scale, initial_state, output_final_state)
    return o.to(v.dtype), S


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shapes, "DEVICE", "cpu")
    monkeypatch.setenv("VERIKDA_CACHE", str(tmp_path / "cache"))


def truth_of(w: Workload) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as pool:
        return check.together(w, [t.result() for t in check.ask_truth(pool, w, shapes.draw(torch, w, 0))])


@pytest.mark.parametrize(
    ("w", "forward", "both"),
    [
        (Workload(1, 8192, 32, "fast"), 94, 266),
        (Workload(8, 2048, 32, "slow"), 188, 532),
        (Workload(1, 8192, 32, "fused"), 78, 219),
        (Workload(1, 8192, 32, "none"), 63, 172),
        (Workload(8, 2048, 32, "none"), 125, 344),
    ],
)
def test_floors_are_those_counted_by_hand(w: Workload, forward: int, both: int) -> None:
    """Microseconds at 4.3 TB/s, when the bytes decide."""
    assert [round(1e6 * least_bytes(w, m) / 4.3e12) for m in ("forward", "forward+backward")] == [forward, both]
    assert least_bytes(w, "forward") + least_bytes(w, "backward") == least_bytes(w, "forward+backward")


def test_operations_of_a_token_and_head() -> None:
    """In thousands: chunks of 16 need fewer than chunks of 64."""
    one = Workload(1, 1, 1, "fast")
    kilo = [round(least_flops(one, m, c) / 1e3) for c in (16, 64) for m in ("forward", "backward")]
    assert kilo == [115, 321, 167, 511]
    assert H200.floor(4.3e6, 7.9e7) == pytest.approx(1.0)
    assert H200.floor(4.3e6, 7.9e9) == pytest.approx(10.0)


@pytest.mark.parametrize("gates", ["fast", "fused", "none"])
def test_the_fewest_bytes_are_those_of_the_tensors(gates: Any) -> None:
    w = Workload(1, 20, 2, gates)
    given = {n: x for n, x in shapes.draw(torch, w, 0).items() if n not in ("A_log", "dt_bias")}  # a few bytes
    size = {n: x.numel() * x.element_size() for n, x in given.items()}
    inputs = sum(size.values()) - size["do"]
    assert least_bytes(w, "forward") == inputs + size["v"]
    assert least_bytes(w, "backward") == inputs + size["do"] + inputs


def test_inputs_leave_the_cache_and_every_peer_meets_every_set() -> None:
    big, tiny = Workload(1, 8192, 32, "fast"), Workload(1, 256, 1, "fast")
    assert [shapes.input_sets(big, peers) for peers in (1, 2, 3, 4)] == [2, 3, 2, 3]
    assert shapes.input_sets(tiny, 2) * least_bytes(tiny, "forward") >= 2 * shapes.L2_BYTES
    assert all(math.gcd(shapes.input_sets(tiny, peers), peers) == 1 for peers in (2, 3, 5, 6))


def test_gates_are_as_fast_and_as_slow_as_said() -> None:
    for gates, mean, low in (("fast", -2.5, -5.0), ("slow", -0.02, -0.04)):
        w = Workload(1, 64, 2, gates)  # type: ignore[arg-type]
        given = shapes.draw(torch, w, 0)
        assert float(given["g"].detach().mean()) == pytest.approx(mean, rel=0.05)
        assert low <= given["g"].min().item() <= given["g"].max().item() < 0
        assert torch.linalg.norm(given["k"].detach().float(), dim=-1).sub(1).abs().max() < 0.01
        again = shapes.draw(torch, w, 0)
        assert all(torch.equal(x, again[n]) for n, x in given.items())
        assert not torch.equal(given["q"], shapes.draw(torch, w, 1)["q"])


@pytest.mark.parametrize("w", [SMALL, Workload(1, 24, 3, "fused"), Workload(1, 24, 3, "fast", (7, 17))])
def test_some_heads_alone_have_the_truth_of_the_whole(w: Workload) -> None:
    every = [(b, h) for b in range(w.B) for h in range(w.H)]
    whole = forward_reverse(shapes.slice_problem(shapes.draw(torch, w, 0), every, w.lengths))
    found = truth_of(w)
    assert set(found) == set(whole) - {"ht"}
    for n, x in found.items():
        wanted = whole[n][[0, -1]] if n in ("dA_log", "ddt_bias") else whole[n][:, :, [0, -1]]
        np.testing.assert_allclose(x, wanted, rtol=1e-12, atol=1e-15)


def test_a_truth_is_kept_and_a_damaged_one_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = shapes.slice_problem(shapes.draw(torch, SMALL, 0), [(0, 0)])
    first = check.kept_truth(problem)
    (path,) = (tmp_path / "cache" / "truth").iterdir()
    monkeypatch.setattr(shapes, "truth", lambda problem: pytest.fail("computed again"))
    assert all(np.array_equal(x, first[n]) for n, x in check.kept_truth(problem).items())
    path.write_bytes(b"not a file of arrays")
    monkeypatch.setattr(shapes, "truth", lambda problem: {"o": np.ones(1)})
    assert list(check.kept_truth(problem)) == ["o"]


def test_relative_l2_never_passes_what_is_not_a_number() -> None:
    one = np.ones((2, 3))
    assert relative_l2(one * 1.01, one) == pytest.approx(0.01)
    assert relative_l2(np.array([1.0, math.nan]), np.ones(2)) == math.inf
    assert relative_l2(np.array([1.0, math.inf]), np.ones(2)) == math.inf
    assert relative_l2(np.ones(3), np.ones(2)) == math.inf
    assert relative_l2(np.zeros(2), np.zeros(2)) == 0.0
    assert relative_l2(np.ones(2), np.zeros(2)) == math.inf


GREEN = "pass, worst 1.00 (o)"
TOY = Peer("toy", dict.fromkeys(("fast", "slow", "fused", "none"), "test_bench:recurrence"), lambda torch, w: None)  # type: ignore[arg-type,return-value]


def checked(function: Any, w: Workload, verdict: str = GREEN) -> Row:
    row = Row("toy", w, floor_verdict=verdict)
    compare(row, check.answers(torch, w, TOY, TorchRunner(torch, function, {})), truth_of(w), backward=True)
    return row


@pytest.mark.parametrize(
    ("function", "w"),
    [(recurrence, SMALL), (delta, Workload(1, 24, 2, "none")), (fused, Workload(1, 24, 2, "fused"))],
)
def test_a_right_target_is_timed(function: Any, w: Workload) -> None:
    row = checked(function, w)
    assert row.reason == ""
    gate = {"fast": {"dg"}, "none": set(), "fused": {"dg", "dA_log", "ddt_bias"}}[w.gates]
    assert set(row.errors) == {"o", "dq", "dk", "dv", "dbeta", "o without gradients"} | gate
    assert max(row.errors.values()) < 1e-2


def test_packed_sequences_do_not_see_each_other() -> None:
    w = Workload(1, 24, 2, "fast", (7, 17))

    def packed(cu_seqlens: Any, **given: Any) -> Any:
        parts = [{n: x[:, a:b] for n, x in given.items()} for a, b in pairwise(cu_seqlens.tolist())]
        return torch.cat([recurrence(**part)[0] for part in parts], 1), None

    def row_of(function: Any, **more: Any) -> Row:
        row = Row("toy", w, floor_verdict=GREEN)
        compare(row, check.answers(torch, w, TOY, TorchRunner(torch, function, more)), truth_of(w), backward=True)
        return row

    assert row_of(packed, **offsets(torch, w, host_too=False)).reason == ""
    assert row_of(recurrence).reason.startswith("wrong: relative L2")


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
def test_a_wrong_target_is_not_timed_and_says_why(fault: Any, output: str) -> None:
    row = checked(fault, SMALL)
    assert row.reason.startswith("wrong: relative L2")
    assert output in row.reason
    assert exit_status([row]) == 1
    assert row.reason in markdown([row], H200)


def test_an_output_that_is_missing_is_wrong() -> None:
    row = Row("toy", SMALL, floor_verdict=GREEN)
    compare(row, {"o": np.ones(1), "o without gradients": np.ones(1)}, {"o": np.ones(1), "dq": np.ones(1)}, True)
    assert row.reason.startswith("wrong: relative L2 against float64 of dq inf")
    compare(row, {"o without gradients": np.ones(1)}, {"o": np.ones(1), "dq": np.ones(1)}, False)
    assert row.reason == ""


def test_an_error_that_the_relative_l2_lets_pass_is_seen_by_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("K", "V"):
        monkeypatch.setattr(shapes, size, 16)  # as many runs of the emulator in less time

    def rough(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
        """One row of 130 off by 0.2: a relative L2 of 0.2 / sqrt(130) = 0.0175."""
        o, S = recurrence(q, k, v, g, beta, **options)
        return torch.where(torch.arange(o.shape[1], device=o.device)[:, None, None] == 17, o * 1.2, o), S

    from verikda.targets.torch_function import TorchFunction

    def verdict(function: Any, heads: int = 2) -> str:
        target = TorchFunction(function, "toy", capabilities=resolve("test_bench:recurrence").capabilities)
        with ThreadPoolExecutor(1) as pool:
            return check.small_verdict(pool, target, "fast", False, heads).result()[0]

    def plain(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state=None, output_final_state=False) -> Any:
        return recurrence(q, k, v, g, beta, None, initial_state, output_final_state)

    def off(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state=None, output_final_state=False) -> Any:
        return rough(q, k, v, g, beta, output_final_state=output_final_state)

    check.small_call.cache_clear()
    assert verdict(plain).startswith("pass")
    assert verdict(off).startswith("fail")
    assert verdict(off, heads=5).startswith("fail")
    check.small_call.cache_clear()


def test_two_heads_are_the_first_and_the_last_of_everything() -> None:
    x = np.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    cut = check.two_heads(
        {"q": x, "beta": x[..., 0], "ht": x.transpose(0, 2, 1, 3), "dA_log": x[0, 0, :, 0], "ddt_bias": x[0, 0]}
    )
    assert np.array_equal(cut["q"], x[:, :, [0, 3]])
    assert np.array_equal(cut["beta"], x[:, :, [0, 3], 0])
    assert np.array_equal(cut["ht"], x.transpose(0, 2, 1, 3)[:, [0, 3]])
    assert np.array_equal(cut["dA_log"], x[0, 0, [0, 3], 0])
    assert np.array_equal(cut["ddt_bias"], x[0, 0, [0, 3]])


def test_no_check_is_no_pass() -> None:
    good = {"o": 1e-3}
    assert objection(good, GREEN) == ""
    assert objection({}, GREEN) != ""
    assert objection(good, "") != ""
    assert objection(good, "inconclusive").startswith("not shown right")
    assert objection({"o": math.nan}, GREEN) != ""
    assert objection(good, "fail, worst 9.00 (o)").startswith("wrong")
    for told in (objection({}, GREEN), objection(good, ""), objection({"o": 1.0}, GREEN), objection(good, "fail")):
        assert told.startswith(OBJECTIONS)
        row = Row("toy", SMALL, errors=good, reason=told, times={"forward": Timing("graph", (2.0,), 1.0, 3.0)})
        assert f"| toy ({told.partition(':')[0]}) | 2 (2 to 2) |" in markdown([row], H200)


@pytest.mark.parametrize("gates", shapes.KINDS)
def test_small_cases_are_those_of_the_workload(gates: Any) -> None:
    case = check.small_case(gates)
    assert permits(resolve("emulator").capabilities, case) is None
    assert case.gate == {"fast": "log", "slow": "log", "fused": "bounded", "none": "none"}[gates]
    safe = check.small_case(gates, safe_gate=True)
    assert safe.safe_gate == (gates != "none")


def test_peers_say_what_they_do_not_take() -> None:
    pack, fused_ = Workload(1, sum(PACK), 32, "fast", PACK), Workload(1, 8192, 32, "fused")
    plain, none = Workload(1, 8192, 32, "fast"), Workload(1, 8192, 32, "none")
    refused = {
        (name, w.title + (" pack" if w.lengths else "")): peer.refuses(w)
        for name, peer in PEERS.items()
        for w in (pack, fused_, plain, none)
        if peer.refuses(w)
    }
    assert set(refused) == {
        ("fla:safe", "DeltaNet"),
        ("cudnn", "DeltaNet"),
        *(("jla", t) for t in ("KDA, fast gates pack", "KDA, all fused")),
        *(("flashkda", t) for t in ("KDA, fast gates pack", "KDA, fast gates", "DeltaNet")),
    }
    assert all(text.startswith("not supported: ") for text in refused.values())
    assert PEERS["cudnn"].modes(fused_) == ("forward",)
    assert PEERS["cudnn"].modes(plain) == ("forward", "backward", "forward+backward")
    with pytest.raises(ValueError, match="there is no bench target 'nobody'; the bench targets are verikda, fla"):
        chosen(("nobody",))
    assert [p.name for p in chosen(("jla", "verikda"))] == ["jla", "verikda"]


def test_offsets_of_a_pack_are_given_once() -> None:
    given = offsets(torch, Workload(1, 24, 1, "fast", (7, 17)), host_too=True)
    assert given["cu_seqlens"].tolist() == given["cu_seqlens_cpu"].tolist() == [0, 7, 24]
    assert offsets(torch, SMALL, host_too=True) == {}


def test_exit_status_tells_timed_wrong_and_nothing_apart() -> None:
    w = Workload(1, 8192, 32, "fast")
    timed = Row("verikda", w, times={"forward": Timing("graph", (1.0,), 1.0, 1.0)})
    missing = Row("fla", w, reason="not here: x")
    assert exit_status([timed, missing]) == 0
    assert exit_status([missing]) == 2
    assert exit_status([]) == 2
    assert exit_status([timed, Row("fla", w, reason="crashed: x")]) == 1


def test_shapes_have_names() -> None:
    quick, full = workloads(["quick"]), workloads(["full"])
    assert len(quick) == 7
    assert set(quick) < set(full)
    assert {(w.B, w.T, w.H) for w in full} >= {(1, 8192, 96), (2, 4096, 32), (1, 32768, 32), (1, 8192, 8)}
    assert [w.lengths for w in workloads(["pack"], ["slow"])] == [PACK]
    assert workloads(["1,64,2", "1,64,2"], ["fast", "none"]) == (Workload(1, 64, 2, "fast"), Workload(1, 64, 2, "none"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_one_sentence_and_status_2() -> None:
    result = CliRunner().invoke(main, ["bench", "verikda"])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert "needs a CUDA GPU" in result.output


@pytest.mark.parametrize(
    "arguments",
    [["nobody"], ["--shapes", "huge"], ["--shapes", "1,0,3"], ["--modes", "sideways"], ["--kinds", "free"],
     ["--shapes", "quick", "--kinds", ""]],
)  # fmt: skip
def test_unusable_arguments_are_said_before_anything_runs(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 2
    assert re.search("; use |; the .*s are ", result.output)
