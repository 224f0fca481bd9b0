"""What `verikda check`, `replay` and `targets` do, apart from reading the command line."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from verikda import show
from verikda.call import Call
from verikda.capture_file import load_call
from verikda.checks import BY_NAME, CHECKS, named
from verikda.choose import choose_listed, choose_one
from verikda.environment import environment
from verikda.finding import Finding, failure_lines, load_case, message
from verikda.inputs import make_call
from verikda.parallel import search_all
from verikda.profiles import PROFILES
from verikda.record import Record, case_line, check_folders, check_outputs
from verikda.run_case import CaseReport, run_call, verdict_of
from verikda.search import Search, Settings, Summary
from verikda.status import PASS, status_of
from verikda.targets import available, made_here, resolve
from verikda.targets.contracts import DEFAULT, NAMES
from verikda.targets.function import FunctionTarget
from verikda.worst import Corpus

_TOLD = ("cases", "stratified", "long", "wide", "coherent", "brink", "turns", "seconds", "limit", "seed")
"""Settings that a record opens with."""


def check_command(
    target_name: str,
    *,
    profile: str,
    cases: int | None,
    seconds: float | None,
    seed: int,
    check_names: str | None,
    contract: str | None,
    json_path: Path | None,
    findings: Path,
    worst: Path | None,
    jobs: int = 1,
    summary_path: Path | None = None,
) -> int:
    """Search one target, print tables, write findings; the exit status."""
    out = show.console()
    chosen = choose_one("profile", PROFILES, profile)
    target = resolve(target_name, contract=contract)
    corpus = Corpus(worst)
    check_outputs(json=json_path, summary=summary_path)
    check_folders(findings=findings, worst=worst)
    if worst is not None and not worst.is_dir():
        raise ValueError(f"--worst {worst} is no folder; name one of worst cases, or make an empty one for new cases")
    settings = Settings.of(
        chosen,
        cases=cases,
        seconds=seconds,
        seed=seed,
        checks=named(choose_listed("--checks", "check", BY_NAME, check_names)),
    )
    record, short = Record(json_path), Record(summary_path, "--summary")
    opening: dict[str, object] = {
        "kind": "run",
        "target": target.name,
        "profile": profile,
        "settings": {
            "checks": [c.name for c in settings.checks],
            "jobs": jobs,
            **{k: getattr(settings, k) for k in _TOLD},
        },
        "environment": environment(),
    }
    record.write(opening)
    out.print(f"checking {target.name}: up to {settings.cases} cases, limit {settings.limit:g}", markup=False)
    if isinstance(target, FunctionTarget) and target.default_contract:
        show.say(
            out,
            f"it declares no contract, so it is judged under {DEFAULT}, which is chunked: --contract or its attribute "
            f"verikda_contract names another ({', '.join(NAMES)}); right code that goes token by token can fail under "
            "any but recurrent32",
        )
    started = time.perf_counter()

    with show.progress(out, settings.cases, target.name) as step:

        def on_report(report: CaseReport) -> None:
            record.write(case_line(report))
            corpus.offer(target.name, report)
            step(report.verdict)

        def on_finding(finding: Finding) -> None:
            path = finding.write(findings)
            record.write({"kind": "finding", "file": str(path), "check": finding.check, "case": finding.case.to_dict()})
            replay = f"verikda replay {path}"
            text = message(finding.target, finding.failures, finding.case, replay, minimal=finding.minimal)
            show.say(out, text)

        def on_lost(text: str) -> None:
            show.say(out, text)

        first = tuple(corpus.cases())
        if jobs == 1:
            summary = Search(target, settings, first=first, on_report=on_report, on_finding=on_finding).run()
            for text in summary.lost:
                on_lost(text)
        else:
            summary = search_all(target_name, contract, settings, jobs, first, on_report, on_finding, on_lost)
            summary.target, summary.seconds = target.name, time.perf_counter() - started
    closing = {"kind": "end", **end_line(summary)}
    record.write(closing)
    record.close()
    short.write({**opening, **closing, "kind": "summary"})
    short.close()
    return report_summary(out, summary, settings.limit)


def end_line(summary: Summary) -> dict[str, object]:
    """Counts of a whole run, for its last record."""
    return {
        "verdict": summary.verdict,
        "lost": summary.lost,
        "verdicts": dict(summary.verdicts),
        "checks": {name: dict(count) for name, count in summary.checks.items()},
        "worst": {name: {"ratio": r, "case": c.to_dict()} for name, (r, c) in summary.worst.items()},
        "ran": dict(summary.ran),
        "contracts": {ran: dict(count) for ran, count in summary.contracts.items()},
        "calls": summary.calls,
        "seconds": round(summary.seconds, 1),
        "interrupted": summary.interrupted,
    }


def report_summary(out: Console, summary: Summary, limit: float) -> int:
    """Print the tables and the closing line; the exit status."""
    show.summary_tables(out, summary, limit)
    for ran, n in summary.ran.most_common(3):
        under = ", ".join(f"{name} ({m})" for name, m in summary.contracts[ran].most_common())
        show.say(out, f"ran ({n} cases): {ran}; judged under {under}")
    total = sum(summary.verdicts.values())
    counts = ", ".join(f"{n} {v}" for v, n in summary.verdicts.most_common()) or "none judged"
    lost = f" ({len(summary.lost)} shares lost)" if summary.lost else ""
    stopped = (" (interrupted)" if summary.interrupted else "") + lost
    rate = total / summary.seconds if summary.seconds else 0.0
    out.print(
        f"{show.coloured(summary.verdict)}  {summary.target}: {total} cases in {summary.seconds:.1f} s "
        f"({rate:.1f} cases/s){stopped}: {counts}; {len(summary.findings)} findings"
    )
    if total and summary.verdict == "inconclusive" and not summary.verdicts["pass"]:
        out.print("No case could tell right from wrong: see the reasons above, or give more cases.")
    return status_of(summary.verdict)


def replay_command(file: Path, target_name: str | None, snippet: Path | None, contract: str | None) -> int:
    """Run one stored case, or one captured call, through every check; the exit status."""
    out = show.console()
    case, call, named_target, named_check = None, None, None, None
    check_outputs(snippet=snippet)
    if file.suffix == ".safetensors":
        call, _ = load_call(file)
    else:
        case, named_target, named_check = load_case(file)
    name = target_name or named_target
    if name is None:
        what = "a bare case" if case else "a captured call"
        raise ValueError(f"{file} holds {what} and names no target; say which: verikda replay {file} TARGET")
    target = resolve(name, contract=contract)
    if call is None:
        assert case is not None
        call = make_call(case, backward=target.capabilities.backward)
    elif not target.capabilities.backward:
        call = forward_only(call)
    if snippet is not None:
        from verikda.snippet import write_snippet

        write_snippet(snippet, target, call, name)
        out.print(f"wrote {snippet}", markup=False)
    # a script compares values: beside that, only what the finding says is worth the wait
    checks = CHECKS if snippet is None else named(tuple({"floor", named_check or "floor"}))
    outcomes, skipped, ctx = run_call(target, call, checks)
    rows = show.table("check", "verdict", "worst ratio", "says")
    for o in outcomes:
        worst = max(o.ratios.values(), default=None)
        first = o.failures[0].message if o.failures else o.detail
        rows.add_row(o.check, show.coloured(o.verdict), "" if worst is None else f"{worst:.3g}", escape(first))
    for check, reason in skipped.items():
        rows.add_row(check, "not run", "", escape(reason))
    out.print(rows)
    failures = tuple(f for o in outcomes for f in o.failures)
    replay = f"verikda replay {file} {target.name}"
    if failures and case is not None:
        show.say(out, message(target.name, failures, case, replay))
    elif failures:
        lines = [*failure_lines(target.name, failures), f"  replay: {replay}"]
        show.say(out, "\n".join(lines))
    if ctx.ran:
        show.say(out, f"ran: {ctx.ran}; judged under {ctx.contract.family}")
    if snippet is not None and failures and not any(f.check == "floor" for f in failures):
        text = f"the script says PASS: it makes one call and judges its values, and {named_check} needs more than that"
        show.say(out, text)
    verdict = verdict_of(outcomes)
    out.print(f"{show.coloured(verdict)}  {target.name}")
    return status_of(verdict)


def forward_only(call: Call) -> Call:
    """The call without its backward."""
    return replace(call, backward=False, problem=replace(call.problem, do=None, dht=None))


def targets_command() -> int:
    """List the known targets."""
    out = show.console()
    rows = show.table("target", "here", "says")
    for entry in map(made_here, available()):
        says = entry.description if entry.installed else entry.reason
        rows.add_row(entry.name, "yes" if entry.installed else "no", escape(says))
    rows.add_row("module:function", "yes", "any function with chunk_kda's public signature on torch tensors")
    out.print(rows)
    return PASS
