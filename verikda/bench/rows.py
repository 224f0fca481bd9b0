"""What is known of one target on one workload: errors, verdict, times. Only what is right is timed,
and with --also-wrong the rest too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from oracles.problem import Array
from verikda.bench.workloads import Mode, Workload, relative_l2
from verikda.status import FAIL, NOTHING, PASS

REL_LIMIT = 2e-2
"""Relative L2 beyond which a target is not timed; bfloat16 kernels are known to reach 3e-3 to 6e-3 in o."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call.

    Attributes
    ----------
    method : "graph" (replays of a CUDA graph), "events" (launches included), or "queued" (calls in a row, by the host).
    samples : all of them.
    floor : by fewest bytes or operations at what the device was seen to do in this run.
    wall : from an idle device until done, as the host sees it, launches included; median.
    events : by events without a graph, median; None for "queued".
    peak : bytes that a call takes besides its inputs; None where the library does not tell.
    """

    method: str
    samples: tuple[float, ...]
    floor: float
    wall: float
    events: float | None = None
    peak: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def low(self) -> float:
        """The 10th percentile."""
        return sorted(self.samples)[len(self.samples) // 10]

    @property
    def high(self) -> float:
        """The 90th percentile."""
        return sorted(self.samples)[-1 - len(self.samples) // 10]

    @property
    def fraction(self) -> float:
        """Floor over median: 1 cannot be beaten."""
        return self.floor / self.median


@dataclass
class Row:
    """One target on one workload.

    Attributes
    ----------
    errors : relative L2 against float64 by output, on the build and at the shape that are timed.
    floor_verdict : of `verikda.floor` on a small call of the same rule and gates.
    floor_ratio : worst error over noise floor there.
    reason : why nothing was timed, or what is wrong with what was (--also-wrong); empty where nothing is.
    times : by mode.
    """

    target: str
    workload: Workload
    errors: dict[str, float] = field(default_factory=dict)
    floor_verdict: str = ""
    floor_ratio: float | None = None
    reason: str = ""
    times: dict[Mode, Timing] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """The row as a line of a record, without the single samples."""
        times = {
            mode: {**asdict(t), "median": t.median, "low": t.low, "high": t.high} for mode, t in self.times.items()
        }
        for t in times.values():
            del t["samples"]
        return {
            "kind": "timing", "target": self.target, "workload": asdict(self.workload), "errors": self.errors,
            "floor_verdict": self.floor_verdict, "floor_ratio": self.floor_ratio, "reason": self.reason, "times": times,
        }  # fmt: skip


OBJECTIONS = ("wrong", "not shown right", "not checked")
"""With which `objection` begins: the row says why, and a time beside it is that of a target that is not green."""


def objection(errors: Mapping[str, float], floor: str) -> str:
    """Why a target with these errors is not timed; empty where it is green."""
    if not errors:
        return "not checked: no output was compared"
    bad = {n: e for n, e in errors.items() if not e <= REL_LIMIT}
    if bad:
        return "wrong: relative L2 against float64 of " + ", ".join(f"{n} {e:.2g}" for n, e in bad.items())
    if not floor.startswith("pass"):
        return f"{'wrong' if floor.startswith('fail') else 'not shown right'}: noise floor says {floor or 'nothing'}"
    return ""


def compare(row: Row, found: Mapping[str, Array], wanted: Mapping[str, Array], backward: bool) -> None:
    """Fill in the errors of a row and why it is not timed.

    Parameters
    ----------
    found : some heads of what the target gave; "o without gradients" is o of a call without gradients.
    wanted : their truth.
    backward : whether the target has gradients; without them only "o without gradients" is there.
    """
    truth = {"o without gradients": wanted["o"], **(wanted if backward else {})}
    row.errors = {n: relative_l2(found[n], x) if n in found else math.inf for n, x in truth.items()}
    row.reason = objection(row.errors, row.floor_verdict)


def exit_status(rows: Sequence[Row]) -> int:
    """FAIL where a target was wrong or crashed, NOTHING where nothing was timed, else PASS."""
    if any(r.reason.startswith(("wrong", "crashed")) for r in rows):
        return FAIL
    return PASS if any(r.times for r in rows) else NOTHING
