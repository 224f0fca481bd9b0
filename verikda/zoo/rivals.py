"""The zoo judged by what people use today, on the inputs that they use.

Four judges see the same results of the same calls (`verikda.zoo.trials`); what they compare with is float64:

"rms"  the RMS of the difference over the RMS of the reference, with the limits of flash-linear-attention's test_kda.py
       and test_delta.py at bc3b101d, `LIMITS`. A largest difference of 1e-6 or less passes.
"rms, CI"  the same as their continuous integration runs it: a ratio below 0.01 or a largest difference of at most 0.3
       only warns, and dA_log never fails.
"allclose"  torch.testing.assert_close against the reference in the output's dtype, default rtol and atol.
"2x"  as flash-attention tests: the largest error at most twice that of the naive recurrence run in the dtype of the
       inputs, plus what adding and taking away 0.3 in that dtype costs, twice.

A judge finds a fault when it complains of an output of a call about which it is silent for the healthy implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from oracles.problem import Array
from oracles.recurrence import forward_reverse
from verikda.call import Call
from verikda.dtypes import round_to
from verikda.zoo.naive import naive
from verikda.zoo.specimens import HEALTHY, SPECIMENS, Specimen
from verikda.zoo.trials import TRIALS, Trial, make_call

_PARAMETERS = {"dA_log": 0.003}
LIMITS: dict[str, dict[str, float]] = {
    "batch": {"o": 0.005, "ht": 0.005, "dq": 0.008, "dk": 0.008, "dv": 0.008, "dh0": 0.008, "dg": 0.02, "dbeta": 0.02,
              "ddt_bias": 0.008, **_PARAMETERS},
    "pack": {"o": 0.005, "ht": 0.005, "dq": 0.007, "dk": 0.008, "dv": 0.007, "dh0": 0.007, "dg": 0.015, "dbeta": 0.015,
             "ddt_bias": 0.005, **_PARAMETERS},
    "delta rule": {"o": 0.006, "ht": 0.006, "dq": 0.008, "dk": 0.008, "dv": 0.008, "dh0": 0.008, "dbeta": 0.008},
}  # fmt: skip
"""RMS ratio allowed per output: test_chunk and test_chunk_varlen of test_kda.py, test_chunk of test_delta.py."""

WARN_ONLY = ("dA_log",)
CI_RATIO, CI_LARGEST = 0.01, 0.3


@dataclass(eq=False)
class Trialed:
    """One call with the references that judges compare with, each made once."""

    trial: Trial
    call: Call

    @property
    def limits(self) -> dict[str, float]:
        if self.trial.gate == "none":
            return LIMITS["delta rule"]
        return LIMITS["pack" if self.trial.packed else "batch"]

    @cached_property
    def truth(self) -> dict[str, Array]:
        return forward_reverse(self.call.problem)

    @cached_property
    def same(self) -> dict[str, Array]:
        """The naive recurrence in the dtype of the inputs."""
        return naive(self.call.problem, self.trial.dtype)


Judge = Callable[[Trialed, str, Array, str], bool]
"""(call, name of an output, its values, its dtype) -> whether it complains."""


def rms_ratio(expected: Array, actual: Array) -> float:
    """RMS of the difference over that of what is expected; 0 where the largest difference is at most 1e-6."""
    difference = np.abs(expected - actual)
    if difference.max(initial=0.0) <= 1e-6:
        return 0.0
    return float(np.sqrt((difference**2).mean()) / (np.sqrt((expected**2).mean()) + 1e-8))


def rms(t: Trialed, name: str, actual: Array, dtype: str) -> bool:
    return not rms_ratio(t.truth[name], actual) < t.limits[name]


def rms_in_ci(t: Trialed, name: str, actual: Array, dtype: str) -> bool:
    expected = t.truth[name]
    if not np.isfinite(actual).all():
        return True
    ratio, largest = rms_ratio(expected, actual), float(np.abs(expected - actual).max(initial=0.0))
    forgiven = name in WARN_ONLY or ratio < CI_RATIO or largest <= CI_LARGEST
    return ratio >= t.limits[name] and not forgiven


def allclose(t: Trialed, name: str, actual: Array, dtype: str) -> bool:
    import torch

    kind = getattr(torch, dtype)
    try:
        torch.testing.assert_close(torch.tensor(actual).to(kind), torch.tensor(t.truth[name]).to(kind))
    except AssertionError:
        return True
    return False


def twice_same_dtype(t: Trialed, name: str, actual: Array, dtype: str) -> bool:
    truth = t.truth[name]
    naive_error = float(np.abs(t.same[name] - truth).max(initial=0.0))
    there_and_back = round_to(round_to(truth + 0.3, dtype) - 0.3, dtype)
    slack = 2 * float(np.abs(there_and_back - truth).max(initial=0.0))
    return not float(np.abs(actual - truth).max(initial=0.0)) <= 2 * naive_error + slack


JUDGES: dict[str, Judge] = {"rms": rms, "rms, CI": rms_in_ci, "allclose": allclose, "2x": twice_same_dtype}


@dataclass(frozen=True)
class Complaints:
    """Outputs of which a judge complains, as "trial / output", and how many it saw."""

    seen: int
    of: frozenset[str] = field(default_factory=frozenset)


def judged(subject: Specimen, trials: list[Trialed], healthy: Mapping[str, Complaints]) -> dict[str, Complaints]:
    """What every judge says of one specimen; the calls run in one process, in the order of the trials.

    Parameters
    ----------
    healthy : complaints about the healthy implementation. Once every judge has complained of something else, the rest
        is not run. Empty for the healthy implementation itself.
    """
    target = subject.make()
    found: dict[str, set[str]] = {judge: set() for judge in JUDGES}
    seen = 0
    for t in trials:
        result = target.run(t.call)
        for name, actual in result.outputs.items():
            seen += 1
            with np.errstate(all="ignore"):
                for judge, complains in JUDGES.items():
                    if complains(t, name, actual, result.dtypes[name]):
                        found[judge].add(f"{t.trial.name} / {name}")
        if healthy and all(of - healthy[judge].of for judge, of in found.items()):
            break
    return {judge: Complaints(seen, frozenset(of)) for judge, of in found.items()}


def prepared() -> list[Trialed]:
    """Every trial with its call."""
    return [Trialed(trial, make_call(trial)) for trial in TRIALS]


def compare(names: list[str], known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Record lines of the healthy implementation and of each specimen of `names`, without those `known`."""
    trials = prepared()
    done = {line["specimen"]: line for line in known if line["kind"] == "rival"}
    if HEALTHY.name in done:
        line = done[HEALTHY.name]
        healthy = {j: Complaints(line["outputs"], frozenset(line["complaints"][j])) for j in JUDGES}
    else:
        healthy = judged(HEALTHY, trials, {})
        yield _line(HEALTHY, healthy, {})
    for name in names:
        if name not in done:
            yield _line(SPECIMENS[name], judged(SPECIMENS[name], trials, healthy), healthy)


def _line(subject: Specimen, complaints: Mapping[str, Complaints], healthy: Mapping[str, Complaints]) -> dict[str, Any]:
    """A record line; of a fault, the complaints that the healthy implementation does not cause."""
    return {
        "kind": "rival",
        "specimen": subject.name,
        "outputs": complaints["rms"].seen,
        "complaints": {judge: sorted(c.of - healthy[judge].of if healthy else c.of) for judge, c in complaints.items()},
    }


@dataclass(frozen=True)
class Score:
    """What one judge found.

    Attributes
    ----------
    found : names of the specimens.
    specimens : how many it saw.
    alarms, outputs : complaints about the healthy implementation, of how many outputs.
    """

    found: tuple[str, ...]
    specimens: int
    alarms: int
    outputs: int


def scores(lines: list[dict[str, Any]]) -> dict[str, Score]:
    """Score of every judge, from the record; empty without a line of the healthy implementation."""
    own = {line["specimen"]: line for line in lines if line["kind"] == "rival"}
    healthy = own.pop(HEALTHY.name, None)
    if healthy is None:
        return {}
    made = {}
    for judge in JUDGES:
        found = tuple(n for n in SPECIMENS if n in own and own[n]["complaints"][judge])
        made[judge] = Score(found, len(own), len(healthy["complaints"][judge]), healthy["outputs"])
    return made
