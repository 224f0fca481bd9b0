"""Clocks: calls that take turns, timed by events, in CUDA graphs and from the host; what the device itself can do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from verikda.targets.answer import context_ended

REPEATS = 30
WARM_UP = 3
HOST_REPEATS = 10
QUEUE = 4
"""Calls in a row of a peer whose streams events do not reach; their time is divided by it."""


class NoGpuError(ValueError):
    """Nothing can be timed here; one sentence says why."""


class DeviceLostError(Exception):
    """A call ended the CUDA context, so nothing can be run in this process any more; one sentence says in what."""


def check_context(torch: Any, what: str, advice: str) -> None:
    """Called after an error, which may be one that makes every later call fail.

    Parameters
    ----------
    what : was going on, as part of the sentence.
    advice : its end.

    Raises
    ------
    DeviceLostError
        When the device does not answer.
    """
    if context_ended(torch.cuda.synchronize):
        raise DeviceLostError(f"the CUDA context was lost while {what}; {advice}")


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


@dataclass(frozen=True)
class Run:
    """Something to time.

    Attributes
    ----------
    call : makes one call; gets a number that never repeats.
    wait : waits for calls whose streams events do not reach, None where they do.
    """

    call: Callable[[int], Any]
    wait: Callable[[], None] | None = None


@dataclass(frozen=True)
class Device:
    """What a device was seen to do in this run: copied bytes (read plus written) and bfloat16 operations per second."""

    name: str
    bandwidth: float
    tensor_rate: float

    def floor(self, nbytes: float, flops: float) -> float:
        """Microseconds below which no call that moves so much and multiplies so much can come."""
        return 1e6 * max(nbytes / self.bandwidth, flops / self.tensor_rate)


def measure_device(torch: Any) -> Device:
    """Name, copy bandwidth over 4 GiB, and rate of a bfloat16 product of two 8192 x 8192 matrices of normal numbers."""
    source = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    copies = sample(torch, [Run(lambda i: target.copy_(source))], 10)[0]
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    products = sample(torch, [Run(lambda i: a @ b)], 10)[0]
    return Device(
        str(torch.cuda.get_device_name()),
        2 * source.numel() * 4 / (1e-6 * statistics.median(copies)),
        2 * n**3 / (1e-6 * statistics.median(products)),
    )


def sample(torch: Any, runs: Sequence[Run], repeats: int) -> list[list[float]]:
    """Microseconds of each run, the runs taking turns."""
    count = iter(range(1 << 62))
    for _ in range(WARM_UP):
        for run in runs:
            run.call(next(count))
    for run in runs:
        if run.wait is not None:
            run.wait()
    torch.cuda.synchronize()
    pairs: list[list[tuple[Any, Any]]] = [[] for _ in runs]
    host: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for j, run in enumerate(runs):
            if run.wait is not None:
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(QUEUE):
                    run.call(next(count))
                run.wait()
                host[j].append(1e6 * (time.perf_counter() - started) / QUEUE)
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run.call(next(count))
            end.record()
            pairs[j].append((start, end))
    torch.cuda.synchronize()
    return [
        host[j] if run.wait is not None else [1e3 * start.elapsed_time(end) for start, end in pairs[j]]
        for j, run in enumerate(runs)
    ]


def host_times(torch: Any, run: Run) -> list[float]:
    """Microseconds from an idle device until a call is done, as the host sees them."""
    found = []
    for i in range(HOST_REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run.call(i)
        (run.wait or torch.cuda.synchronize)()
        found.append(1e6 * (time.perf_counter() - started))
    return found


def peak_bytes(torch: Any, call: Callable[[], Any]) -> int:
    """Bytes that a call takes at its peak from torch's allocator, beyond what is allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def captured(torch: Any, prepare: Sequence[Callable[[], Callable[[], Any]]]) -> Callable[[int], Any]:
    """Replays of one graph for each set of inputs; all graphs share their memory, as calls in turn would.

    Parameters
    ----------
    prepare : gives the call for each set of inputs. What it does before that call, such as the forward of a backward,
        is not part of the graph, but runs on the same stream, to which autograd ties the backward.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls = [make() for make in prepare]
        for _ in range(WARM_UP):
            calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    pool, graphs = torch.cuda.graph_pool_handle(), []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        # Threads of other libraries may ask the device for something meanwhile; that is no error of this capture.
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            call()
        graphs.append(graph)
    # A graph holds addresses: what a backward reads of its forward must live as long.
    return partial(_replay, graphs, calls)


def _replay(graphs: Sequence[Any], kept: Sequence[Callable[[], Any]], i: int) -> None:
    graphs[i % len(graphs)].replay()
