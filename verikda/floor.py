"""The judgement of values: error against the noise that a rounding contract cannot avoid.

The emulator runs the contract's algorithm a few times with stochastic rounding. For a block of an output

    noise = mean over runs of sum (run - truth)^2, or a quarter of the largest  +  the output dtype's own rounding
    ratio = sqrt(sum (result - truth)^2 / noise)

and the output's ratio is that of its worst block. 1 is a perfect implementation; rounding to nearest has half
the variance of stochastic rounding, so a twin of the contract reads about 0.7.

A block is one chunk of one head of one sequence (the whole matrix for states, a head for dA_log and
ddt_bias), pooled with its neighbours until it has 16 numbers.

**Which runs.** Half of them round stochastically, half to nearest on rotated grids with squares counted twice
(`oracles.operations.StochasticOperations`): errors that are independent, and errors that repeat.

**How many runs.** For a block that is one number with healthy error e ~ N(0, s^2/2), R runs estimate the noise as
the mean of R squares of N(0, s^2), so sqrt(2) e / estimate has Student's t distribution with R degrees of freedom:

    P(ratio > 4) = P(|t_R| > 4 sqrt 2):    R = 4: 5e-3    R = 16: 4e-5    R = 64: 4e-7    known noise: 2e-8

Four runs are enough to pass a block under limit/2 but not to condemn one, so whenever a block is above limit/2
the noise is estimated again by 16 and then 64 runs, with explicit float32 noise before anything is condemned; by 1,024
where all that would be condemned has noise that is owed to few runs. The limit never moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from oracles.contract import Contract
from oracles.problem import Array, Problem
from oracles.recurrence import forward, forward_reverse, growth, is_stable
from verikda.noise import CONFIRMED, Floor, OutputNoise

Verdict = Literal["pass", "fail", "inconclusive"]

LIMIT = 4.0
GROWTH_LIMIT = 16.0
"""Outside the stable domain values are judged only while a unit change of the state cannot grow beyond this."""

_GROSS = 100.0
"""Ratio, in limits, at which 16 runs convict."""


@dataclass(frozen=True)
class Judged:
    """What is said of one output.

    Attributes
    ----------
    output : its name.
    verdict : fail if a block exceeds the limit or a value is not finite; inconclusive if a block could not be judged.
    ratio : of the worst block; inf where the result must be exact and is not, None if nothing was judged.
    coordinate : worst element of the worst block, in the public layout.
    expected, actual : float64 truth and result there.
    floor : root mean square noise of an element of that block.
    dtype : dtype that the output really has.
    resolution : smallest relative error (of the whole output) that the limit could have shown.
    excluded : elements left out because the truth overflows the output's dtype.
    message : the finding in plain words, empty for a pass.
    """

    output: str
    verdict: Verdict
    ratio: float | None
    coordinate: tuple[int, ...] | None = None
    expected: float | None = None
    actual: float | None = None
    floor: float | None = None
    dtype: str = "float32"
    resolution: float | None = None
    excluded: int = 0
    message: str = ""


@dataclass(frozen=True)
class Judgement:
    """All outputs of one result.

    Attributes
    ----------
    verdict : fail if any output fails; inconclusive if an output is, or if no output could have told right from wrong.
    outputs : by name.
    detail : why the verdict is inconclusive, else empty.
    runs : stochastic runs behind the final noise.
    """

    verdict: Verdict
    outputs: Mapping[str, Judged] = field(default_factory=dict)
    detail: str = ""
    runs: int = 0


_floors: WeakKeyDictionary[Problem, dict[object, Floor]] = WeakKeyDictionary()
"""Floors of problems still alive: several results of one problem are judged under one contract."""


def judge(
    outputs: Mapping[str, Array],
    dtypes: Mapping[str, str],
    problem: Problem,
    contract: Contract,
    *,
    truth: Mapping[str, Array] | None = None,
    backward: bool | None = None,
    runs: int = 4,
    rng_seed: int = 0,
    limit: float = LIMIT,
) -> Judgement:
    """Judge a result against float64.

    Parameters
    ----------
    outputs : the result, float64 copies keyed as oracles.problem.OUTPUTS and GRADIENTS. Absent ones are not judged.
    dtypes : dtype that each output really had.
    problem : the call's values.
    contract : what the implementation declares.
    truth : float64 outputs of the recurrence, computed here if None.
    backward : whether gradients are judged; by default if the result holds any.
    runs : stochastic runs of the first estimate of noise.
    rng_seed : of the stochastic runs.
    limit : largest ratio that passes.

    Returns
    -------
    Judgement

    Raises
    ------
    ValueError
        When the problem has no meaning, or an output has no dtype.
    """
    if backward is None:
        backward = any(name not in ("o", "ht") for name in outputs)
    unknown = sorted(set(outputs) - set(dtypes))
    if unknown:
        raise ValueError(f"no dtype is given for {', '.join(unknown)}; say which dtype each output had.")
    if not is_stable(problem) and not growth(problem) <= GROWTH_LIMIT:
        detail = f"outside the stable domain: a change of the state can grow {growth(problem):.3g} times"
        return Judgement("inconclusive", {}, detail)
    if truth is None:
        truth = forward_reverse(problem) if backward else forward(problem)
    truth = {name: x for name, x in truth.items() if backward or name in ("o", "ht")}
    names = [name for name in truth if name in outputs]
    if not names:
        return Judgement("inconclusive", {}, "the result holds no output that could be judged")
    wrong = {n: _misshapen(n, outputs[n], truth[n], dtypes[n]) for n in names if outputs[n].shape != truth[n].shape}
    names = [name for name in names if name not in wrong]

    mine = _floors.setdefault(problem, {})
    key = (contract, tuple((n, dtypes[n]) for n in names), backward, runs, rng_seed)
    if key not in mine:
        mine[key] = Floor(problem, contract, {n: truth[n] for n in names}, dtypes, backward, runs, rng_seed)
    floor = mine[key]
    errors = {n: _Error(n, outputs[n], floor.outputs[n]) for n in names}
    if any(error.bad.any() for error in errors.values()):
        floor.find_overflow()
    while True:
        judged = {name: errors[name].judge(limit) for name in names}
        failed = [name for name, j in judged.items() if j.verdict == "fail"]
        owed = {name for name in failed if errors[name].owed_to_few(limit)}
        if all(_decided(j.ratio or 0.0, floor, limit) and name not in owed for name, j in judged.items()):
            break
        if not floor.refine(rare=bool(owed) and len(owed) == len(failed) and not wrong):
            break
    return _summary(wrong | judged, floor, truth, names)


def _decided(ratio: float, floor: Floor, limit: float) -> bool:
    """Whether more runs could not change what is said of an output."""
    if ratio <= limit / 2:
        return True
    # infinite: a deviation that is exactly 0, or finite, in 16 runs is so in all
    return floor.noisy and floor.runs >= CONFIRMED[0] and ratio > limit * _GROSS


def _summary(judged: dict[str, Judged], floor: Floor, truth: Mapping[str, Array], names: list[str]) -> Judgement:
    failed = [n for n, j in judged.items() if j.verdict == "fail"]
    if failed:
        return Judgement("fail", judged, "", floor.runs)
    open_ = [f"{n}: {j.message}" for n, j in judged.items() if j.verdict == "inconclusive"]
    if open_:
        return Judgement("inconclusive", judged, "; ".join(open_), floor.runs)
    if not any(truth[name].any() for name in names):
        return Judgement(
            "inconclusive", judged, "every output is zero here, so nothing wrong could be seen", floor.runs
        )
    if all((judged[n].resolution or 0.0) > 1.0 for n in names if truth[n].any()):
        detail = "the contract's own noise exceeds every output here, so nothing wrong could be seen"
        return Judgement("inconclusive", judged, detail, floor.runs)
    return Judgement("pass", judged, "", floor.runs)


def _misshapen(name: str, actual: Array, truth: Array, dtype: str) -> Judged:
    message = f"{name} has shape {actual.shape}; it must have {truth.shape}"
    return Judged(name, "fail", None, dtype=dtype, message=message)


UNDERFLOW = 2.0**-143
"""Error of a block that is none: 64 of float32's smallest numbers, which terms that cancel there may leave."""


class _Error:
    """Error of one output, summed over blocks once; judged against noise that may be refined."""

    def __init__(self, name: str, actual: Array, noise: OutputNoise) -> None:
        self.name, self.actual, self.noise = name, actual, noise
        self.truth, self.blocks = noise.truth, noise.blocks
        self.excluded = int(self.truth.size - np.count_nonzero(noise.representable))
        self.bad = ~np.isfinite(actual) & noise.representable
        with np.errstate(invalid="ignore", over="ignore"):
            self.error = np.where(noise.representable & ~self.bad, actual - self.truth, 0.0)
            self.squared = self.blocks.sum(self.error**2)

    def judge(self, limit: float) -> Judged:
        noise = self.noise.per_block
        known = np.isfinite(noise)
        if self.bad.any():
            bad = self._unexcused(limit)
            if bad.any():
                at = np.unravel_index(int(np.argmax(bad)), bad.shape)
                what = f"{int(bad.sum())} values are not finite where float64 is"
                return self._found(at, np.inf, noise, "fail", what, limit)
        if not self.truth.size:
            return Judged(self.name, "pass", None, dtype=self.noise.dtype)
        if not known.any():
            what = "the contract itself overflows"
            return Judged(self.name, "inconclusive", None, dtype=self.noise.dtype, excluded=self.excluded, message=what)
        ratios = self._ratios(noise)
        block = int(np.argmax(ratios))
        ratio = float(ratios[block])
        at = self.blocks.worst(block, self.error)
        if ratio > limit:
            what = "must be exact" if noise[block] == 0 else f"error is {ratio:.3g} times the noise floor"
            return self._found(at, ratio, noise, "fail", what, limit)
        if not known.all():
            n = int(len(known) - known.sum())
            return self._found(at, ratio, noise, "inconclusive", f"the contract itself overflows in {n} blocks", limit)
        return self._found(at, ratio, noise, "pass", "", limit)

    def owed_to_few(self, limit: float) -> bool:
        """Whether every block above the limit has noise that is owed to few runs."""
        if self.bad.any() and self._unexcused(limit).any():
            return False
        return bool(self.noise.owed_to_few[self._ratios(self.noise.per_block) > limit].all())

    def _unexcused(self, limit: float) -> npt.NDArray[np.bool_]:
        return self.bad & ~self.noise.excuses(self.actual, limit)

    def _ratios(self, noise: Array) -> Array:
        """Error over noise of each block; 0 where the contract itself overflows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios = np.sqrt(self.squared / noise)
        return np.where((self.squared <= UNDERFLOW**2) | ~np.isfinite(noise), 0.0, ratios)

    def _found(
        self, at: tuple[np.intp, ...], ratio: float, noise: Array, verdict: Verdict, what: str, limit: float
    ) -> Judged:
        expected, actual = float(self.truth[at]), float(self.actual[at])
        block = self.blocks.of(at)
        coordinate = tuple(int(i) for i in at)
        size = self.noise.size
        total = float(np.sqrt(noise[np.isfinite(noise)].sum()))
        where = f"{self.name}{list(coordinate)} = {actual:.9g}, float64 says {expected:.9g}"
        return Judged(
            output=self.name,
            verdict=verdict,
            ratio=ratio,
            coordinate=coordinate,
            expected=expected,
            actual=actual,
            floor=float(np.sqrt(noise[block] / self.blocks.count[block])),
            dtype=self.noise.dtype,
            resolution=limit * total / size if size else None,
            excluded=self.excluded,
            message=f"{where}: {what}" if what else "",
        )
