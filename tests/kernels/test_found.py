"""What random searches of these kernels failed on, one case for each new kind, through all checks: `found/*.json`.

What they were, with the mutation that plants each again:

- U and W formed with A diag(beta) rounded as one (dg, dA_log, ddt_bias, adjoint, chunk_sizes): CUDA_BETA_IN_A;
- dA formed with other values of diag(beta) V than U (dg in float16): CUDA_VALUES_OF_ONE_ROUNDING;
- single decays as differences of sums, in float32 (dq): CUDA_DECAY_FROM_SUMS;
- what lies above the triangle of A^T dA that X needs, infinite in float16 (dk, dg, dbeta NaN): CUDA_UNNEEDED_INFINITY;
- decays below 2^-126 that the floor did not let a kernel flush (flushed-decay): `tests/test_floor_noise.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from verikda.finding import load_case
from verikda.run_case import run_case
from verikda.targets.own import host

FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_was_found_passes(path: Path) -> None:
    case, _, _ = load_case(path)
    report = run_case(host(), case)
    assert report.verdict == "pass", [f.message for f in report.failures]


def test_the_corpus_is_there() -> None:
    assert len(FOUND) >= 15
