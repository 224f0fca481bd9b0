"""A search split over processes: each has every n-th case and its own seed, and reports each result as it comes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType

from verikda.case import Case
from verikda.finding import Finding
from verikda.run_case import CaseReport
from verikda.search import Search, Settings, Summary


class Line:
    """The pipe to the process that started this one; SIGTERM becomes a KeyboardInterrupt, but never inside a message.

    A KeyboardInterrupt ends a search in a way that keeps what it found.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sending = self._asked = False
        signal.signal(signal.SIGTERM, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        if not self._sending:
            self._stop()

    def _stop(self) -> None:
        self._asked = False
        raise KeyboardInterrupt

    def send(self, message: CaseReport | Finding) -> None:
        """Send one result."""
        self._sending = True
        self._pipe.send(message)
        self._sending = False
        if self._asked:
            self._stop()


def search_part(
    pipe: Connection,
    name: str,
    contract: str | None,
    settings: Settings,
    checks: tuple[str, ...],
    first: tuple[Case, ...],
) -> None:
    """Run one share in this process: every n-th case of the fixed start, then cases of its own seed."""
    from verikda.checks import named
    from verikda.targets import resolve

    with suppress(KeyboardInterrupt):
        send = Line(pipe).send
        part, parts = settings.part
        own = replace(settings, checks=named(checks))
        Search(resolve(name, contract=contract), own, first=first[part::parts], on_report=send, on_finding=send).run()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing is left that could be interrupted


def search_all(
    name: str,
    contract: str | None,
    settings: Settings,
    jobs: int,
    first: tuple[Case, ...],
    on_report: Callable[[CaseReport], None],
    on_finding: Callable[[Finding], None],
) -> Summary:
    """Run `jobs` shares at once and add up what they report. Call it from the main thread.

    The first Ctrl-C asks the processes to end their search, the second one kills them.

    Raises
    ------
    ChildProcessError
        When a process ends before its share does; what it had reported has been passed on.
    """
    whole = Summary(name)
    seen: set[tuple[str, str]] = set()
    workers: dict[Connection, SpawnProcess] = {}
    checks = tuple(c.name for c in settings.checks)
    light = replace(settings, checks=())  # checks hold functions; their names travel instead
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when a process imports NumPy: set before it is started
    context = multiprocessing.get_context("spawn")

    def stop(number: int, frame: FrameType | None) -> None:
        for process in workers.values():
            if whole.interrupted:
                process.kill()
            else:
                process.terminate()
        whole.interrupted = True

    # A terminal sends Ctrl-C to all processes; those started while it is ignored go on ignoring it.
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for part in range(jobs):
            here, there = context.Pipe(duplex=False)
            own = replace(light, part=(part, jobs))
            process = context.Process(target=search_part, args=(there, name, contract, own, checks, first))
            process.start()
            there.close()
            workers[here] = process
        signal.signal(signal.SIGINT, stop)
        while workers:
            for pipe in wait(list(workers)):
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except (EOFError, OSError):  # the latter in the middle of a message
                    _end(workers, pipe, whole.interrupted)
                    continue
                if isinstance(message, CaseReport):
                    whole.add(message)
                    on_report(message)
                    continue
                kinds = {(message.check, f.output) for f in message.failures}
                if not kinds <= seen:
                    seen |= kinds
                    whole.findings.append(message)
                    on_finding(message)
    finally:
        for process in workers.values():
            process.kill()
        signal.signal(signal.SIGINT, previous)
    return whole


def _end(workers: dict[Connection, SpawnProcess], pipe: Connection, interrupted: bool) -> None:
    """Take leave of the process whose pipe has ended."""
    process = workers.pop(pipe)
    process.join()
    pipe.close()
    if process.exitcode and not interrupted:
        raise ChildProcessError(
            f"a process of the search ended with exit status {process.exitcode} in the middle of its share; "
            "run with --jobs 1 to see where"
        )
