"""Cases on the brink of float16: what is needed fits, what nothing needs does not, and the judgement tells them apart.

What is needed is judged by the emulator under the contract of the kernels, not by how the cases were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from planted import Planted

from oracles.arithmetic import Exact, Nearest
from oracles.chunked import Trace, emulate
from oracles.contract import STORED, operands_tf32
from verikda.call import Call, Capabilities, Result
from verikda.case import Case
from verikda.checks import named
from verikda.inputs import make_call
from verikda.permits import permits
from verikda.run_case import run_case
from verikda.starts import brink_cases
from verikda.targets import resolve

LARGEST = 65504.0
CASES = brink_cases(n=8) + brink_cases(n=8, variant=1)


@cache
def traced(case: Case, exact: bool = False) -> Trace:
    call = make_call(case)
    arithmetic = Exact() if exact else Nearest()
    contract = operands_tf32("float16", case.chunk_size)
    return emulate(call.problem, contract, arithmetic, intermediates=True, output_dtypes=call.output_dtypes())


def largest(some: Mapping[str, np.ndarray]) -> float:
    return max(float(np.abs(x).max()) for x in some.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.seed))
def test_the_largest_number_needed_is_just_below_the_end_of_float16(case: Case) -> None:
    trace, dtypes = traced(case), make_call(case).output_dtypes()
    kept = {name: x for name, x in trace.intermediates.items() if name in STORED}
    kept |= {name: x for name, x in trace.outputs.items() if dtypes[name] == "float16"}
    assert {"dU", "dS", "dW", "dA", "AtdA", "S", "Vnew", "dk"} <= kept.keys()
    assert LARGEST / 2.2 < largest(kept) <= LARGEST
    assert all(np.isfinite(x).all() for x in (*trace.intermediates.values(), *trace.outputs.values()))


def test_most_have_more_that_nothing_needs_beyond_it() -> None:
    beyond = 0
    for case in CASES:
        inner = traced(case, exact=True).intermediates
        whole = np.swapaxes(inner["A"], -1, -2) @ inner["dA"]
        rows, columns = np.tril_indices(case.chunk_size, -1)
        assert np.array_equal(whole[..., rows, columns], inner["AtdA"][..., rows, columns])
        beyond += np.abs(whole[..., 1:, :]).max() > 2.0**16
    assert beyond >= 14


@pytest.mark.parametrize("name", ["dA", "AtdA"])
def test_the_contract_has_nothing_that_nothing_needs(name: str) -> None:
    """An infinity there would excuse the one of a kernel."""
    assert not any(np.triu(traced(case).intermediates[name]).any() for case in CASES)


def test_the_same_number_gives_the_same_cases_and_another_one_others() -> None:
    assert brink_cases(n=8) + brink_cases(n=8, variant=1) == CASES
    assert len(set(CASES)) == 16
    assert {case.dtype for case in CASES} == {"float16"}


@pytest.mark.parametrize(
    "c",
    [
        Capabilities(dtypes=("bfloat16", "float16"), gates=("bounded",), packed=False, grouped=False, scale=False),
        Capabilities(rules=("delta",), gates=(), initial_state=False, dht=False, beta_above_one=False),
        Capabilities(k_sizes=(128,), v_sizes=(64,), chunk_sizes=(64,), required=("qk_l2norm",)),
    ],
)
def test_they_stay_within_what_a_target_has(c: Capabilities) -> None:
    some = brink_cases(c, 3)
    assert len(some) == 3
    assert [permits(c, case) for case in some] == [None] * 3


@pytest.mark.parametrize("c", [Capabilities(dtypes=("float32", "bfloat16")), Capabilities(backward=False, dht=False)])
def test_there_are_none_without_float16_or_without_gradients(c: Capabilities) -> None:
    assert brink_cases(c, 3) == []


@pytest.mark.parametrize("target", ["emulator", "zoo"])
def test_healthy_targets_pass_and_every_output_could_be_judged(target: str) -> None:
    for case in CASES[:3]:
        report = run_case(resolve(target), case)
        assert report.verdict == "pass", [f.message for f in report.failures]
        assert {o.verdict for o in report.outcomes} == {"pass"}


def one_more(call: Call, result: Result) -> Result:
    """But for one number that float16 has no room for, the result as it was: it is twice the largest of dA."""
    if not call.backward:
        return result
    contract = operands_tf32("float16", call.chunk_size)
    dA = emulate(call.problem, contract, Nearest(), intermediates=True).intermediates["dA"]
    with np.errstate(over="ignore", invalid="ignore"):
        nothing = (2.0 * np.abs(dA).max()).astype(np.float16) * 0.0
    return replace(result, outputs={**result.outputs, "dg": result.outputs["dg"] + float(nothing)})


def test_a_number_that_nothing_needs_fails_where_it_is_infinite() -> None:
    case = next(case for case in CASES if 2.0 * np.abs(traced(case).intermediates["dA"]).max() > 2.0**16)
    target = Planted(resolve("emulator"), one_more)
    assert run_case(target, case, named(("floor",))).verdict == "fail"
    assert run_case(target, replace(case, do_exponent=case.do_exponent - 2), named(("floor",))).verdict == "pass"
