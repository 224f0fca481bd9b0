"""The noise that a rounding contract cannot avoid on one problem, from stochastic runs of its algorithm."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from oracles.arithmetic import Nearest, Stochastic
from oracles.chunked import emulate
from oracles.contract import Contract
from oracles.noisy import FLUSH, UNIT
from oracles.problem import Array, Problem
from verikda.blocks import blocks_of, spread
from verikda.dtypes import round_to, ulp

CONFIRMED = (16, 64)
"""Runs with explicit float32 noise after which a suspicious result is looked at again."""
RARE = 1024
"""Runs where the noise of a suspicious block is owed to few of those before."""
_FEW = 8.0
"""A block's noise is owed to few runs if the largest is so many times the mean. Of 64 squares of one normal number the
largest is 7 times the mean, of sums of more numbers less."""
_BATCH = 1 << 22
"""Output elements emulated at once."""


def output_noise(x: Array, dtype: str) -> Array:
    """Squared error that storing x in `dtype` may cost: spacing^2 / 12 in 16 bits, (2^-24 x)^2 in float32.

    Both get 2^-126 more where x is not 0 and the dtype has float32's exponents, since GPUs may flush below it.
    An x of 0 costs nothing.
    """
    if dtype == "float16":
        noise: Array = ulp(x, dtype) ** 2 / 12
    elif dtype == "bfloat16":
        noise = ulp(x, dtype) ** 2 / 12 + FLUSH**2
    else:
        noise = (UNIT * x) ** 2 + FLUSH**2
    return np.where(x == 0, 0.0, noise)


class OutputNoise:
    """Noise of one output.

    Parameters
    ----------
    name : of the output.
    truth : float64.
    dtype : that the output really has.
    problem, contract : what is judged, for its blocks.

    Attributes
    ----------
    representable : where the truth does not overflow the dtype.
    size : root of the sum of squares of the truth there.
    own : squared error that storing the truth may cost.
    """

    def __init__(self, name: str, truth: Array, dtype: str, problem: Problem, contract: Contract) -> None:
        self.truth = truth
        self.dtype = dtype
        self.blocks = blocks_of(name, truth, problem, contract)
        self.representable: npt.NDArray[np.bool_] = np.isfinite(round_to(truth, dtype))
        self._all_representable = bool(self.representable.all())
        self.size = float(np.sqrt((np.where(self.representable, truth, 0.0) ** 2).sum()))
        self.own = np.where(self.representable, output_noise(np.where(self.representable, truth, 0.0), dtype), 0.0)
        self.overflows = np.zeros(len(self.blocks.count), np.bool_)
        self.reset()

    def mark_overflow(self, x: Array) -> None:
        """Give up the blocks in which the contract's own result x is not finite."""
        self.overflows |= self.blocks.sum(np.where(self.representable, ~np.isfinite(x), 0.0)) > 0

    def reset(self) -> None:
        """Forget all runs."""
        self.runs = 0
        self._sum = np.zeros_like(self.truth)
        self._largest = np.zeros(len(self.blocks.count))

    def add(self, outputs: Array, weights: Array) -> None:
        """Take in the outputs [R, ...] of runs whose squared deviations count `weights` [R] times."""
        for x, weight in zip(outputs, weights, strict=True):
            squared = x - self.truth
            squared *= squared
            squared *= weight
            if not self._all_representable:
                squared = np.where(self.representable, squared, 0.0)
            self._sum += squared
            self._largest = np.maximum(self._largest, self.blocks.sum(squared))  # NaN stays
        self.runs += len(weights)

    @property
    def per_element(self) -> Array:
        """Mean squared deviation, own rounding included; not finite where the contract itself overflows."""
        mean: Array = self._sum / self.runs + self.own
        return mean

    @property
    def per_block(self) -> Array:
        """Noise of each block: the mean over runs, but at least a quarter of the largest run, plus own rounding.

        Where keys and beta annihilate a component again and again the deviation is a product of many small random
        factors. Its mean square is then owed to rare runs, and 64 of them may have missed it. With the quarter, limit 4
        asks a result to be twice as far off as any run was, and of `RARE` runs where it is owed to few.
        """
        mean = self.blocks.sum(self._sum) / self.runs
        noise = np.maximum(mean, self._largest / 4) + self.blocks.sum(self.own)
        return np.where(self.overflows, np.inf, noise)

    @property
    def owed_to_few(self) -> npt.NDArray[np.bool_]:
        """Blocks whose noise is owed to few runs, so that another implementation may be a still rarer one."""
        mean = self.blocks.sum(self.per_element)
        found: npt.NDArray[np.bool_] = self._largest > _FEW * mean
        return found

    def excuses(self, infinite: Array, limit: float) -> npt.NDArray[np.bool_]:
        """Where a value that is not finite is no failure.

        The truth, or the contract's own result, is not finite there either; or it is an infinity of the right sign,
        within the limit of a truth just below the largest number.

        Parameters
        ----------
        infinite : the values; those that are finite are not asked about.
        limit : largest ratio that passes.
        """
        mean = self._spread(self.per_block / np.maximum(self.blocks.count, 1))
        reach = np.abs(self.truth) + limit * np.sqrt(np.maximum(self.per_element, mean))
        near = np.isinf(round_to(np.where(self.representable, reach, 0.0), self.dtype))
        known = np.isfinite(self.per_element) & ~self._spread(self.overflows)
        right = infinite == np.copysign(np.inf, self.truth)
        excused: npt.NDArray[np.bool_] = ~(self.representable & known) | near & right
        return excused

    def _spread(self, of_blocks: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The value of each element's block."""
        found: npt.NDArray[Any] = spread(of_blocks[self.blocks.labels], self.truth.ndim)
        return found


class Floor:
    """Noise of one problem under one contract, estimated by few runs first and by more when asked.

    Parameters
    ----------
    problem, contract : what is emulated.
    truth : float64 outputs to be judged.
    dtypes : of those outputs.
    backward : whether gradients are emulated too.
    runs : stochastic runs of the first estimate.
    seed : of the salts.
    """

    def __init__(
        self,
        problem: Problem,
        contract: Contract,
        truth: Mapping[str, Array],
        dtypes: Mapping[str, str],
        backward: bool,
        runs: int,
        seed: int,
    ) -> None:
        self._problem = weakref.ref(problem)  # a floor is kept as long as its problem lives, and so must not keep it
        self.contract, self.backward = contract, backward
        self.outputs = {n: OutputNoise(n, x, dtypes[n], problem, contract) for n, x in truth.items()}
        self.rng = np.random.default_rng(seed)
        self.noisy = contract.storage == "float32" or not contract.sites
        self.runs = 0
        self._found_overflow = False
        self._plan = [(n, True) for n in CONFIRMED if n > runs or not self.noisy]
        if not self.noisy and runs < CONFIRMED[0]:
            self._plan.insert(0, (CONFIRMED[0], False))  # cheap, and mostly enough to pass
        self._add(runs)

    @property
    def problem(self) -> Problem:
        """What is emulated; whoever uses a floor holds it."""
        problem = self._problem()
        assert problem is not None
        return problem

    def refine(self, rare: bool = False) -> bool:
        """Estimate again with more runs, at last with explicit float32 noise; False when nothing is left to do.

        Parameters
        ----------
        rare : whether `RARE` runs are made after those of `CONFIRMED`, once.
        """
        if not self._plan:
            if rare and self.runs < RARE:
                self._add(RARE - self.runs)
                return True
            return False
        runs, noisy = self._plan.pop(0)
        if noisy and not self.noisy:
            self.noisy, self.runs = True, 0
            for output in self.outputs.values():
                output.reset()
        self._add(runs - self.runs)
        return True

    def find_overflow(self) -> None:
        """Mark the blocks in which the contract overflows when rounded to nearest.

        Noise in float64 does not see every product that is too large for float32.
        """
        if not self._found_overflow:
            self._found_overflow = True
            results = emulate(self.problem, self.contract, Nearest(), backward=self.backward).outputs
            for name, output in self.outputs.items():
                output.mark_overflow(results[name])

    def _add(self, runs: int) -> None:
        size = sum(output.truth.size for output in self.outputs.values())
        step = max(2, min(16, _BATCH // max(1, size)))  # at least one run of each kind of rounding
        self.runs += runs
        while runs > 0:
            arithmetic = Stochastic(self.rng, min(step, runs), self.noisy)
            results: Mapping[str, Any] = emulate(
                self.problem, self.contract, arithmetic, backward=self.backward
            ).outputs
            with np.errstate(invalid="ignore", over="ignore"):
                for name, output in self.outputs.items():
                    output.add(results[name], arithmetic.weights)
            runs -= arithmetic.runs
