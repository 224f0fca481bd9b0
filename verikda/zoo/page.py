"""The zoo's results as a Markdown page, from the record alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verikda.checks import CHECKS
from verikda.strategies import describe
from verikda.zoo import matrix, rivals
from verikda.zoo.kills import Kill
from verikda.zoo.matrix import Row
from verikda.zoo.public import KINDS
from verikda.zoo.tables import comparison, sentences
from verikda.zoo.trials import TRIALS

PAGE = """\
# The zoo: planted faults, and who finds them

Each fault is one condition in a healthy chunked implementation (`verikda/zoo`), or, where its name begins with CUDA,
one change in the CUDA sources of `kernels_cuda`, run on the CPU or a GPU. A search is that of `verikda check` with the
ci profile, ended at the first failing case; another seed is another start and another random part. Time is processor
time of one core, references and noise floors included. Written from the record alone by

    verikda zoo --kill-matrix --seeds {seeds} --json reports/cpu/zoo.jsonl --report reports/cpu/zoo.md
    verikda zoo --compare --json reports/cpu/zoo.jsonl --report reports/cpu/zoo.md

and, for the CUDA sources, the first with `--where cuda` and the seeds that the tables show. A run goes on from the
record: with more seeds, or after an interrupt, only what is missing is run.

{versions}

## In one look

{totals}

{rivals}## Not seen

{missed}

What no number of this page reaches:

- **Outside the domain.** Positive gates and beta |k|^2 above 2 are inconclusive, and so are inputs that break what
  a flag promises (`safe_gate` with gates below -5), unless a target promises to be right for those too.
- **Below the floor.** A wrong number smaller than what the declared contract must round away, where no exact
  relation is broken: a gradient off by 1e-3 shows in float32, not in bfloat16. A contract that declares more
  rounding than there is hides as much.
- **Sizes never drawn.** Up to 160 tokens, 64 channels and 4 value heads, a few cases of 80 tokens and 256 channels,
  and three of about 2,200 tokens with few channels. What starts later or wider (32-bit offsets, 65,535 blocks, drift
  over 100,000 tokens) needs cases of its own.
- **Rare coincidences.** Every option of every knob comes up, not every combination: a fault that needs one length
  together with one width, one dtype and one flag may stay unseen within the budget.
- **Schedules of a GPU.** Races, missing waits and fences, hangs, tuned configurations and work lost to other
  kernels show on that GPU only, under that load, if at all.
- **The caller.** State pools and slots, padding lanes, speculation, offsets chosen by a layer above: not in the
  operator's signature.

## Public reports

Kinds of faults that were reported in public for kernels of this family, and the faults of the zoo that stand for them
(with how many seeds each was found), or the reason why none does.

{kinds}

## Kill matrix

`first check` and `output` are what failed first, with most seeds; `also fails` are the other checks that fail on the
failing case (all checks for seed 0, up to 500 tokens). `shown by` is the failing case of seed 0.

{matrix}

## Which check finds what

How many faults each check sees first with some seed, and how many it sees on a failing case.

{checks}
"""

RIVALS = """\
## The same zoo, judged as people do today

The other judges see {calls} calls with {outputs} outputs in the style of flash-linear-attention's tests
(`verikda/zoo/trials.py`) and compare with float64 (`verikda/zoo/rivals.py`). A fault is found when a judge complains of
an output about which it is silent for the healthy implementation; what it says of that one are its false alarms. For
verikda, faults found with every seed count.

- **verikda**: the search of the kill matrix.
- **rms**: the limits of flash-linear-attention's tests: RMS of the error 0.005 of the output's, for gradients 0.005 to
  0.02.
- **rms, CI**: the same as their continuous integration runs it, where a ratio below 0.01 or a largest error of at most
  0.3 only warns.
- **allclose**: `torch.testing.assert_close` with its defaults for the dtype.
- **2x**: at most twice the error of the naive recurrence in the dtype of the inputs, as flash-attention's tests do.

{table}

"""


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write the page of a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(lines), encoding="utf-8")


def page(lines: list[dict[str, Any]]) -> str:
    """The page of a record."""
    results = matrix.kills(lines)
    rows = matrix.rows(results)
    return PAGE.format(
        seeds=1 + max((k.seed for k in results), default=0),
        versions=_versions(line["environment"] for line in lines if line["kind"] == "zoo"),
        totals="\n".join(f"- {line}" for line in sentences(matrix.totals(results))),
        rivals=_rivals(lines),
        missed=_missed(rows),
        kinds=_table(("group", "kind", "reported in", "in the zoo"), _kinds(rows)),
        matrix=_table(MATRIX, (_cells(r) for r in rows)),
        checks=_table(("check", "first", "sees", "proves"), _checks(rows, results)),
    )


MATRIX = (
    "fault", "where", "place", "what is wrong", "public reports", "first check", "output", "also fails", "cases",
    "seconds", "found", "shown by",
)  # fmt: skip


def _rivals(lines: list[dict[str, Any]]) -> str:
    if not rivals.scores(lines):
        return ""
    outputs = next(line["outputs"] for line in lines if line["kind"] == "rival")
    return RIVALS.format(calls=len(TRIALS), outputs=outputs, table=_table(*comparison(lines)))


def _versions(found: Iterable[dict[str, Any]]) -> str:
    texts = []
    for environment in found:
        named = environment["versions"]
        kept = ("verikda", "python", "numpy", "hypothesis", "torch")
        texts.append(f"{environment['platform']}, " + ", ".join(f"{n} {named[n]}" for n in kept if n in named))
    return "; ".join(dict.fromkeys(texts)) + "." if texts else ""


def _cells(r: Row) -> list[str]:
    s = r.subject
    check, output = r.first
    others = [c for c in (c.name for c in CHECKS) if c in r.fails and c != check]
    return [
        f"`{s.name}`",
        s.where,
        s.place,
        s.what,
        ", ".join(s.reports),
        check,
        output,
        ", ".join(others),
        f"{r.cases:g}" if r.killed else "",
        f"{r.seconds:.2f}" if r.killed else "",
        f"{r.killed} of {r.seeds}",
        "" if r.shown is None else describe(r.shown).rsplit("; seed", 1)[0],
    ]


def _checks(rows: list[Row], results: list[Kill]) -> list[list[str]]:
    first: Counter[str] = Counter(check for _, check in {(k.specimen, k.check) for k in results if k.killed})
    sees: Counter[str] = Counter(check for r in rows for check in r.fails)
    return [[c.name, str(first[c.name]), str(sees[c.name]), c.proves] for c in CHECKS]


def _missed(rows: list[Row]) -> str:
    missed = [r for r in rows if r.killed < r.seeds]
    if not missed:
        return "Every fault that is in the zoo was found with every seed."
    return "\n".join(
        f"- `{r.subject.name}` ({r.subject.what}): found with {r.killed} of {r.seeds} seeds; shows with "
        f"{r.subject.regime}."
        for r in missed
    )


def _kinds(rows: list[Row]) -> list[list[str]]:
    found = {r.subject.name: f"{r.killed} of {r.seeds}" for r in rows}
    made = []
    for kind in KINDS:
        held = ", ".join(
            f"`{s.name}`" + (f" ({found[s.name]})" if s.name in found else "") for s in kind.specimens
        )  # fmt: skip
        made.append([kind.group, kind.text, ", ".join(kind.reports), held or f"none: {kind.reason}"])
    return made


def _table(header: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    head = list(header)
    made = [head, ["---"] * len(head), *(list(row) for row in body)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in made)
