"""Evidence that the floor raises no false alarm: healthy implementations judged on random cases, by the thousand.

    python -m verikda.false_alarm --target emulator --dtype bfloat16 --cases 20000 --jobs 2 --json shares.jsonl
    python -m verikda.false_alarm --table shares.jsonl

Every knob of a case is drawn uniformly from its options, over all regimes, flags and layouts that the target takes;
values and gradients are judged as `verikda check --checks floor` does. Cases come in shares of 250 with a seed each, so
that the same cases are drawn whatever --jobs says, and each share is recorded as one line when it ends. Ctrl-C and
SIGTERM end a run early, with the table of the shares that have ended.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from oracles.problem import GRADIENTS, OUTPUTS
from verikda.case import DTYPES, Case
from verikda.checks import named
from verikda.inputs import make_call
from verikda.interrupts import held, on_stop, processes
from verikda.knobs import OPTIONS, Limits, Space
from verikda.record import Record, check_outputs
from verikda.run_case import CaseReport, run_case
from verikda.targets import TargetError, resolve

SHARE = 250
"""Cases of one share."""
FLOOR = named(("floor",))


def draw_case(rng: np.random.Generator, space: Space) -> Case:
    """One case, every knob drawn uniformly from its options."""
    known: dict[str, Any] = {}
    for name in OPTIONS:
        options = space.options(name, known)
        known[name] = int(rng.integers(1 << 32)) if name == "seed" else options[int(rng.integers(len(options)))]
    return Case(**known)


@dataclass
class Tally:
    """Results so far.

    Attributes
    ----------
    verdicts : counts of verdicts of cases.
    worst : (ratio, case) per output.
    failures : (case, output, message).
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    worst: dict[str, tuple[float, dict[str, Any]]] = field(default_factory=dict)
    failures: list[tuple[dict[str, Any], str, str]] = field(default_factory=list)

    def add(self, report: CaseReport) -> None:
        """Count one case."""
        self.verdicts[report.verdict] += 1
        case = report.case.to_dict()
        for outcome in report.outcomes:
            for name, ratio in outcome.ratios.items():
                self._worse(name, ratio, case)
        self.failures += [(case, f.output, f.message) for f in report.failures]

    def merge(self, line: Mapping[str, Any]) -> None:
        """Count a share as recorded."""
        self.verdicts.update(line["verdicts"])
        for name, (ratio, case) in line["worst"].items():
            self._worse(name, float(ratio), case)
        self.failures += [tuple(failure) for failure in line["failures"]]

    def _worse(self, name: str, ratio: float, case: dict[str, Any]) -> None:
        if ratio > self.worst.get(name, (0.0, {}))[0]:
            self.worst[name] = (ratio, case)


def run_share(target: str, contract: str | None, dtype: str, seed: int, share: int, cases: int) -> dict[str, Any]:
    """One share as its line of record."""
    healthy = resolve(target, contract=contract)
    rng, space, tally = (
        np.random.default_rng([seed, share]),
        Space(healthy.capabilities, Limits(), {"dtype": dtype}),
        Tally(),
    )
    judged_by = ""
    for _ in range(cases):
        case = draw_case(rng, space)
        tally.add(run_case(healthy, case, FLOOR))
        judged_by = judged_by or healthy.contract(make_call(case)).family
    return {
        "kind": "share", "target": healthy.name, "contract": judged_by, "dtype": dtype, "seed": seed, "share": share,
        "cases": cases, "verdicts": dict(tally.verdicts), "worst": tally.worst, "failures": tally.failures,
    }  # fmt: skip


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: one row per target and contract with its counts and worst ratios, then every failure."""
    rows: dict[tuple[str, str], Tally] = {}
    for line in lines:
        rows.setdefault((line["target"], line["contract"]), Tally()).merge(line)
    names = [n for n in (*OUTPUTS, *GRADIENTS) if any(n in tally.worst for tally in rows.values())]
    head = ["target", "contract", "cases", "pass", "inconclusive", "fail", *names]
    text = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (target, contract), tally in sorted(rows.items()):
        other = sum(tally.verdicts.values()) - tally.verdicts["pass"] - tally.verdicts["fail"]
        counts = (sum(tally.verdicts.values()), tally.verdicts["pass"], other, tally.verdicts["fail"])
        ratios = [f"{tally.worst[n][0]:.2f}" if n in tally.worst else "" for n in names]
        text.append("| " + " | ".join([target, contract, *(f"{n:,}" for n in counts), *ratios]) + " |")
    for (target, contract), tally in sorted(rows.items()):
        text += [f"FAIL {target} {contract}: {message}\n     {json.dumps(case)}" for case, _, message in tally.failures]
    return "\n".join(text)


def recorded(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Shares of JSON Lines files."""
    lines = [json.loads(text) for path in paths for text in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["kind"] == "share"]


def main(words: list[str] | None = None) -> int:
    """Command line; exit status 0 without a failure, 1 with one, 2 if a process crashed or no share ended."""
    parser = argparse.ArgumentParser(
        prog="python -m verikda.false_alarm",
        description="Healthy implementations judged on random cases: limit 4, no failure.",
    )
    parser.add_argument("--target", default="emulator", help="emulator, zoo, or any target that is known to be healthy")
    parser.add_argument("--contract", help="judge it under this contract instead of the one it declares")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the inputs")
    parser.add_argument("--cases", type=int, default=SHARE, help="how many; by default one share")
    parser.add_argument("--seed", type=int, default=0, help="of the cases")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="append each share to this JSON Lines file")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of recorded shares, run nothing")
    given = parser.parse_args(words)
    for name in ("cases", "jobs"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} is {getattr(given, name)}; give at least 1")
    try:
        resolve(given.target, contract=given.contract)
        check_outputs(json=given.json)
        record = Record(given.json)
    except (TargetError, ValueError) as error:
        parser.error(str(error))
    lost = 0
    if given.table:
        lines = recorded(given.table)
    else:
        sizes = [min(SHARE, given.cases - first) for first in range(0, given.cases, SHARE)]
        lines = []
        fixed = (given.target, given.contract, given.dtype, given.seed)
        try:
            with on_stop(), processes(given.jobs) as pool:
                for done in as_completed([pool.submit(run_share, *fixed, i, n) for i, n in enumerate(sizes)]):
                    with held():
                        lines.append(done.result())
                        record.write(lines[-1])
        except KeyboardInterrupt:
            print(f"interrupted after {len(lines)} of {len(sizes)} shares")
            if not lines:
                return 2
        except ChildProcessError as error:
            print(f"{error}; {len(lines)} of {len(sizes)} shares have ended")
            lost = 2
        record.close()
    print(table(lines))
    return 1 if any(line["failures"] for line in lines) else lost


if __name__ == "__main__":
    raise SystemExit(main())
