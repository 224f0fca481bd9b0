"""What the bench leaves: tables, and a file that pytest-benchmark reads."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernels_cuda.sources import source_hash
from verikda.bench import workloads as shapes
from verikda.bench.gpu import REPEATS, Device
from verikda.bench.rows import OBJECTIONS, Row, Timing
from verikda.bench.workloads import Mode
from verikda.environment import environment

ABOUT = (
    f"K = V = {shapes.K}, bfloat16. Kernel sources {{hash}}. Microseconds, median (10th to 90th percentile) of "
    f"{REPEATS} calls, the targets taking turns, inputs rotated past the cache. Floor: the larger of fewest bytes at "
    "{bandwidth:.3g} bytes/s and operations in chunks of 16 rows at {tensor_rate:.3g} per second, both measured in "
    "this run. By: replays of a CUDA graph; calls between events; or calls queued in a row and timed by the host. "
    "Wall: one call from an idle device, launches included. Error: the largest relative L2 of an output against "
    "float64; ratio: error over noise floor of a small call."
)
TABLE = (
    "| workload | B,T,H | mode | target | time | floor | floor/time | by | wall | memory, MB | error | ratio |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)


def markdown(rows: Sequence[Row], device: Device) -> str:
    """The summary: times beside floors and errors, then the errors by output."""
    lines = [f"# Speed on {device.name}", "", ABOUT.format(**asdict(device), hash=source_hash()), "", *TABLE]
    for r in rows:
        head = f"| {r.workload.title} | {r.workload.shape} |"
        for mode, t in r.times.items():
            mark = f" ({r.reason.partition(':')[0]})" if r.reason.startswith(OBJECTIONS) else ""
            peak = "" if t.peak is None else f"{t.peak / 1e6:.0f}"
            ratio = "" if r.floor_ratio is None else f"{r.floor_ratio:.2f}"
            lines.append(
                f"{head} {mode} | {r.target}{mark} | {t.median:.0f} ({t.low:.0f} to {t.high:.0f}) | {t.floor:.0f} | "
                f"{t.fraction:.0%} | {t.method.partition(' ')[0]} | {t.wall:.0f} | {peak} | "
                f"{max(r.errors.values()):.1e} | {ratio} |"
            )
    untimed = [r for r in rows if r.reason and not r.reason.startswith("not supported")]
    if untimed:
        lines += ["", "Not timed, or timed although wrong:", ""]
        lines += [f"- {r.target}, {r.workload.title} {r.workload.shape}: {r.reason}" for r in untimed]
    names = list(dict.fromkeys(n for r in rows for n in r.errors))
    lines += ["", "Relative L2 against the float64 recurrence, first and last head of the timed shape:", ""]
    lines += [f"| workload | B,T,H | target | {' | '.join(names)} | noise floor |", "|---" * (len(names) + 4) + "|"]
    for r in rows:
        if r.errors:
            cells = " | ".join(f"{r.errors[n]:.1e}" if n in r.errors else "" for n in names)
            lines.append(f"| {r.workload.title} | {r.workload.shape} | {r.target} | {cells} | {r.floor_verdict} |")
    return "\n".join(lines) + "\n"


def write_pytest_benchmark(path: Path, rows: Sequence[Row], device: Device) -> None:
    """Write the times as pytest-benchmark stores its own, for `pytest-benchmark compare`.

    One benchmark per row and mode, in groups of workload and mode; statistics are pytest-benchmark's, over the sampled
    times in seconds; errors, floor and method are in `extra_info`.

    Raises
    ------
    ValueError
        When pytest-benchmark is not installed.
    """
    try:
        from pytest_benchmark import __version__
    except ImportError as error:
        raise ValueError(
            f"--benchmark-json needs pytest-benchmark, which cannot be imported ({error}): pip install 'verikda[test]'"
        ) from None
    data = {
        "machine_info": {
            "node": device.name, "machine": platform.machine(), "system": platform.system(),
            "python_version": platform.python_version(), "cpu": {"brand_raw": platform.processor()},
            "bandwidth": device.bandwidth, "tensor_rate": device.tensor_rate, **environment(),
        },
        "commit_info": {"id": source_hash(), "dirty": False},
        "benchmarks": [_benchmark(r, mode, t) for r in rows for mode, t in r.times.items()],
        "datetime": datetime.now(UTC).isoformat(),
        "version": __version__,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")


def _benchmark(row: Row, mode: Mode, timing: Timing) -> dict[str, Any]:
    from pytest_benchmark.stats import Stats

    stats: Any = Stats()  # type: ignore[no-untyped-call]
    for microseconds in timing.samples:
        stats.update(1e-6 * microseconds)
    w = row.workload
    name = f"{row.target}[{w.title} {w.shape} {mode}]"
    line = row.line()
    return {
        "group": f"{w.title} {w.shape} {mode}",
        "name": name,
        "fullname": f"verikda bench::{name}",
        "params": {"target": row.target, **line["workload"], "mode": mode},
        "param": None,
        "extra_info": {n: line[n] for n in ("errors", "floor_verdict", "floor_ratio", "reason")} | line["times"][mode],
        "options": {
            "disable_gc": False, "timer": timing.method, "min_rounds": len(timing.samples), "max_time": 0.0,
            "min_time": 0.0, "warmup": True,
        },
        "stats": {**stats.as_dict(), "iterations": 1, "data": [1e-6 * x for x in timing.samples]},
    }  # fmt: skip
