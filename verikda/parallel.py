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
from verikda.interrupts import Worker, Workers, held, interrupt, on_stop
from verikda.run_case import CaseReport
from verikda.search import Search, Settings, Summary

ENDED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit status of a share that SIGTERM has ended: before it began, and after it kept what it had."""


def search_part(
    pipe: Connection,
    name: str,
    contract: str | None,
    settings: Settings,
    checks: tuple[str, ...],
    first: tuple[Case, ...],
) -> None:
    """Run one share in this process: every n-th case of the fixed start, then cases of its own seed.

    SIGTERM ends the search in a way that keeps what it found, and then the process, with a status in `ENDED`.
    """
    from verikda.checks import named
    from verikda.targets import resolve

    def send(message: CaseReport | Finding) -> None:
        with held():  # half a message is none
            try:
                pipe.send(message)
            except BrokenPipeError:  # who started this process is gone
                interrupt()

    with suppress(KeyboardInterrupt), on_stop():
        part, parts = settings.part
        own = replace(settings, checks=named(checks))
        target = resolve(name, contract=contract)
        if not Search(target, own, first=first[part::parts], on_report=send, on_finding=send).run().interrupted:
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
) -> Summary:
    """Run `jobs` shares at once and add up what they report. Call it from the main thread.

    The first Ctrl-C or SIGTERM asks the processes to end their search, the second one kills them. One that is asked by
    somebody else ends the search of all.

    Raises
    ------
    ChildProcessError
        When a process ends before its share does; what it had reported has been passed on.
    """
    whole = Summary(name)
    seen: set[tuple[str, str]] = set()
    workers: dict[Connection, Worker] = {}
    checks = tuple(c.name for c in settings.checks)
    light = replace(settings, checks=())  # checks hold functions; their names travel instead

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
                process = Worker(target=search_part, args=(there, name, contract, own, checks, first))
                process.start()
                there.close()
                workers[here] = process
                if whole.interrupted:  # while it was started
                    process.terminate()
            while workers:
                for pipe in wait(list(workers)):
                    assert isinstance(pipe, Connection)
                    try:
                        message = pipe.recv()
                    except (EOFError, OSError):  # the latter in the middle of a message
                        if _end(workers, pipe, whole.interrupted) and not whole.interrupted:
                            stop()
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
    return whole


def _end(workers: dict[Connection, Worker], pipe: Connection, interrupted: bool) -> bool:
    """Take leave of the process whose pipe has ended; whether it was asked to end."""
    process = workers.pop(pipe)
    process.join()
    pipe.close()
    if process.exitcode in ENDED:
        return True
    if process.exitcode and not interrupted:
        raise ChildProcessError(
            f"a process of the search ended with exit status {process.exitcode} in the middle of its share; "
            "run with --jobs 1 to see where"
        )
    return False
