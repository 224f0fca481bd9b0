"""Speed of the verifier itself, on one core: oracle, emulator, and whole judged cases."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oracles.arithmetic import Nearest
from oracles.chunked import emulate
from oracles.contract import storage16
from oracles.recurrence import forward, forward_reverse
from verikda import show
from verikda.case import Case
from verikda.checks import named
from verikda.environment import environment
from verikda.inputs import make_call
from verikda.record import Record
from verikda.run_case import run_case
from verikda.targets.emulator import Emulator

FLOOR = named(("floor",))
SIZES: dict[str, Any] = {"K": 16, "V": 16, "heads": 4}
SOFTPLUS: dict[str, Any] = {"gate_in_kernel": True, "A_log": True, "dt_bias": True}


def _case(T: int, dtype: str, **knobs: Any) -> Case:
    return Case(lengths=(T,), dtype=dtype, seed=T, **SIZES, **knobs)


CASES = (
    _case(80, "float16"),
    _case(80, "bfloat16", gate_regime="spike", h0="random", dht=True),
    _case(80, "float32", gate_regime="bound", gate_magnitude=5.0),
    _case(64, "bfloat16", rule="delta", key_regime="collinear"),
    _case(64, "float32", key_regime="sparse_int", value_regime="ints", chunk_size=16),
    _case(65, "float16", gate_regime="model", qk_l2norm=True, **SOFTPLUS),
    _case(33, "bfloat16", gate_in_kernel=True, lower_bound=-5.0, safe_gate=True, beta_sigmoid=True),
    _case(48, "float32", beta_regime="near_one", gate_regime="tiny_steps", chunk_size=32),
    _case(17, "float16", gate_regime="mixed", h0="large", dht=True, state_v_first=True),
    _case(79, "bfloat16", query_regime="keys", do_regime="last_token_only", chunk_size=32),
    Case(lengths=(15, 0, 33, 16), packed=True, dtype="bfloat16", h0="random", dht=True, tail_padding=3, **SIZES),
    Case(lengths=(63, 17), packed=True, dtype="float32", gate_regime="slow", key_regime="orthogonal", **SIZES),
)
"""Of every dtype and kind: forward and backward, T <= 80, 4 heads of 16 channels."""

LONG = Case(lengths=(512,), dtype="bfloat16", heads=2, K=128, V=128)


def works() -> dict[str, tuple[Callable[[], object], int]]:
    """What is timed by name: the work, and how many units of it ("tokens" or "cases") one call does."""
    call = make_call(LONG)
    contract = storage16("bfloat16", 64)
    tokens = 512 * LONG.heads

    def judged() -> None:
        for case in CASES:
            report = run_case(Emulator(), case, FLOOR)
            if report.verdict != "pass":
                raise ValueError(f"a case did not pass, so its time says nothing: {report.failures}")

    return {
        "oracle forward, tokens of a head": (lambda: forward(call.problem), tokens),
        "oracle forward and reverse, tokens of a head": (lambda: forward_reverse(call.problem), tokens),
        "emulator forward and reverse, tokens of a head": (
            lambda: emulate(call.problem, contract, Nearest(), backward=True, output_dtypes=call.dtypes), tokens,
        ),
        "judged cases": (judged, len(CASES)),
    }  # fmt: skip


def cpu_command(json_path: Path | None, repeats: int = 3) -> int:
    """Time each work on this thread, print units per second of processor time, write one line each; exit status 0.

    Processor time is the time on one core and hardly grows while other processes run.
    """
    out = show.console()
    record = Record(json_path)
    record.write({"kind": "bench", "device": "cpu", "repeats": repeats, "environment": environment()})
    rows = show.table("work", "per second", "spread")
    for name, (work, units) in works().items():
        seconds = []
        for _ in range(repeats):
            started = time.process_time()
            work()
            seconds.append(time.process_time() - started)
        each = [1e6 * s / units for s in seconds]
        timing = {"median": statistics.median(each), "low": min(each), "high": max(each)}
        times = {"each": {"method": "processor time", **timing}}
        record.write({"kind": "timing", "target": "verifier", "workload": {"cpu": name}, "reason": "", "times": times})
        rate, slow, fast = (1e6 / timing[n] for n in ("median", "high", "low"))
        rows.add_row(name, f"{rate:,.0f}", f"{slow:,.0f} to {fast:,.0f}")
    record.close()
    out.print(f"K = V = {LONG.K}, T = 512, 2 heads; cases of T <= 80, 4 heads, K = V = 16, with their noise floor")
    out.print(rows)
    return 0
