"""The bench's clocks, on a torch.cuda whose time goes on with the calls: turns, queues and graphs."""

from __future__ import annotations

import contextlib
import gc
import types
import weakref
from typing import Any

import numpy as np
import pytest

from verikda.bench import gpu
from verikda.bench.gpu import HOST_REPEATS, QUEUE, WARM_UP, Run, captured, sample


class FakeCuda:
    """What the bench asks of torch.cuda: events on a clock that calls advance, and graphs that replay nothing."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, fake = 0.0, self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                fake.now += tick
                self.at = fake.now

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at)

        class CUDAGraph:
            def replay(self) -> None:
                fake.now += 0.25

        class Stream:
            def wait_stream(self, other: Any) -> None:
                pass

        self.Event, self.CUDAGraph, self.Stream, self.captures = Event, CUDAGraph, Stream, True
        self.stream = lambda stream: contextlib.nullcontext()

    def current_stream(self) -> Any:
        return self.Stream()

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Any:
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        yield

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 1)

    def synchronize(self) -> None: ...
    def empty_cache(self) -> None: ...
    def reset_peak_memory_stats(self) -> None: ...
    def memory_allocated(self) -> int:
        return 10

    def max_memory_allocated(self) -> int:
        return 7_000_010


def test_peers_take_turns_and_each_is_timed_alone() -> None:
    class Fake:
        cuda = FakeCuda()

    calls: list[tuple[str, int]] = []

    def one(name: str, milliseconds: float) -> Any:
        def call(i: int) -> None:
            calls.append((name, i))
            Fake.cuda.now += milliseconds

        return call

    a, b = sample(Fake, [Run(one("a", 0.2)), Run(one("b", 0.7))], 5)
    np.testing.assert_allclose(a, [200.0] * 5)
    np.testing.assert_allclose(b, [700.0] * 5)
    assert [name for name, _ in calls] == ["a", "b"] * (WARM_UP + 5)
    assert [i for _, i in calls] == list(range(2 * (WARM_UP + 5)))
    assert {i % 3 for name, i in calls if name == "a"} == {0, 1, 2}


def test_calls_on_other_streams_are_queued_and_timed_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        cuda = FakeCuda()

    clock, calls, waits = [0.0], [], []
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: clock[0])

    def call(i: int) -> None:
        calls.append(i)
        clock[0] += 2e-6

    def wait() -> None:
        waits.append(len(calls))
        clock[0] += 2e-6

    (times,) = sample(Fake, [Run(call, wait)], 3)
    np.testing.assert_allclose(times, [(2 * QUEUE + 2) / QUEUE] * 3)
    assert len(calls) == WARM_UP + 3 * QUEUE
    assert waits == [WARM_UP, *(WARM_UP + QUEUE * (i + 1) for i in range(3))]
    assert gpu.host_times(Fake, Run(call, wait)) == pytest.approx([4.0] * HOST_REPEATS)


def test_a_graph_keeps_what_its_calls_read() -> None:
    """A graph holds the addresses of what a forward has saved for its backward, and not the tensors."""

    class Saved:
        pass

    seen: list[weakref.ref[Saved]] = []

    def make() -> Any:
        saved = Saved()
        seen.append(weakref.ref(saved))
        return lambda: saved

    replay = captured(types.SimpleNamespace(cuda=FakeCuda()), [make, make])
    gc.collect()
    assert all(saved() is not None for saved in seen)
    del replay
    gc.collect()
    assert [saved() for saved in seen] == [None, None]
