"""`verikda bench`: is each target right on this build, and then how long does it take, beside its fewest bytes?"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from typing import Any

from kernels_cuda.sources import source_hash
from oracles.contract import storage16
from oracles.problem import Array
from verikda import bench_shapes as shapes
from verikda.bench_shapes import Function, Workload
from verikda.call import Call
from verikda.case import Case
from verikda.environment import environment
from verikda.floor import judge
from verikda.inputs import make_call
from verikda.record import Record

TIMED, FOUND, NOTHING = 0, 1, 2
REL_LIMIT = 2e-2
"""Relative L2 beyond which a target is not timed; bfloat16 kernels are known to reach 3e-3 to 6e-3 in o."""
REPEATS = 50
WARM_UP = 3

PLACES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "verikda": {"kda": ("verikda", "chunk_kda"), "delta": ("verikda", "chunk_delta_rule")},
    "fla": {"kda": ("fla.ops.kda", "chunk_kda"), "delta": ("fla.ops.delta_rule", "chunk_delta_rule")},
}
"""Module and function of each target for each rule."""


class NoGpuError(ValueError):
    """Nothing can be timed here; one sentence says why."""


@dataclass
class Row:
    """One target on one workload.

    Attributes
    ----------
    errors : relative L2 against float64 by output, on the build and at the shape that are timed.
    floor_verdict : of `verikda.floor` on a small case of the same rule and gates.
    reason : why nothing was timed; empty where it was.
    times : by mode ("fwd", "fwd+bwd").
    """

    target: str
    workload: Workload
    errors: dict[str, float] = field(default_factory=dict)
    floor_verdict: str = ""
    reason: str = ""
    times: dict[str, Timing] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call.

    Attributes
    ----------
    method : "graph" (replays of a CUDA graph) or "eager" (launches included).
    median, low, high : over the repeats; low and high are the 10th and 90th percentile.
    floor : fewest bytes over the copy bandwidth measured in this run.
    peak : bytes that an eager call takes besides its inputs.
    """

    method: str
    median: float
    low: float
    high: float
    floor: float
    peak: int

    @property
    def fraction(self) -> float:
        """Floor over median: 1 cannot be beaten."""
        return self.floor / self.median


def cuda_torch() -> Any:
    """The torch module on a machine with a CUDA device.

    Raises
    ------
    NoGpuError
        When there is no torch, or it finds no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise NoGpuError(
            f"this runs through PyTorch on a GPU, and PyTorch cannot be imported ({error}): "
            "pip install 'verikda[torch]'"
        ) from None
    if not torch.cuda.is_available():
        raise NoGpuError(
            f"this needs a CUDA GPU, and PyTorch {torch.__version__} finds none: "
            "run it on a machine with one (verikda doctor shows what this one has)"
        )
    return torch


def functions_of(target: str) -> dict[str, Function] | str:
    """The functions of a target by rule, or one line that says why it cannot be used.

    Raises
    ------
    ValueError
        For a name that is not one of `PLACES`.
    """
    if target not in PLACES:
        raise ValueError(f"bench knows no target {target!r}; use {' or '.join(PLACES)}")
    try:
        return {rule: getattr(importlib.import_module(module), name) for rule, (module, name) in PLACES[target].items()}
    except Exception as error:  # a peer's import can fail in any way, and its row says how
        return f"cannot be imported: {type(error).__name__}: {error}".splitlines()[0]


def copy_bandwidth(torch: Any) -> float:
    """Bytes per second of a large copy on the device, bytes read plus bytes written."""
    source = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    times = sample(torch, [lambda i: target.copy_(source)], 10)[0]
    return float(2 * source.numel() * 4 / (statistics.median(times) * 1e-6))


def sample(torch: Any, runs: Sequence[Callable[[int], Any]], repeats: int) -> list[list[float]]:
    """Microseconds of each run by events, the runs taking turns; each is called with a number that never repeats."""
    for i in range(WARM_UP):
        for j, run in enumerate(runs):
            run(i * len(runs) + j)
    torch.cuda.synchronize()
    pairs: list[list[tuple[Any, Any]]] = [[] for _ in runs]
    for i in range(repeats):
        for j, run in enumerate(runs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run(i * len(runs) + j)
            end.record()
            pairs[j].append((start, end))
    torch.cuda.synchronize()
    return [[1e3 * start.elapsed_time(end) for start, end in pair] for pair in pairs]


def summarise(times: Sequence[float], method: str, floor: float, peak: int) -> Timing:
    """The median and the spread of some times."""
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return Timing(method, statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], floor, peak)


@cache
def small_call(gates: shapes.Gates) -> Call:
    """A call with these gates that the noise floor can judge in seconds; one object, so that peers share its floor."""
    w = Workload(1, 130, 2, gates)
    gate = {"fast": ("random", 2.5), "slow": ("slow", 2.0), "none": ("random", 1.0)}[gates]
    case = Case(
        lengths=(w.T,), heads=w.H, K=shapes.K, V=shapes.V, dtype="bfloat16", rule=w.rule,
        gate_regime=gate[0] if w.rule == "kda" else "random", gate_magnitude=gate[1],
        beta_dtype="same" if w.rule == "delta" else "float32",
    )  # fmt: skip
    return make_call(case)


def floor_verdict(function: Function, target: str, call: Call) -> str:
    """Verdict of `verikda.floor` and the worst ratio, such as "pass, worst 1.3 (dg)"."""
    from verikda.targets.torch_function import TorchFunction

    wrapped = TorchFunction(function, target, contract="storage16", swallowed=("chunk_size",))
    result = wrapped.run(call)
    verdict = judge(
        {n: x for n, x in result.outputs.items() if n != "ht"}, result.dtypes, call.problem,
        storage16("bfloat16", call.chunk_size), backward=True,
    )  # fmt: skip
    ratios = {n: j.ratio for n, j in verdict.outputs.items() if j.ratio is not None}
    worst = max(ratios, key=lambda n: ratios[n], default="")
    return f"{verdict.verdict}, worst {ratios[worst]:.2f} ({worst})" if worst else verdict.verdict


def objection(errors: Mapping[str, float], floor: str) -> str:
    """Why a target with these errors is not timed; empty where it is green."""
    if not errors:
        return "not checked: no output was compared"
    bad = {n: e for n, e in errors.items() if not e <= REL_LIMIT}
    if bad:
        return "wrong: relative L2 against float64 of " + ", ".join(f"{n} {e:.2g}" for n, e in bad.items())
    if not floor.startswith("pass"):
        return f"{'wrong' if floor.startswith('fail') else 'not shown right'}: noise floor says {floor or 'nothing'}"
    return ""


def answers(torch: Any, row: Row, function: Function, device: str = "cuda") -> dict[str, Array]:
    """Some heads of what a target gives at the full shape of its workload; fills in the floor verdict of the row."""
    w = row.workload
    given = shapes.draw(torch, w, 0, device)
    if device == "cuda":
        # The allocator hands this memory out again, so what is read before it is written reads NaN.
        torch.full((1 << 31,), float("nan"), device=device)
    made = shapes.both_ways(torch, function, given)
    alone = shapes.forward_only(torch, function, given)["o"]
    row.floor_verdict = floor_verdict(function, row.target, small_call(w.gates))
    return shapes.heads({**made, "o without gradients": alone}, shapes.sampled_heads(w))


def compare(row: Row, found: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    """Fill in the errors of a row and why it is not timed."""
    truth = {**wanted, "o without gradients": wanted["o"]}
    row.errors = {n: shapes.relative_l2(found[n], x) for n, x in truth.items()}
    row.reason = objection(row.errors, row.floor_verdict)


def peak_bytes(torch: Any, run: Callable[[], Any]) -> int:
    """Bytes that a call takes at its peak, beyond what is allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def captured(torch: Any, run: Callable[[int], Any], sets: int) -> Callable[[int], Any]:
    """`run` as replays of one graph for each set of inputs; all graphs share their memory, as calls in turn would."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run(0)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    pool, graphs = torch.cuda.graph_pool_handle(), []
    for i in range(sets):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run(i)
        graphs.append(graph)
    return lambda i: graphs[i % sets].replay()


def time_rows(torch: Any, rows: Sequence[Row], known: Mapping[str, Mapping[str, Function]], bandwidth: float) -> None:
    """Time the green rows of one workload, taking turns; fill in their times."""
    if not rows:
        return
    w = rows[0].workload
    n = shapes.input_sets(w, len(rows))
    sets = [shapes.draw(torch, w, 1 + i) for i in range(n)]
    for mode, one in (("fwd", shapes.forward_only), ("fwd+bwd", shapes.both_ways)):
        floor = 1e6 * shapes.least_bytes(w, mode != "fwd") / bandwidth
        runs: list[Callable[[int], Any]] = []
        labels = []
        for row in rows:
            function = known[row.target][w.rule]

            def eager(i: int, function: Function = function, one: Callable[..., Any] = one) -> None:
                one(torch, function, sets[i % n])

            eager(0)
            peak = peak_bytes(torch, lambda eager=eager: eager(0))  # type: ignore[misc]
            try:
                runs.append(captured(torch, eager, n))
                labels.append(("graph", peak))
            except Exception as error:  # some operators cannot be captured; their time then has the launches in it
                torch.cuda.synchronize()
                runs.append(eager)
                labels.append((f"eager ({type(error).__name__} under capture)", peak))
        for row, times, (method, peak) in zip(rows, sample(torch, runs, REPEATS), labels, strict=True):
            row.times[mode] = summarise(times, method, floor, peak)
        del runs
        torch.cuda.empty_cache()


def bench(
    torch: Any,
    targets: Sequence[str],
    todo: Sequence[Workload],
    say: Callable[[str], None],
    done: Callable[[Sequence[Row], float], None],
) -> tuple[list[Row], float]:
    """Check all, then time one workload after another; the rows and the copy bandwidth.

    `done` gets the rows of each workload as soon as they are final, so that a run that is cut short keeps what it had.
    """
    functions = {t: functions_of(t) for t in targets}
    known = {t: f for t, f in functions.items() if not isinstance(f, str)}
    rows = [Row(t, w, reason=f if isinstance(f, str) else "") for w in todo for t, f in functions.items()]
    if not known:
        done(rows, 0.0)
        return rows, 0.0
    bandwidth = copy_bandwidth(torch)
    say(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; float64 truth of two heads of each of {len(todo)} workloads")
    # The truths are found by other processes while kernels compile, and all are there before anything is timed.
    with ProcessPoolExecutor(min(len(todo), cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        problems = [shapes.slice_problem(shapes.draw(torch, w, 0), shapes.sampled_heads(w)) for w in todo]
        futures = dict(zip(todo, [pool.submit(shapes.truth, p) for p in problems], strict=True))
        found = []
        for row in rows:
            if row.target in known:
                try:
                    found.append((row, answers(torch, row, known[row.target][row.workload.rule])))
                except Exception as error:  # a target may fail in any way, and its row says how
                    row.reason = f"crashed: {type(error).__name__}: {error}".splitlines()[0]
        for row, heads in found:
            compare(row, heads, futures[row.workload].result())
    for row in rows:
        say(f"{row.target} {row.workload.title} {row.workload.shape}: {row.reason or 'right'}")
    for w in todo:
        mine = [r for r in rows if r.workload == w]
        green = [r for r in mine if not r.reason]
        try:
            time_rows(torch, green, known, bandwidth)
        except Exception as error:
            for row in green:
                row.reason = f"crashed while it was timed: {type(error).__name__}: {error}".splitlines()[0]
        torch.cuda.empty_cache()
        done(mine, bandwidth)
    return rows, bandwidth


def markdown(rows: Sequence[Row], bandwidth: float, device: str) -> str:
    """The summary: times beside floors, then the errors on which the times rest."""
    lines = [
        f"# Speed on {device}", "",
        f"K = V = {shapes.K}, bfloat16; KDA with float32 log gates. Kernel sources {source_hash()}. "
        f"Microseconds, median (10th to 90th percentile) of {REPEATS}. Floor: fewest bytes at {bandwidth / 1e12:.2f} "
        "TB/s, a copy measured in this run.", "",
        "| B,T,H | workload | mode | target | time | floor | floor/time | extra memory, MB | by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        head = f"| {r.workload.shape} | {r.workload.title} |"
        if r.reason:
            lines.append(f"{head} - | {r.target} | not timed: {r.reason.replace('|', '/')} | | | | |")
        for mode, t in r.times.items():
            lines.append(
                f"{head} {mode} | {r.target} | {t.median:.0f} ({t.low:.0f} to {t.high:.0f}) | {t.floor:.0f} | "
                f"{t.fraction:.0%} | {t.peak / 1e6:.0f} | {t.method} |"
            )
    names = list(dict.fromkeys(n for r in rows for n in r.errors))
    lines += ["", "Relative L2 against the float64 recurrence, first and last head of the timed shape:", ""]
    lines += [f"| B,T,H | workload | target | {' | '.join(names)} | noise floor |", "|---" * (len(names) + 4) + "|"]
    for r in rows:
        if r.errors:
            cells = " | ".join(f"{r.errors[n]:.1e}" if n in r.errors else "" for n in names)
            lines.append(f"| {r.workload.shape} | {r.workload.title} | {r.target} | {cells} | {r.floor_verdict} |")
    return "\n".join(lines) + "\n"


def record_rows(record: Record, rows: Sequence[Row], bandwidth: float) -> None:
    """A "timing" line for each row."""
    for r in rows:
        record.write({"kind": "timing", "kernels": source_hash(), "bandwidth": bandwidth, **asdict(r)})


def exit_status(rows: Sequence[Row]) -> int:
    """FOUND where a target was wrong or crashed, NOTHING where nothing was timed, else TIMED."""
    if any(r.reason.startswith(("wrong", "crashed")) for r in rows):
        return FOUND
    return TIMED if any(r.times for r in rows) else NOTHING


def bench_command(targets: Sequence[str], shape_set: str, json_path: Path | None, summary: Path | None) -> int:
    """Bench, print the summary, write the files; the exit status.

    Raises
    ------
    NoGpuError, ValueError
        Where nothing can be timed here, or for a target or set of shapes that is not known.
    """
    from verikda import show

    todo = shapes.workloads(shape_set)
    for target in targets:
        if target not in PLACES:
            raise ValueError(f"bench knows no target {target!r}; use {' or '.join(PLACES)}")
    torch = cuda_torch()
    out = show.console()
    device = str(torch.cuda.get_device_name())
    record = Record(json_path)
    record.write(
        {"kind": "bench", "device": device, "kernels": source_hash(), "repeats": REPEATS, "environment": environment()}
    )
    rows, bandwidth = bench(
        torch, targets or tuple(PLACES), todo, lambda text: out.print(text, markup=False),
        lambda some, rate: record_rows(record, some, rate),
    )  # fmt: skip
    record.close()
    text = markdown(rows, bandwidth, device)
    if summary is not None:
        summary.parent.mkdir(parents=True, exist_ok=True)
        summary.write_text(text, encoding="utf-8")
    out.print(text, markup=False, soft_wrap=True)
    return exit_status(rows)
