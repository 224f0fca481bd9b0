"""What the noise floor says of a target on one small call: pass, or the outputs that fail."""

from __future__ import annotations

from typing import Any

from verikda.call import Call
from verikda.checks import named
from verikda.run_case import run_call


def floor(target: Any, call: Call) -> str:
    """The word pass, or the names of the outputs that fail, or what else happened."""
    outcomes, _, _ = run_call(target, call, named(("floor",)))
    (outcome,) = outcomes
    wrong = ",".join(sorted({f.output for f in outcome.failures}))
    return wrong or (outcome.verdict if outcome.verdict == "pass" else f"{outcome.verdict}: {outcome.detail}")
