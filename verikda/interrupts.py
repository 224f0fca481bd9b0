"""Ctrl-C (SIGINT) and SIGTERM, which `timeout` and job schedulers send, ask for the same: end now, keep what there is.

`on_stop` hears both in the process that the user started. The processes that this one starts are `Worker`s: they do
not hear Ctrl-C, which a terminal sends to all of them, and end when this process ends them.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from types import FrameType
from typing import Any

from verikda.threads import one_thread

SAME = 1.0
"""Seconds in which a second signal is part of the first request: `timeout` signals its command, then the group."""
ALONE = "to see where, run it with --jobs 1 under a debugger"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class _State:
    last: float = -math.inf
    held: bool = False
    waiting: Callable[[], None] | None = None


_state = _State()


def interrupt() -> None:
    """What Python does on Ctrl-C.

    Raises
    ------
    KeyboardInterrupt
        Always.
    """
    raise KeyboardInterrupt


@contextmanager
def on_stop(act: Callable[[], None] = interrupt) -> Iterator[None]:
    """Call `act` on SIGINT and SIGTERM inside the block, in the main thread; nothing changes in other threads.

    A signal that is ignored, as SIGINT is by background jobs of a script, goes on being ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()
    handlers = {n: signal.getsignal(n) for n in _SIGNALS}
    before = {n: handler for n, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # forked by the code that is checked: none of this is its business
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)
            return
        now = time.monotonic()
        if now - _state.last < SAME:
            return
        _state.last = now
        if _state.held:
            _state.waiting = act
        else:
            act()

    for n in before:
        signal.signal(n, handle)
    try:
        yield
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


@contextmanager
def held() -> Iterator[None]:
    """Inside the block nothing is stopped halfway: `act` of `on_stop` is called at the end of the outermost one."""
    outer, _state.held = _state.held, True
    try:
        yield
    finally:
        _state.held = outer
        if not outer and (act := _state.waiting) is not None:
            _state.waiting = None
            act()


class Worker(SpawnProcess):
    """A process on one thread that ignores SIGINT from its first moment on, before any import; SIGTERM ends it."""

    def start(self) -> None:
        """Start it, in the main thread."""
        one_thread()
        with held():  # a process that has been started is known to those who end it
            resource_tracker.ensure_running()  # it unblocks what is blocked
            # A new process keeps what is blocked blocked. Ignoring it here would lose a Ctrl-C of this moment.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                super().start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


def how_ended(code: int | None) -> str:
    """An exit code of a process in words."""
    if code is not None and code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit status {code}"


class Workers(SpawnContext):
    """`multiprocessing` with `Worker` as its process; `made` are those of this context."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Worker] = []

    def Process(self, *args: Any, **kwargs: Any) -> Worker:  # type: ignore[override]
        """A worker that has not been started."""
        self.made.append(Worker(*args, **kwargs))
        return self.made[-1]


class _Pool(ProcessPoolExecutor):
    """What the first `submit` makes it has started when it returns: shutting down waits for threads that are there."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Hand over one call."""
        with held():
            return super().submit(fn, *args, **kwargs)


@contextmanager
def processes(jobs: int, initializer: Callable[[], None] | None = None) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes for the block; an exception that leaves it, KeyboardInterrupt too, ends them at once.

    Parameters
    ----------
    jobs : how many.
    initializer : runs first in each of them.

    Raises
    ------
    ChildProcessError
        When one of them ends before its work; the others are ended too.
    """
    workers = Workers()
    with _Pool(jobs, mp_context=workers, initializer=initializer) as pool:
        try:
            yield pool
        except BrokenProcessPool:
            pool.shutdown()
            codes = [process.exitcode for process in workers.made]
            # the pool ends the others by SIGTERM
            code = next((c for c in codes if c not in (0, -signal.SIGTERM)), -signal.SIGTERM)
            raise ChildProcessError(f"one of {jobs} processes {how_ended(code)} before its work; {ALONE}") from None
        except BaseException:
            for process in workers.made:
                process.kill()  # what they were at is lost in any case, and waiting for it may take minutes
            raise
