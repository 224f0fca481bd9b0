"""The whole bench: each workload checked on every target, then timed on those that are right, which take turns."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from verikda.bench import workloads as shapes
from verikda.bench.check import Verdict, answers, ask_truth, small_verdict, together
from verikda.bench.gpu import (
    REPEATS,
    Device,
    DeviceLostError,
    Run,
    captured,
    check_context,
    host_times,
    measure_device,
    peak_bytes,
    sample,
)
from verikda.bench.peers import Peer, Runner
from verikda.bench.rows import Row, Timing, compare
from verikda.bench.workloads import Gates, Mode, Workload
from verikda.interrupts import processes
from verikda.targets import TargetError, resolve

EAGER_REPEATS = 10
APART = "run the others without {}"


def pool_of(jobs: int) -> AbstractContextManager[Executor]:
    """Processes for the judgements; two cores are left to launch kernels."""
    return processes(max(1, min(jobs, (os.cpu_count() or 1) - 2)))


def bench(
    torch: Any,
    peers: Sequence[Peer],
    todo: Sequence[Workload],
    modes: Sequence[Mode],
    also_wrong: bool,
    say: Callable[[str], None],
    done: Callable[[Sequence[Row], Device], None],
) -> None:
    """Check and time one workload after another.

    `done` gets the rows of each workload as soon as they are final, so that a run that is cut short keeps what it had;
    where the device is lost, those of that workload too.

    Parameters
    ----------
    modes : what is timed, as far as a peer has it.
    also_wrong : time a target too whose errors are too large; its row keeps the reason.

    Raises
    ------
    DeviceLostError
        When a call ended the CUDA context.
    """
    device = measure_device(torch)
    say(f"{device.name}: copies {device.bandwidth / 1e12:.2f} TB/s, products {device.tensor_rate / 1e12:.0f} TFLOP/s")
    verdicts: dict[tuple[str, Gates, bool, int], Future[Verdict]] = {}
    with pool_of(2 * len(todo) + len(peers)) as pool:
        truths = {w: ask_truth(pool, w, shapes.draw(torch, w, 0)) for w in todo}
        for w in todo:
            mine = [Row(p.name, w, reason=p.refuses(w)) for p in peers]
            ready: list[tuple[Row, Peer, Runner, dict[str, Any]]] = []
            try:
                for row, peer in zip(mine, peers, strict=True):
                    if row.reason:
                        continue
                    try:
                        key = _judged(peer, w)
                        if key not in verdicts:
                            verdicts[key] = small_verdict(pool, resolve(key[0]), *key[1:])
                        runner = peer.make(torch, w)
                        ready.append((row, peer, runner, answers(torch, w, peer, runner)))
                    except (TargetError, ImportError) as error:
                        row.reason = f"not here: {error}".splitlines()[0]
                    except Exception as error:  # a peer may fail in any way, and its row says how
                        row.reason = failure("crashed", error)
                        check_context(torch, f"{peer.name} was called on {w.title} {w.shape}", APART.format(peer.name))
                wanted = together(w, [t.result() for t in truths.pop(w)])
                for row, peer, _, found in ready:
                    row.floor_verdict, row.floor_ratio = verdicts[_judged(peer, w)].result()
                    compare(row, found, wanted, "backward" in peer.modes(w))
                for row in mine:
                    say(f"{row.target} {w.title} {w.shape}: {row.reason or 'right'}")
                for mode in modes:
                    able = [(r, n) for r, p, n, _ in ready if mode in p.modes(w) and (not r.reason or also_wrong)]
                    time_mode(torch, w, mode, able, device)
            except DeviceLostError as lost:
                for row in mine:
                    row.reason = row.reason or f"not timed to the end: {lost}"
                done(mine, device)
                raise
            done(mine, device)


def _judged(peer: Peer, w: Workload) -> tuple[str, Gates, bool, int]:
    """Target, gates, safe_gate and heads of the small call whose verdict a row takes."""
    return peer.judged[w.gates], w.gates, bool(peer.safe_gate), w.H


def failure(what: str, error: BaseException) -> str:
    """One line of an exception."""
    return f"{what}: {type(error).__name__}: {error}".splitlines()[0]


@dataclass
class Timed:
    """One target while a mode is timed."""

    row: Row
    runner: Runner
    inputs: list[Any]
    run: Run
    peak: int | None
    wall: float
    events: float | None = None
    method: str = "queued"


def time_mode(torch: Any, w: Workload, mode: Mode, ready: Sequence[tuple[Row, Runner]], device: Device) -> None:
    """Fill in the times of one mode. A target that fails here is not timed any more; the others are.

    Raises
    ------
    DeviceLostError
        When a call ended the CUDA context.
    """
    what = f"{mode} of {w.title} {w.shape} was timed"
    n = shapes.input_sets(w, max(1, len(ready)))
    sets = [shapes.draw(torch, w, 1 + i) for i in range(n)] if ready else []
    alive = []
    for row, runner in ready:
        try:
            alive.append(_prepared(torch, mode, row, runner, sets))
        except Exception as error:
            row.reason = failure(f"crashed while {mode} was timed", error)
            check_context(torch, f"{what} on {row.target} alone", APART.format(row.target))
    try:
        _sample(torch, mode, alive, device.floor(shapes.least_bytes(w, mode), shapes.least_flops(w, mode)))
    except Exception as error:  # whose it is cannot be told
        for t in alive:
            t.row.reason = failure(f"crashed while {mode} was timed in turns", error)
        turns = ", ".join(t.row.target for t in alive)
        check_context(torch, f"{what} on {turns} in turns", "run the targets apart to see whose it is")
    del alive, sets
    torch.cuda.empty_cache()


def _prepared(torch: Any, mode: Mode, row: Row, runner: Runner, sets: Sequence[Mapping[str, Any]]) -> Timed:
    """The calls of one target, made once, and what a single call shows."""
    inputs = [runner.take(x) for x in sets]
    calls = [prepared(runner, mode, x) for x in inputs]
    run = Run(partial(_in_turn, calls), runner.wait if runner.queued else None)
    run.call(0)
    peak = None if runner.queued else peak_bytes(torch, calls[0])
    return Timed(row, runner, inputs, run, peak, statistics.median(host_times(torch, run)))


def _sample(torch: Any, mode: Mode, timed: Sequence[Timed], floor: float) -> None:
    """First plain calls, then graphs where they can be made; all targets take turns."""
    if not timed:
        return
    for t, times in zip(timed, sample(torch, [t.run for t in timed], EAGER_REPEATS), strict=True):
        if not t.runner.queued:
            t.events = statistics.median(times)
            t.run = Run(lambda i: None)  # what an eager backward keeps is freed before graphs are made
    for t in timed:
        if t.runner.queued:
            continue
        try:
            t.run = Run(captured(torch, [partial(prepared, t.runner, mode, x) for x in t.inputs]))
            t.method = "graph"
        except Exception as error:  # some operators cannot be captured; their time then has the launches in it
            torch.cuda.synchronize()
            t.run = Run(partial(_in_turn, [prepared(t.runner, mode, x) for x in t.inputs]))
            t.method = f"events ({type(error).__name__} under capture)"
    for t, times in zip(timed, sample(torch, [t.run for t in timed], REPEATS), strict=True):
        t.row.times[mode] = Timing(t.method, tuple(times), floor, t.wall, t.events, t.peak)


def _in_turn(calls: Sequence[Callable[[], Any]], i: int) -> Any:
    return calls[i % len(calls)]()


def prepared(runner: Runner, mode: Mode, x: Any) -> Callable[[], Any]:
    """The call of one mode on inputs that the runner has taken."""
    if mode == "backward":
        return runner.backward(x)
    return partial(runner.forward if mode == "forward" else runner.both, x)
