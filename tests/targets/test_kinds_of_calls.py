"""Calls of every kind that users make are made: without gradients, without a final state, with the channels of models.

What could go wrong here: a kind of call that no case asks for, so that whatever is wrong in it alone passes.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest

from verikda.case import Case
from verikda.checks import named
from verikda.profiles import PROFILES
from verikda.run_case import CaseReport, run_case
from verikda.search import Search, Settings
from verikda.starts import long_cases, wide_cases
from verikda.zoo.faults import Fault
from verikda.zoo.target import ZooTarget

torch = pytest.importorskip("torch", reason="the torch adapter needs PyTorch: pip install 'verikda[torch]'")

import toy_kda  # noqa: E402

from verikda.targets.torch_function import TorchFunction  # noqa: E402


def broken(where: str) -> TorchFunction:
    """The token recurrence in torch, whose output is wrong in calls of one kind only."""

    @wraps(toy_kda.chunk_kda)
    def function(**arguments: Any) -> Any:
        o, ht = toy_kda.chunk_kda(**arguments)
        wrong = {
            "nowhere": False,
            "inference": not torch.is_grad_enabled(),
            "no final state": not arguments["output_final_state"],
            "wide": arguments["q"].shape[-1] > 64,
        }
        return (1.5 * o if wrong[where] else o), ht

    return TorchFunction(function, where, device="cpu")


@pytest.mark.parametrize(
    ("where", "knobs", "checks"),
    [
        ("inference", {"lengths": (9,)}, ("split_anywhere",)),
        ("no final state", {"lengths": (9,), "final_state": False}, ("floor",)),
        ("wide", {}, ("floor",)),
    ],
)
def test_what_only_some_kinds_of_calls_get_wrong(where: str, knobs: dict[str, Any], checks: tuple[str, ...]) -> None:
    case = Case(**{"K": 4, "V": 3, "seed": 1} | knobs) if knobs else wide_cases(n=1)[0]
    assert run_case(broken("nowhere"), case, named(checks)).verdict == "pass"
    report = run_case(broken(where), case, named(checks))
    assert report.verdict == "fail"
    assert "o" in {f.output for f in report.failures}


@pytest.mark.parametrize("where", ["inference", "no final state", "wide"])
def test_the_dev_profile_asks_for_every_kind_of_call(where: str) -> None:
    target = broken(where)

    def stop(report: CaseReport) -> None:
        if report.verdict == "fail":
            raise KeyboardInterrupt

    search = Search(target, Settings.of(PROFILES["dev"]), on_report=stop)
    assert search.run().failed_cases == 1
    assert sum(search.summary.verdicts.values()) <= 40, "not in the fixed start"


@pytest.mark.parametrize("variant", [0, 2])
def test_a_state_in_16_bits_loses_small_changes_in_the_long_run(variant: int) -> None:
    """By value, since not every target promises bits that a split at a chunk would compare."""
    case = long_cases(ZooTarget().capabilities, variant=variant)[2]
    assert case.dtype != "float32"
    assert run_case(ZooTarget(), case, named(("floor",))).verdict == "pass"
    report = run_case(ZooTarget(Fault.STATE_IN_BF16), case, named(("floor",)))
    assert max(f.ratio or 0.0 for f in report.failures if f.output == "ht") > 40
