"""Which of the known faults does a target have? The recipes of the zoo, run on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from verikda import show
from verikda.case import Case
from verikda.checks import Failure, named
from verikda.finding import Finding
from verikda.interrupts import processes
from verikda.record import check_folders
from verikda.run_case import run_case
from verikda.status import NOTHING, PASS, status_of
from verikda.targets import resolve
from verikda.targets.base import Target
from verikda.zoo.faults import Fault
from verikda.zoo.recipes import RECIPES, fitted
from verikda.zoo.specimens import SPECIMENS, Specimen


@dataclass(frozen=True)
class Known:
    """What the recipe of one fault said of a target.

    Attributes
    ----------
    subject : the planted fault.
    verdict : fail, pass, inconclusive, refused, or "not run".
    failures : on the first of its cases that fails, `case`.
    alike : whether exactly the outputs fail that fail for the planted fault.
    reason : why it was not run, or could not be told.
    lost : whether a call ended the CUDA context, so that nothing more can be run in its process.
    """

    subject: Specimen
    verdict: str
    case: Case | None = None
    failures: tuple[Failure, ...] = ()
    alike: bool = False
    reason: str = ""
    ran: str = ""
    lost: bool = False


def tried(target: Target, subject: Specimen) -> Known:
    """Run the recipe of one fault."""
    fault = Fault.__members__.get(subject.name)
    if fault is None:
        return Known(subject, "not run", reason="planted in the CUDA sources, which have no recipes")
    checks = named(subject.kills)
    cases = [fitted(knobs, target.capabilities) for knobs in RECIPES[fault]]
    verdicts: Counter[str] = Counter()
    reason = ""
    for case in cases:
        if isinstance(case, str):
            continue
        report = run_case(target, case, checks)
        if report.verdict == "fail":
            planted = run_case(subject.make(), case, checks)
            alike = outputs(planted.failures) == outputs(report.failures)
            return Known(subject, "fail", case, report.failures, alike, ran=report.ran, lost=report.lost)
        verdicts[report.verdict] += 1
        doubts = (*(o.detail for o in report.outcomes if o.verdict == report.verdict), *report.skipped.values())
        reason = next((text for text in doubts if text), reason)
    if isinstance(cases[0], str):  # the others alone do not show it
        return Known(subject, "not run", reason=cases[0])
    for verdict in ("pass", "inconclusive", "refused"):
        if verdicts[verdict]:
            return Known(subject, verdict, reason="" if verdict == "pass" else reason)
    raise AssertionError("a case that ran has a verdict")


def outputs(failures: tuple[Failure, ...]) -> set[tuple[str, str]]:
    """(check, output) of every failure."""
    return {(f.check, f.output) for f in failures}


def tried_all(name: str, faults: list[str], jobs: int) -> Generator[Known, None, None]:
    """Run the recipes on the target of this name, `jobs` at a time; the results in the order of `faults`.

    Closing it ends what still runs.

    Raises
    ------
    ChildProcessError
        When the target takes one of the processes with it.
    """
    if jobs == 1:
        target = resolve(name)
        for fault in faults:
            yield tried(target, SPECIMENS[fault])
        return
    with processes(jobs) as pool:
        for done in [pool.submit(_tried_by_name, name, fault) for fault in faults]:
            yield done.result()


def _tried_by_name(name: str, fault: str) -> Known:
    return tried(_target(name), SPECIMENS[fault])


_target = cache(resolve)


def known_faults(name: str, names: list[str], findings: Path, jobs: int = 1) -> int:
    """Run the recipes on a target, print what it has, write a finding for each failing case; the exit status.

    An interrupt, a call that ends the CUDA context and a process that ends keep what was found.
    """
    out = show.console()
    target = resolve(name)
    check_folders(findings=findings)
    results: list[Known] = []
    files: dict[Path, list[str]] = {}
    ended = ""
    try:
        with show.progress(out, len(names), target.name) as step, closing(tried_all(name, names, jobs)) as all_tried:
            for fault, known in zip(names, all_tried, strict=True):
                results.append(known)
                step(f"{fault} {known.verdict}")
                if known.case is not None:
                    check = known.failures[0].check
                    finding = Finding(name, check, known.case, False, known.failures, known.case, known.ran)
                    files.setdefault(finding.write(findings), []).append(fault)
                if known.lost:
                    ended = f"{fault}: a call ended the CUDA context"
                    break
    except KeyboardInterrupt:
        out.print(f"interrupted after {len(results)} of {len(names)}")
    except ChildProcessError as error:
        ended = str(error)
    if ended:
        show.say(out, f"ended after {len(results)} of {len(names)}: {ended}")
    status = _printed(out, target.name, results, files)
    return NOTHING if ended and status == PASS else status


def _printed(out: Console, name: str, results: list[Known], files: dict[Path, list[str]]) -> int:
    """Print the results; the exit status."""
    rows = show.table("fault", "verdict", "public reports", "says", "fails")
    for k in results:
        if k.verdict == "fail":
            which = ", ".join(dict.fromkeys(f.output for f in k.failures))
            alike = ", as the planted fault" if k.alike else ""
            reports, says = ", ".join(k.subject.reports), escape(k.subject.what)
            rows.add_row(k.subject.name, show.coloured("fail"), reports, says, f"{k.failures[0].check}: {which}{alike}")
    if files:
        out.print(rows)
        out.print("A failing case shows a fault of this kind, or one with the same effect:")
        for path, faults in files.items():
            show.say(out, f"  verikda replay {path}  ({', '.join(faults)})")
    for reason, n in Counter(k.reason for k in results if k.verdict not in ("pass", "fail")).most_common():
        out.print(f"not told ({n}): {reason}", markup=False)
    counts = Counter(k.verdict for k in results)
    verdict = "fail" if counts["fail"] else "pass" if counts["pass"] else "inconclusive"
    told = ", ".join(f"{n} {v}" for v, n in counts.most_common())
    out.print(f"{show.coloured(verdict)}  {name}: {len(results)} known faults: {told}")
    return status_of(verdict)
