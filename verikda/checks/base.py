"""What a check is: one property, the context it runs in, and what it answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from oracles.contract import Contract
from oracles.problem import Array
from oracles.recurrence import forward, forward_reverse
from verikda.call import Call, Capabilities, Result
from verikda.floor import LIMIT, Judgement, judge
from verikda.targets.base import Target

Verdict = Literal["pass", "fail", "inconclusive", "refused"]
CALL = "call"
"""The `output` of a failure of a call that gave no result: it crashed, or its answer is malformed."""


@dataclass(frozen=True)
class Failure:
    """One wrong number, or one wrong fact.

    Attributes
    ----------
    check, output : where it was seen; `output` is a name of oracles.problem or of an input, or `CALL`.
    message : the fact in plain words.
    coordinate : index of the worst (floor) or first (bitwise) element, in the public layout.
    expected, actual : its values.    dtype : dtype of the output.
    ratio : error over noise floor, where the check is one of value.
    """

    check: str
    output: str
    message: str
    coordinate: tuple[int, ...] | None = None
    expected: float | None = None
    actual: float | None = None
    dtype: str = "float32"
    ratio: float | None = None

    @property
    def kind(self) -> tuple[str, str]:
        """What a search has once: check and output, of a call without a result how it ended, whichever check saw it.

        How it ended is the first and the last line of its text without numbers: sizes and addresses in it change with
        the case, and a compiler quotes the source in between.
        """
        if self.output != CALL:
            return self.check, self.output
        lines = re.sub(r"0x[0-9a-f]+|\d+", "", self.message).strip().splitlines()
        return CALL, f"{lines[0]} {lines[-1]}"


@dataclass(frozen=True)
class Outcome:
    """What one check says of one case.

    `ratios` holds the worst ratio per judged output; `detail` says why a verdict is not pass or fail; `lost`, that a
    call ended the CUDA context, so that nothing can be run after it.
    """

    check: str
    verdict: Verdict
    failures: tuple[Failure, ...] = ()
    ratios: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    lost: bool = False


class Context:
    """One call on one target, with its results and references computed once.

    Parameters
    ----------
    target : what is checked.
    call : the call that every check starts from.
    limit : largest ratio that passes.

    Attributes
    ----------
    runs : calls of the target.
    failed : whether `call` itself was made and gave no result.
    written : inputs, or memory beside them, that calls other than `call` have changed since this was last emptied.
    """

    def __init__(self, target: Target, call: Call, limit: float = LIMIT) -> None:
        self.target = target
        self.call = call
        self.limit = limit
        self.runs = 0
        self.failed = False
        self.written: list[str] = []

    @property
    def capabilities(self) -> Capabilities:
        return self.target.capabilities

    @cached_property
    def contract(self) -> Contract:
        return self.target.contract(self.call)

    @cached_property
    def result(self) -> Result:
        self.failed = True  # where the next line raises
        found = self.run(self.call)
        self.failed = False
        return found

    @cached_property
    def truth(self) -> dict[str, Array]:
        return self.truth_of(self.call)

    @property
    def ran(self) -> str:
        """What the target said it ran, "" before the first call succeeded."""
        return self.result.ran if "result" in self.__dict__ else ""  # a cached_property is in there once it has a value

    def run(self, call: Call) -> Result:
        self.runs += 1
        result = self.target.run(call)
        if call is not self.call:
            self.written += result.changed
        return result

    @staticmethod
    def truth_of(call: Call) -> dict[str, Array]:
        """Float64 reference of another call."""
        return forward_reverse(call.problem) if call.backward else forward(call.problem)

    def judge(self, result: Result, call: Call | None = None, truth: dict[str, Array] | None = None) -> Judgement:
        """Judge values against float64 under the target's contract for `call` (default: this context's)."""
        if call is None:
            call, truth = self.call, self.truth
        elif truth is None:
            truth = self.truth_of(call)
        return judge(
            result.outputs,
            result.dtypes,
            call.problem,
            self.target.contract(call),
            truth=truth,
            limit=self.limit,
            backward=call.backward,
        )


@dataclass(frozen=True)
class Check:
    """One property of a delta-rule implementation.

    Attributes
    ----------
    name : used in tables, findings and `--checks`.
    proves : what holds when it passes, one sentence.
    kills : the planted fault (verikda.zoo.faults.Fault) that it is shown to find.
    exact : bit for bit, or under the noise floor.
    applies : None when the check can run on this context, otherwise the reason why not.
    run : the check itself; failures, and the ratios where it judges values.
    """

    name: str
    proves: str
    kills: str
    exact: bool
    applies: Callable[[Context], str | None]
    run: Callable[[Context], Outcome]


def always(ctx: Context) -> str | None:
    """`Check.applies` of a check that every call allows."""
    return None


def bitwise(check: str, output: str, expected: Array, actual: Array, dtype: str, what: str) -> Failure | None:
    """First element in which two results differ (NaN equals NaN), as a Failure, or None."""
    if expected.shape != actual.shape:
        return Failure(check, output, f"{what}: shape {actual.shape} instead of {expected.shape}", dtype=dtype)
    differs = (expected != actual) & ~(np.isnan(expected) & np.isnan(actual))
    if not differs.any():
        return None
    where = tuple(int(i) for i in np.argwhere(differs)[0])
    count = int(differs.sum())
    return Failure(
        check,
        output,
        f"{what}: {count} of {differs.size} elements differ",
        where,
        float(expected[where]),
        float(actual[where]),
        dtype,
    )


def compare(
    check: str,
    expected: Mapping[str, Array],
    actual: Mapping[str, Array],
    dtypes: Mapping[str, str],
    what: str,
    names: tuple[str, ...] | None = None,
) -> list[Failure]:
    """Bitwise comparison of every output both results have (or of `names`)."""
    failures = []
    for name in names or tuple(expected):
        if name not in expected and name not in actual:
            continue
        if name not in expected or name not in actual:
            failures.append(Failure(check, name, f"{what}: {name} is missing from one of the two results"))
            continue
        found = bitwise(check, name, expected[name], actual[name], dtypes.get(name, "float32"), what)
        if found:
            failures.append(found)
    return failures


def outcome(check: str, failures: list[Failure], **more: object) -> Outcome:
    """Pass, or fail with these failures."""
    return Outcome(check, "fail" if failures else "pass", tuple(failures), **more)  # type: ignore[arg-type]


def failures_of(check: str, judgement: Judgement, what: str = "") -> tuple[Failure, ...]:
    """What a judgement of values fails; `what` opens each message."""
    opening = f"{what}: " if what else ""
    return tuple(
        Failure(check, v.output, opening + v.message, v.coordinate, v.expected, v.actual, v.dtype, v.ratio)
        for v in judgement.outputs.values()
        if v.verdict == "fail"
    )


def same(
    ctx: Context,
    check: str,
    expected: Mapping[str, Array],
    actual: Mapping[str, Array],
    what: str,
    names: tuple[str, ...] | None,
    judged: tuple[Result, Call],
) -> Outcome:
    """Bitwise equality across shapes and layouts; under the floor for a target that is not `shape_invariant`.

    Parameters
    ----------
    judged : the other call and its result, judged by value where bits differ and need not agree.
    """
    result, call = judged
    failures = compare(check, expected, actual, result.dtypes, what, names)
    missing = any(f.coordinate is None for f in failures)
    if not failures or ctx.capabilities.shape_invariant or missing:
        return outcome(check, failures)
    judgement = ctx.judge(result, call)
    return Outcome(check, judgement.verdict, failures_of(check, judgement, what), {}, judgement.detail)
