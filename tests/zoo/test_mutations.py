"""Faults planted in the CUDA sources, run on the CPU: each is seen by every check that it names, and none is stale."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verikda.checks import named
from verikda.inputs import make_call
from verikda.run_case import CaseReport, run_call
from verikda.search import Search, Settings
from verikda.targets import own
from verikda.zoo.cuda import Changed, MutationTarget
from verikda.zoo.mutations import MUTATIONS


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_check_that_a_mutation_names_sees_it(name: str) -> None:
    mutation = MUTATIONS[name]
    target = MutationTarget(name, "host")
    outcomes, _, _ = run_call(target, make_call(mutation.shown_by), named(mutation.kills))
    assert {o.check for o in outcomes if o.verdict == "fail"} == set(mutation.kills)


@pytest.mark.parametrize("case", dict.fromkeys(m.shown_by for m in MUTATIONS.values()), ids=lambda c: c.to_json()[:60])
def test_the_shipped_kernels_pass_where_mutations_show(case) -> None:  # type: ignore[no-untyped-def]
    outcomes, _, _ = run_call(own.host(), make_call(case), named(("floor", "prefix", "repeat")))
    assert {o.verdict for o in outcomes} == {"pass"}


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("CUDA_STATE_OFFSET_16", Settings(cases=2, stratified=0, long=True)),
        ("CUDA_UNNEEDED_INFINITY", Settings(cases=8, stratified=0, brink=8)),
        *(
            (name, Settings(cases=40, stratified=0, coherent=40))
            for name in ("CUDA_BETA_IN_A", "CUDA_VALUES_OF_ONE_ROUNDING", "CUDA_DECAY_FROM_SUMS")
        ),
    ],
)
def test_a_part_of_the_fixed_start_shows_what_hides_from_the_rest(name: str, budget: Settings) -> None:
    verdicts: list[str] = []

    def until_it_fails(report: CaseReport) -> None:
        verdicts.append(report.verdict)
        if report.verdict == "fail":
            raise KeyboardInterrupt

    values = replace(budget, checks=named(("floor",)))
    Search(MutationTarget(name, "host"), values, on_report=until_it_fails).run()
    assert verdicts[-1] == "fail"


def test_an_edit_that_no_longer_fits_is_said() -> None:
    with pytest.raises(ValueError, match=r"gate\.cuh no longer has 'no such text'"):
        Changed([("gate.cuh", "no such text", "")])


def test_files_that_no_edit_reaches_are_the_shipped_ones() -> None:
    changed = Changed([("layout.cu", "end = total * row_bytes", "end = 0 * total * row_bytes")])
    from kernels_cuda import sources

    kept = [p for p in sources.kernel_files() if (changed.root / p.name).read_bytes() == p.read_bytes()]
    assert {p.name for p in sources.kernel_files()} - {p.name for p in kept} == {"layout.cu"}
