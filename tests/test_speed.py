"""Cases per second on one core: forward and backward with the noise floor, T <= 80, K = V = 16, 4 heads.

`pytest tests/test_speed.py` prints the table. Processor time is measured, which is time on one core and hardly grows
while other processes run; none is asserted, because machines differ. Every case must pass, so that nothing is timed
that judges nothing.
"""

from __future__ import annotations

import time
from itertools import cycle
from typing import Any

import pytest

from verikda.case import Case
from verikda.checks import named
from verikda.run_case import CaseReport, run_case
from verikda.targets.emulator import Emulator

FLOOR = named(("floor",))
SIZES: dict[str, Any] = {"K": 16, "V": 16, "heads": 4}


def case(T: int, dtype: str, **knobs: Any) -> Case:
    return Case(lengths=(T,), dtype=dtype, seed=T, **SIZES, **knobs)


SOFTPLUS: dict[str, Any] = {"gate_in_kernel": True, "A_log": True, "dt_bias": True}

CASES = (
    case(80, "float16"),
    case(80, "bfloat16", gate_regime="spike", h0="random", dht=True),
    case(80, "float32", gate_regime="bound", gate_magnitude=5.0),
    case(64, "bfloat16", rule="delta", key_regime="collinear"),
    case(64, "float32", key_regime="sparse_int", value_regime="ints", chunk_size=16),
    case(65, "float16", gate_regime="model", qk_l2norm=True, **SOFTPLUS),
    case(33, "bfloat16", gate_in_kernel=True, lower_bound=-5.0, safe_gate=True, beta_sigmoid=True),
    case(48, "float32", beta_regime="near_one", gate_regime="tiny_steps", chunk_size=32),
    case(17, "float16", gate_regime="mixed", h0="large", dht=True, state_v_first=True),
    case(79, "bfloat16", query_regime="keys", do_regime="last_token_only", chunk_size=32),
    Case(lengths=(15, 0, 33, 16), packed=True, dtype="bfloat16", h0="random", dht=True, tail_padding=3, **SIZES),
    Case(lengths=(63, 17), packed=True, dtype="float32", gate_regime="slow", key_regime="orthogonal", **SIZES),
)


def test_the_list_is_what_it_says() -> None:
    assert len(set(CASES)) == len(CASES) == 12
    assert {c.dtype for c in CASES} == {"float16", "bfloat16", "float32"}
    assert all(c.T <= 80 and c.K == c.V == 16 and c.HV == 4 for c in CASES)


@pytest.mark.benchmark(timer=time.process_time)
def test_cases_per_second(benchmark: Any) -> None:
    """One round is one case; the list is gone through as often as `rounds` asks."""
    target, upcoming = Emulator(), cycle(CASES)
    reports: list[CaseReport] = []

    def one() -> None:
        reports.append(run_case(target, next(upcoming), FLOOR))

    benchmark.pedantic(one, rounds=2 * len(CASES), iterations=1, warmup_rounds=0)
    while len(reports) < len(CASES):  # with --benchmark-disable there was one round
        one()
    assert {r.case for r in reports} == set(CASES)
    for report in reports:
        assert report.verdict == "pass", [o.detail or o.failures for o in report.outcomes]
        (floor,) = report.outcomes
        assert set(floor.ratios) >= {"o", "ht", "dq", "dk", "dv", "dbeta"}, "forward and backward are judged"
    if benchmark.stats is not None:  # None with --benchmark-disable
        benchmark.extra_info["cases_per_second"] = round(1 / benchmark.stats.stats.mean, 2)
