"""What `verikda probe` does, apart from reading the command line.

Its JSON Lines are of the kinds "run", "frontier", "drift", "pool", "finding", "lost" and "end", see `verikda.record`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from verikda import show
from verikda.call import Call, ContextLost, Result
from verikda.choose import choose_listed
from verikda.environment import environment
from verikda.finding import Finding, message
from verikda.probes.drift import Drift, drift_case, drifts
from verikda.probes.frontier import KINDS, Frontier, frontiers
from verikda.probes.pool import pool_machine
from verikda.probes.pool_run import EXAMPLES, STEPS, PoolReport, run_pool
from verikda.record import Record, check_folders, check_outputs
from verikda.run_case import CaseReport
from verikda.status import status_of
from verikda.targets import resolve
from verikda.targets.base import Target, TargetError


class _Watched:
    """A target that remembers the call that ended its CUDA context: a probe would go on, and could not."""

    def __init__(self, inner: Target) -> None:
        self._inner = inner
        self.name, self.capabilities, self.contract = inner.name, inner.capabilities, inner.contract
        self.lost = ""

    def run(self, call: Call) -> Result:
        try:
            return self._inner.run(call)
        except ContextLost as error:
            p = call.problem
            shape = "B,T,H,K = " + ",".join(map(str, p.q.shape)) + f", HV,V = {p.v.shape[2]},{p.v.shape[3]}"
            self.lost = f"a call ended the CUDA context ({call.dtypes['q']}, {shape}): {error}"
            raise


@dataclass
class _Run:
    """One run of the command: where it writes, and what it has seen."""

    target: _Watched
    out: Console
    record: Record
    findings: Path
    seed: int
    tokens: int
    verdicts: list[str] = field(default_factory=list)

    def seen(self, results: Iterable[Any], into: list[Any]) -> None:
        """Record each result as it comes, and keep it for the table."""
        for result in results:
            into.append(result)
            self.verdicts.append(result.verdict)
            self.record.write(result.line)

    def keep(self, finding: Finding) -> None:
        """Write a finding and say it."""
        path = finding.write(self.findings)
        self.record.write(
            {"kind": "finding", "file": str(path), "check": finding.check, "case": finding.case.to_dict()}
        )
        replay = f"verikda replay {path}"
        show.say(self.out, message(finding.target, finding.failures, finding.case, replay))


def probe_command(
    target_name: str,
    *,
    only: str | None,
    json_path: Path | None,
    findings: Path,
    seed: int,
    tokens: int,
    contract: str | None,
) -> int:
    """Run the probes on one target, print a table for each; the exit status."""
    chosen = choose_listed("--only", "probe", PROBES, only)
    check_outputs(json=json_path)
    check_folders(findings=findings)
    target = _Watched(resolve(target_name, contract=contract))
    if only is not None and "pool" in chosen:
        pool_machine(target)  # says why it cannot be asked for here
    if "drift" in chosen:
        for dtype in target.capabilities.dtypes:
            drift_case(target, dtype, tokens, seed)  # too many tokens are refused before hours of the others
    run = _Run(target, show.console(), Record(json_path), findings, seed, tokens)
    settings = {"probes": list(chosen), "seed": seed, "tokens": tokens}
    run.record.write({"kind": "run", "target": target.name, "settings": settings, "environment": environment()})
    interrupted = False
    try:
        for name in chosen:
            PROBES[name](run)
    except KeyboardInterrupt:
        interrupted = True
    except TargetError:
        if not target.lost:
            raise
    if target.lost:
        run.verdicts.append("fail")
        run.record.write({"kind": "lost", "detail": target.lost})
        show.say(run.out, f"{target.lost}; nothing can be run after it in this process")
    verdict = next((v for v in ("fail", "pass") if v in run.verdicts), "inconclusive")
    run.record.write({"kind": "end", "verdict": verdict, "interrupted": interrupted})
    run.record.close()
    stopped = " (interrupted)" if interrupted else ""
    run.out.print(f"{show.coloured(verdict)}  {escape(target.name)}: {', '.join(chosen)}{stopped}")
    return status_of(verdict)


def _frontier(run: _Run) -> None:
    run.out.print("frontier: largest gate, nats per token, at which every output and gradient is right", markup=False)
    found: list[Frontier] = []
    try:
        run.seen(frontiers(run.target, run.seed), found)
    finally:
        rows = show.table("gates", "dtype", "C", *_COLUMNS, "verdict", "says")
        for f in found:
            a = f.analytic
            naive = f"{a['start']:.3g}" + (f" ({a['float16 start']:.3g})" if "float16 start" in a else "")
            rows.add_row(
                f.kind, f.dtype, str(f.chunk), _reach(f.finite, f), _reach(f.within, f), naive, f"{a['middle']:.3g}",
                f"{a['16-row block']:.3g}", show.coloured(f.verdict), escape(_says(f)),
            )  # fmt: skip
        run.out.print(rows)
        for kind in dict.fromkeys(f.kind for f in found):
            run.out.print(f"{kind}: {KINDS[kind].text}", markup=False)
        run.out.print(
            "naive, middle, 16 rows: where factors anchored at a chunk's start, its middle or the start of 16 rows "
            "leave the range of float32 (of float16)", markup=False,
        )  # fmt: skip
    for report in _first_of_each_kind(found):
        failed = next(o for o in report.outcomes if o.verdict == "fail")
        case = report.case
        run.keep(Finding(run.target.name, failed.check, case, False, failed.failures, case, report.ran))


_COLUMNS = ("finite up to", "in floor up to", "naive", "middle", "16 rows")


def _says(f: Frontier) -> str:
    """What a failure looks like, short."""
    if f.like:
        return f"as if anchored at {f.like}"
    if f.report is not None:
        return "wrong: " + ", ".join(x.output for x in f.report.failures)
    return f.detail[:40]


def _reach(limit: float | None, f: Frontier) -> str:
    if f.verdict == "refused":
        return "-"
    if math.isinf(f.top):
        return "yes" if limit is None else "no"
    return f"none up to {f.top:.4g}" if limit is None else f"{limit:.3g}" if limit else "nothing"


def _first_of_each_kind(found: list[Frontier]) -> Iterator[CaseReport]:
    """The first failure of each kind of gate: one file each is enough."""
    kinds: set[str] = set()
    for f in found:
        if f.report is not None and f.kind not in kinds:
            kinds.add(f.kind)
            yield f.report


def _drift(run: _Run) -> None:
    run.out.print(f"drift: error over noise floor along {run.tokens} tokens, slow gates", markup=False)
    found: list[Drift] = []
    try:
        run.seen(drifts(run.target, run.tokens, run.seed), found)
    finally:
        rows = show.table("output", "dtype", "first", "middle", "last", "worst", "growth", "verdict", "says")
        for d in found:
            r = d.ratios
            ends = [f"{x:.3g}" for x in (r[0], r[len(r) // 2], r[-1])] if len(r) > 1 else ["", "", ""]
            worst = f"{max(r):.3g}" if r else ""
            growth = "" if d.growth is None else f"{d.growth:.3g}"
            rows.add_row(
                d.output, d.dtype, *ends, worst, growth, show.coloured(d.verdict),
                escape("; ".join(text for text in (d.says, d.detail) if text)),
            )  # fmt: skip
        run.out.print(rows)
        for case in dict.fromkeys(d.case for d in found if d.verdict == "fail"):
            run.out.print(f"the call: {case.to_json()}", markup=False)


def _pool(run: _Run) -> None:
    run.out.print(f"pool: at least {EXAMPLES} pools of states, up to {STEPS} steps each", markup=False)
    if not run.target.capabilities.initial_state:
        run.out.print("not run: the target takes no initial state", markup=False)
        run.record.write({"kind": "pool", "verdict": "inconclusive", "counts": {}, "steps": []})
        return
    found: list[PoolReport] = []
    run.seen([run_pool(run.target, seed=run.seed)], found)
    (report,) = found
    rows = show.table("pools", "calls right", "inconclusive", "refused", "verdict")
    counts = [str(report.counts.get(name, 0)) for name in ("pools", "pass", "inconclusive", "refused")]
    rows.add_row(*counts, show.coloured(report.verdict))
    run.out.print(rows)
    if report.failure is not None:
        run.out.print(report.message, markup=False)
    if report.finding is not None:
        run.keep(report.finding)


PROBES: dict[str, Callable[[_Run], None]] = {"frontier": _frontier, "drift": _drift, "pool": _pool}
"""The probes, in the order in which they run."""
