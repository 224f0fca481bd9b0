"""A search split over processes: each has every n-th case and its own seed, and reports each result as it comes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait

from verikda.case import Case
from verikda.finding import Finding
from verikda.interrupts import ALONE, Worker, Workers, held, how_ended, interrupt, on_stop
from verikda.run_case import CaseReport
from verikda.search import Search, Settings, Summary

ENDED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit status of a share that SIGTERM has ended: before it began, and after it kept what it had."""
LOOK = 1.0
"""Seconds without a message after which it is looked whether the processes are alive."""


def search_part(
    pipe: Connection,
    name: str,
    contract: str | None,
    settings: Settings,
    checks: tuple[str, ...],
    first: tuple[Case, ...],
) -> None:
    """Run one share in this process: every n-th case of the fixed start, then cases of its own seed.

    The last thing sent is None: without it the share has not come to its end. A text before it says that the share
    ended before its cases did. SIGTERM ends the search in a way that keeps what it found, and then the process, with a
    status in `ENDED`.
    """
    from verikda.checks import named
    from verikda.targets import resolve

    def send(message: CaseReport | Finding | str | None) -> None:
        with held():  # half a message is none
            try:
                pipe.send(message)
            except BrokenPipeError:  # who started this process is gone
                interrupt()

    with suppress(KeyboardInterrupt), on_stop():
        part, parts = settings.part
        own = replace(settings, checks=named(checks))
        target = resolve(name, contract=contract)
        summary = Search(target, own, first=first[part::parts], on_report=send, on_finding=send).run()
        for text in summary.lost:
            send(text)
        if not summary.interrupted:
            send(None)
            return
    sys.exit(ENDED[1])


def search_all(
    name: str,
    contract: str | None,
    settings: Settings,
    jobs: int,
    first: tuple[Case, ...],
    on_report: Callable[[CaseReport], None],
    on_finding: Callable[[Finding], None],
    on_lost: Callable[[str], None],
) -> Summary:
    """Run `jobs` shares at once and add up what they report. Call it from the main thread.

    A share that ends before its cases do, because the target took the process or its CUDA context with it, does not end
    the others: `on_lost` gets which one it was and how it ended.

    The first Ctrl-C or SIGTERM asks the processes to end their search, the second one kills them. One that is asked by
    somebody else ends the search of all.
    """
    whole = Summary(name)
    seen: set[tuple[str, str]] = set()
    workers: dict[Connection, Worker] = {}
    complete: set[Connection] = set()
    checks = tuple(c.name for c in settings.checks)
    light = replace(settings, checks=())  # checks hold functions; their names travel instead

    def end(pipe: Connection) -> None:
        process = workers.pop(pipe)
        process.join()
        pipe.close()
        if whole.interrupted or pipe in complete:
            return
        if process.exitcode in ENDED:
            stop()
        else:
            lose(f"{process.name} {how_ended(process.exitcode)} in the middle of its cases; {ALONE}")

    def lose(text: str) -> None:
        whole.lost.append(text)
        on_lost(text)

    def stop() -> None:
        for process in workers.values():
            if whole.interrupted:
                process.kill()
            else:
                process.terminate()
        whole.interrupted = True

    try:
        with on_stop(stop):
            for part in range(jobs):
                here, there = Workers().Pipe(duplex=False)
                own = replace(light, part=(part, jobs))
                words = (there, name, contract, own, checks, first)
                process = Worker(target=search_part, args=words, name=f"share {part + 1} of {jobs}")
                process.start()
                there.close()
                workers[here] = process
                if whole.interrupted:  # while it was started
                    process.terminate()
            while workers:
                ready = wait(list(workers), LOOK)
                for pipe in ready or [p for p, process in workers.items() if not process.is_alive()]:
                    assert isinstance(pipe, Connection)
                    try:
                        message = _received(pipe)
                    except (EOFError, OSError):  # the latter in the middle of a message
                        end(pipe)
                        continue
                    if message is None:
                        complete.add(pipe)
                    elif isinstance(message, str):
                        lose(message)
                    elif isinstance(message, CaseReport):
                        whole.add(message)
                        on_report(message)
                    elif not (kinds := {f.kind for f in message.failures}) <= seen:
                        seen |= kinds
                        whole.findings.append(message)
                        on_finding(message)
    finally:
        for process in workers.values():
            process.kill()
    return whole


def _received(pipe: Connection) -> CaseReport | Finding | str | None:
    """The next message of a process that has sent one, or has ended.

    Raises
    ------
    EOFError
        When it has ended: its end of the pipe may still be open, in a process that the target forked.
    """
    if not pipe.poll():
        raise EOFError
    message: CaseReport | Finding | str | None = pipe.recv()
    return message
