"""Long-sequence drift: does the error grow along thousands of tokens faster than the contract's own noise does?

One long sequence with slow gates, tiny beta and states given, so that what goes wrong in one token is still heard
thousands of tokens on, and gradients reach as far back. Error and noise floor (`verikda.noise`) are summed over windows
of tokens; their ratio is flat for a healthy implementation, because the floor grows as the contract's state does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from oracles.problem import GRADIENTS, OUTPUTS, Array
from oracles.recurrence import forward, forward_reverse
from verikda.call import Call, Crashed, Malformed, Refused, Result
from verikda.case import Case
from verikda.checks import CALL
from verikda.floor import LIMIT
from verikda.inputs import make_call
from verikda.noise import Floor, OutputNoise
from verikda.probes import plain_case
from verikda.targets.base import Target

TOKENS = 4096
"""Default length."""
WINDOWS = 16
GROWS = 2.0
"""Growth of the ratio over the whole sequence that is called growth; windows of a healthy target scatter less."""
_RUNS = 16
"""Stochastic runs of the first estimate. 64 follow where a window is above half the limit, 1,024 where its noise is
owed to few of them."""


@dataclass(frozen=True)
class Drift:
    """Ratios of one output along one long sequence.

    Attributes
    ----------
    output : its name.
    dtype : of q, k, v and o.
    case : the call.
    ratios : error over noise floor per window of tokens, from the first to the last; of states one number.
        Infinite where a value is not finite, or differs where the contract has no noise at all.
    growth : factor by which a straight line through log(ratio) grows from the first window to the last, at most that
        between the smallest and the largest; below 1 for an error that grows towards the start. None for states, and
        where a ratio is 0 or infinite.
    verdict : fail where a ratio is above the limit.
    detail : why, in words.
    """

    output: str
    dtype: str
    case: Case
    ratios: tuple[float, ...]
    growth: float | None
    verdict: str
    detail: str

    @property
    def says(self) -> str:
        """Growth in words."""
        if self.growth is None:
            return ""
        if 1.0 / GROWS < self.growth < GROWS:
            return "flat"
        factor = max(self.growth, 1.0 / self.growth)
        return f"grows {factor:.3g} times towards the {'end' if self.growth > 1.0 else 'start'}"

    @property
    def line(self) -> dict[str, Any]:
        """Its JSON line."""
        return {"kind": "drift", **vars(self), "case": self.case.to_dict(), "says": self.says}


def drift_case(target: Target, dtype: str, tokens: int, seed: int = 0) -> Case:
    """One sequence of `tokens`; gates keep about e^-4 of a state over the whole length.

    Raises
    ------
    ValueError
        When the capabilities allow no such case.
    """
    fixed = {"dtype": dtype, "packed": False, "lengths": (tokens,), "seed": seed}
    slow_mean = 0.0105  # of the regime "slow", nats per token at magnitude 1
    slow = {"gate_regime": "slow", "gate_magnitude": min(1.0, 4.0 / (slow_mean * tokens)), "beta_regime": "tiny"}
    return plain_case(target.capabilities, fixed, slow)


def drifts(target: Target, tokens: int = TOKENS, seed: int = 0) -> Iterator[Drift]:
    """Every output of one long call for each dtype that the target takes.

    A call that is refused, or crashes, is one line for the output "call".
    """
    c = target.capabilities
    for dtype in c.dtypes:
        case = drift_case(target, dtype, tokens, seed)
        call = make_call(case, backward=c.backward)
        try:
            result = target.run(call)
        except Refused as refusal:
            yield Drift(CALL, dtype, case, (), None, "refused", str(refusal))
            continue
        except (Crashed, Malformed) as error:
            yield Drift(CALL, dtype, case, (), None, "fail", str(error))
            continue
        yield from measure(target, case, call, result)


def measure(target: Target, case: Case, call: Call, result: Result) -> Iterator[Drift]:
    """Ratios of every output of one call.

    Parameters
    ----------
    case, call, result : what was asked, and what the target answered.
    """
    truth = forward_reverse(call.problem) if call.backward else forward(call.problem)
    names = [n for n in (*OUTPUTS, *GRADIENTS) if n in result.outputs and n in truth]
    wrong = [n for n in names if result.outputs[n].shape != truth[n].shape]
    for name in wrong:
        text = f"{name} has shape {result.outputs[name].shape}; it must have {truth[name].shape}"
        yield Drift(name, case.dtype, case, (), None, "fail", text)
    names = [n for n in names if n not in wrong]
    floor = Floor(
        call.problem,
        target.contract(call),
        {n: truth[n] for n in names},
        result.dtypes,
        call.backward,
        _RUNS,
        case.seed,
    )
    while True:
        found = {n: _ratios(n, result.outputs[n], floor.outputs[n]) for n in names}
        if max((r for ratios in found.values() for r in ratios), default=0.0) <= LIMIT / 2:
            break
        failed = [n for n, ratios in found.items() if max(ratios, default=0.0) > LIMIT]
        if not floor.refine(rare=any(floor.outputs[n].owed_to_few.any() for n in failed)):
            break
    for name, ratios in found.items():
        worst = int(np.argmax(ratios))
        verdict, detail = "pass", ""
        if ratios[worst] > LIMIT:
            a, b = _edges(case.T)[worst : worst + 2]
            where = f"in tokens {a} to {b - 1}" if len(ratios) > 1 else "in the state"
            verdict, detail = "fail", f"error is {ratios[worst]:.3g} times the noise floor {where}"
        yield Drift(name, case.dtype, case, ratios, growth(ratios), verdict, detail)


def growth(ratios: tuple[float, ...]) -> float | None:
    """See `Drift.growth`."""
    if len(ratios) < 2 or not all(0.0 < r < math.inf for r in ratios):
        return None
    slope = np.polyfit(np.linspace(0.0, 1.0, len(ratios)), np.log(ratios), 1)[0]
    spread = math.log(max(ratios) / min(ratios))  # the line through a step is steeper than the step is high
    return math.exp(min(max(float(slope), -spread), spread))


def _edges(tokens: int) -> list[int]:
    """First tokens of the windows, and one past the last."""
    count = min(WINDOWS, tokens)
    return [tokens * i // count for i in range(count + 1)]


def _ratios(name: str, actual: Array, noise: OutputNoise) -> tuple[float, ...]:
    """Root of error over noise per window, or over the whole of an output without tokens."""
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(noise.representable, (actual - noise.truth) ** 2, 0.0)
    error = np.where(np.isnan(error), np.inf, error)
    floor = noise.per_element
    if name in ("ht", "dh0", "dA_log", "ddt_bias"):
        return (_ratio(error, floor),)
    edges = _edges(actual.shape[1])
    return tuple(_ratio(error[:, a:b], floor[:, a:b]) for a, b in pairwise(edges))


def _ratio(error: Array, floor: Array) -> float:
    squared, noise = float(error.sum()), float(floor.sum())
    if squared == 0.0:
        return 0.0
    return math.sqrt(squared / noise) if noise > 0.0 else math.inf
