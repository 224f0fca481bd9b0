"""The arithmetic in which the emulator runs: exact, rounded to nearest, or stochastic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oracles.contract import Contract
from oracles.noisy import NoisyOperations
from oracles.operations import NearestOperations, Operations, StochasticOperations


@dataclass(frozen=True)
class Exact:
    """The algorithm in float64: to be compared with the recurrence."""

    def under(self, contract: Contract) -> Operations:
        """Operations for one contract."""
        return Operations(contract)


@dataclass(frozen=True)
class Nearest:
    """A healthy implementation of the contract: float32, sites rounded to nearest."""

    def under(self, contract: Contract) -> Operations:
        """Operations for one contract."""
        return NearestOperations(contract)


@dataclass(frozen=True)
class Stochastic:
    """Runs of Monte Carlo arithmetic, from which a noise floor is made.

    Attributes
    ----------
    rng : source of the salts.
    runs : R >= 1. The larger half rounds stochastically, the others to nearest on rotated grids.
    noisy : whether float32 noise is explicit (NoisyOperations). None: only where the contract stores float32;
        under 16-bit storage real float32 arithmetic stands in for it, which is faster.
    """

    rng: np.random.Generator
    runs: int
    noisy: bool | None = None

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """[R], by which squared deviations are multiplied to be alike: 2 where a run rounds to nearest."""
        return np.repeat([1.0, 2.0], [self.runs - self.runs // 2, self.runs // 2])

    def under(self, contract: Contract) -> Operations:
        """Operations for one contract."""
        noisy = contract.storage == "float32" if self.noisy is None else self.noisy
        return (NoisyOperations if noisy else StochasticOperations)(contract, self.rng, self.runs)


Arithmetic = Exact | Nearest | Stochastic
