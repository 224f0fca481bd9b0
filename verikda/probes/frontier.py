"""The overflow frontier: the largest gate that a target survives, by bisection.

Decays between two rows are exp(Gamma_i - Gamma_j) <= 1 (oracles/EQUATIONS.md), but an implementation that
forms them as exp(Gamma_i - Gamma_a) exp(Gamma_a - Gamma_j) through an anchor row a overflows as soon as the gates
between j and a sum to ln(largest number). With m nats per token that happens at m = ln(largest) / (rows between).
A healthy target has no frontier: every stable call is finite and within the floor, hard resets included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verikda.call import Capabilities
from verikda.case import Case
from verikda.checks import named
from verikda.dtypes import format_of
from verikda.inputs import make_call
from verikda.probes import plain_case
from verikda.run_case import CaseReport, run_case
from verikda.targets.base import Target

TOP = 1000.0
"""Largest gate tried, nats per token; the largest that a `Case` takes."""
BLOCK = 16
"""Rows of the window, and of the sub-blocks that many kernels anchor."""
_RUNGS = (0.15, 1.0, 5.0, 30.0, 95.0, TOP)
"""Sizes tried first, so that a frontier with healthy sizes beyond it is not stepped over. The first lies below
ln(65504) / 64, where float16 factors of a whole chunk overflow; 95 between ln(largest float32) and the 104 from which
exp is 0 in float32, where some implementations treat a gate as a hard reset."""
_PRECISION = 1.02
"""Bisection ends when the two ends differ by less than this factor."""


@dataclass(frozen=True)
class Kind:
    """One way in which gates are large.

    Attributes
    ----------
    text : what is drawn.
    knobs : fields of `Case` for m nats and a chunk size.
    rows : rows between which m nats per token add up, for a chunk size; 1 for a single row.
    rungs : sizes tried, ascending; infinity is a hard reset.
    """

    text: str
    knobs: Callable[[float, int], dict[str, Any]]
    rows: Callable[[int], int]
    rungs: tuple[float, ...] = _RUNGS


def _every_token(m: float, chunk: int) -> dict[str, Any]:
    return {"lengths": (chunk + 3,), "gate_regime": "bound", "gate_magnitude": m}


KINDS = {
    "constant": Kind("every gate -m", _every_token, lambda chunk: chunk),
    "window": Kind(
        "16 rows of -m, a state before and a gradient behind",
        lambda m, chunk: {**_every_token(m, chunk), "lengths": (BLOCK,)},
        lambda chunk: BLOCK,
    ),
    "spike": Kind(
        "one row of -m, slow gates beside it",
        lambda m, chunk: {**_every_token(m / 30.0, chunk), "gate_regime": "spike"},
        lambda chunk: 1,
    ),
    "bounded": Kind(
        "gate in the kernel, saturated at its lower bound -m",
        lambda m, chunk: {**_every_token(m, chunk), "gate_in_kernel": True, "lower_bound": -m},
        lambda chunk: chunk,
        tuple(m for m in _RUNGS if m <= 5.0),
    ),
    "reset": Kind(
        "one row and one element in 16 at -inf",
        lambda m, chunk: {**_every_token(1.0, chunk), "gate_regime": "reset"},
        lambda chunk: 1,
        (math.inf,),
    ),
}


@dataclass(frozen=True)
class Frontier:
    """What was found for one kind of gate, dtype and chunk size.

    Attributes
    ----------
    kind, dtype, chunk : what was asked.
    top : largest gate that the target took, nats per token (of the row for a spike).
    finite : largest gate at which every output and gradient is finite where float64 is; None: no frontier up to
        `top`, 0: not finite at the smallest gate tried.
    within : the same for "within the floor".
    analytic : frontier in nats per token of factors anchored at a chunk's start, its middle and a 16-row block's
        start, held in float32's range, and in float16's own ("float16 start") where that is the dtype.
    like : the analytic frontier that lies within a tenth of `finite`, "" where none does.
    verdict : fail if a call was wrong, pass if none was, refused or inconclusive if nothing could be told.
    detail : what is wrong at the smallest gate that shows it, or why nothing can be told.
    calls : calls made.
    report : the failure at the smallest gate that shows one.
    """

    kind: str
    dtype: str
    chunk: int
    top: float
    finite: float | None
    within: float | None
    analytic: dict[str, float]
    like: str
    verdict: str
    detail: str
    calls: int
    report: CaseReport | None = None

    @property
    def line(self) -> dict[str, Any]:
        """Its JSON line."""
        fields = {k: v for k, v in vars(self).items() if k != "report"}
        case = {} if self.report is None else {"case": self.report.case.to_dict()}
        return {**fields, "kind": "frontier", "gates": self.kind, **case}


def analytic(kind: str, dtype: str, chunk: int) -> dict[str, float]:
    """See `Frontier.analytic`."""
    rows = KINDS[kind].rows(chunk)
    ends = {"start": rows, "middle": max(1, rows // 2), "16-row block": min(rows, BLOCK)}
    wide = math.log(format_of("float32").largest)
    found = {name: wide / n for name, n in ends.items()}
    return found | ({"float16 start": math.log(format_of(dtype).largest) / rows} if dtype == "float16" else {})


def frontiers(target: Target, seed: int = 0) -> Iterator[Frontier]:
    """One frontier for each kind of gate, dtype and chunk size that the target takes, as they are found."""
    c = target.capabilities
    for kind in KINDS:
        for dtype in c.dtypes:
            for chunk in c.chunk_sizes:
                found = frontier(target, kind, dtype, chunk, seed)
                if found is not None:
                    yield found


def frontier(target: Target, kind: str, dtype: str, chunk: int, seed: int = 0) -> Frontier | None:
    """The frontier of one kind of gate, None where the capabilities rule it out.

    Parameters
    ----------
    kind : a name in `KINDS`.
    dtype, chunk : of the calls.
    seed : of the inputs.
    """
    what = KINDS[kind]
    base = _base(target.capabilities, kind, dtype, chunk, seed)
    if base is None:
        return None
    reports: dict[float, CaseReport] = {}

    def report(m: float) -> CaseReport:
        if m not in reports:
            case = replace(base, **what.knobs(m, chunk))
            reports[m] = run_case(target, case, named(("floor",)))
        return reports[m]

    rungs = [m for m in what.rungs if not (base.safe_gate and 5.0 < m < math.inf)]
    taken: list[float] = []
    for m in rungs:
        if report(m).verdict == "refused":
            break
        taken.append(m)
        if not finite(report(m)):
            break  # what is beyond is told by bisection below
    if not taken:
        text = reports[rungs[0]].outcomes[0].detail
        return Frontier(kind, dtype, chunk, 0.0, None, None, analytic(kind, dtype, chunk), "", "refused", text, 1)
    limit = _largest(taken, lambda m: finite(report(m)))
    within = _largest(taken, lambda m: report(m).verdict != "fail")
    failed = sorted(m for m, r in reports.items() if r.verdict == "fail")
    first = reports[failed[0]] if failed else None
    verdicts = {r.verdict for r in reports.values()}
    verdict = next(v for v in ("fail", "pass", "inconclusive", "refused") if v in verdicts)
    found = analytic(kind, dtype, chunk)
    like = next((name for name, m in found.items() if limit and abs(limit / m - 1.0) < 0.1), "")
    detail = first.failures[0].message if first else ""
    return Frontier(kind, dtype, chunk, max(taken), limit, within, found, like, verdict, detail, len(reports), first)


def finite(report: CaseReport) -> bool:
    """Whether a failure, if there is one, is one of finite numbers."""
    return all(f.actual is not None and math.isfinite(f.actual) for f in report.failures)


def _largest(rungs: list[float], holds: Callable[[float], bool]) -> float | None:
    """Largest size at which it holds; None where it holds at every rung, 0 where it does not at the first."""
    bad = next((m for m in rungs if not holds(m)), None)
    if bad is None:
        return None
    low, high = max((m for m in rungs if m < bad), default=0.0), bad
    while low > 0 and high / low > _PRECISION:
        m = math.sqrt(low * high)
        low, high = (m, high) if holds(m) else (low, m)
    return low


def _base(c: Capabilities, kind: str, dtype: str, chunk: int, seed: int) -> Case | None:
    """The call in which only the gates vary, None where the capabilities do not allow it."""
    knobs = KINDS[kind].knobs(min(KINDS[kind].rungs[-1], 5.0), chunk)
    fixed = {**knobs, "rule": "kda", "dtype": dtype, "chunk_size": chunk, "seed": seed}
    try:
        case = plain_case(c, fixed, {})
    except ValueError:
        return None
    if kind != "spike":
        return case
    # a spike in the first row of a chunk decays nothing inside it: take the first seed that puts it further in
    while not chunk // 4 <= _strongest_row(case) < 3 * chunk // 4:
        case = replace(case, seed=(case.seed + 1) % 2**32)
    return case


def _strongest_row(case: Case) -> int:
    g = make_call(case, backward=False).problem.g
    assert g is not None
    return int(np.argmin(g[0].sum((1, 2))))
