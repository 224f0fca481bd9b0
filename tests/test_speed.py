"""Cases per second on one core: forward and backward with the noise floor, T <= 80, K = V = 16, 4 heads.

`pytest tests/test_speed.py` prints the table. Processor time is measured, which is time on one core and hardly grows
while other processes run; none is asserted, because machines differ. Every case must pass, so that nothing is timed
that judges nothing.
"""

from __future__ import annotations

import json
import time
from itertools import cycle
from typing import Any

import pytest
from click.testing import CliRunner

from verikda.bench import cpu
from verikda.bench.cpu import CASES, FLOOR
from verikda.cli import main
from verikda.run_case import CaseReport, run_case
from verikda.targets.emulator import Emulator


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


def test_the_command_prints_and_writes_what_it_timed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    works = {name: (lambda name=name: done.append(name), units) for name, (_, units) in cpu.works().items()}
    monkeypatch.setattr(cpu, "works", lambda: works)
    result = CliRunner().invoke(main, ["bench", "--cpu", "--json", str(tmp_path / "cpu.jsonl")])
    assert result.exit_code == 0
    assert all(name in result.output for name in works)
    assert done == [name for name in works for _ in range(3)]
    first, *lines = [json.loads(line) for line in (tmp_path / "cpu.jsonl").read_text().splitlines()]
    assert (first["kind"], first["device"]) == ("bench", "cpu")
    assert [x["workload"]["cpu"] for x in lines] == list(works)
    assert all(x["times"]["each"]["low"] <= x["times"]["each"]["median"] <= x["times"]["each"]["high"] for x in lines)
