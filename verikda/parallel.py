"""A search split over processes: each has its share of the cases and a seed of its own; one summary comes out."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace

from verikda.case import Case
from verikda.finding import Finding
from verikda.run_case import CaseReport
from verikda.search import Search, Settings, Summary


def search_part(
    name: str,
    contract: str | None,
    settings: Settings,
    checks: tuple[str, ...],
    part: int,
    parts: int,
    first: tuple[Case, ...],
) -> tuple[Summary, list[CaseReport]]:
    """Run one share in this process: every `parts`-th case of the fixed start, then cases of its own seed."""
    from verikda.checks import named
    from verikda.targets import resolve

    reports: list[CaseReport] = []
    own = replace(settings, checks=named(checks), part=(part, parts))
    search = Search(resolve(name, contract=contract), own, first=first[part::parts], on_report=reports.append)
    return search.run(), reports


def search_all(
    name: str,
    contract: str | None,
    settings: Settings,
    jobs: int,
    first: tuple[Case, ...],
    on_part: Callable[[list[CaseReport]], None],
    on_finding: Callable[[Finding], None],
) -> Summary:
    """Run `jobs` shares at a time and merge them.

    Cases are cut into more shares than processes, so that reports arrive as shares end and an interrupt loses only
    the shares in flight.
    """
    shares = max(jobs, min(8 * jobs, settings.cases // 25))
    whole = Summary("")
    seen: set[tuple[str, str]] = set()
    checks = tuple(c.name for c in settings.checks)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when a process imports NumPy: set before it is started
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context)
    light = replace(settings, checks=())  # checks hold functions; their names travel instead
    try:
        waiting = [
            pool.submit(search_part, name, contract, light, checks, part, shares, first) for part in range(shares)
        ]
        for done in as_completed(waiting):
            summary, reports = done.result()
            whole.merge(summary)
            on_part(reports)
            for finding in summary.findings:
                kinds = {(finding.check, f.output) for f in finding.failures}
                if not kinds <= seen:
                    seen |= kinds
                    whole.findings.append(finding)
                    on_finding(finding)
    except KeyboardInterrupt:
        whole.interrupted = True
    finally:
        pool.shutdown(wait=not whole.interrupted, cancel_futures=True)
    return whole
