"""What `verikda bench` does, apart from reading the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernels_cuda.sources import source_hash
from verikda import show
from verikda.bench.compile_ahead import compile_ahead
from verikda.bench.gpu import REPEATS, Device, DeviceLostError, cuda_torch
from verikda.bench.output import markdown, write_pytest_benchmark
from verikda.bench.peers import chosen
from verikda.bench.rows import Row, exit_status
from verikda.bench.run import bench
from verikda.bench.workloads import MODES, workloads
from verikda.choose import choose
from verikda.environment import environment
from verikda.interrupts import held
from verikda.record import Record, check_outputs
from verikda.status import FAIL


def bench_command(
    targets: Sequence[str],
    *,
    shapes: Sequence[str],
    kinds: Sequence[str] = (),
    modes: Sequence[str] = (),
    also_wrong: bool = False,
    compile_jobs: int = 0,
    json_path: Path | None = None,
    benchmark_json: Path | None = None,
    summary: Path | None = None,
) -> int:
    """Bench on a GPU, print the summary, write the files; the exit status.

    Parameters
    ----------
    compile_jobs : see `compile_ahead`, which runs first unless it is 0.

    Raises
    ------
    NoGpuError, ValueError
        Where nothing can be timed here, or for a target, shape, kind or mode that is not known.
    """
    todo, peers, chosen_modes = workloads(shapes, kinds), chosen(tuple(targets)), choose("mode", MODES, modes or MODES)
    check_outputs(json=json_path, benchmark_json=benchmark_json, summary=summary)
    torch = cuda_torch()
    out = show.console()
    if compile_jobs:
        compile_ahead([p.name for p in peers], todo, compile_jobs, lambda text: out.print(text, markup=False))
    record = Record(json_path)
    opening: dict[str, object] = {"kind": "bench", "kernels": source_hash(), "repeats": REPEATS}
    final: list[Row] = []
    used: list[Device] = []
    lost = ""

    def done(some: Sequence[Row], device: Device) -> None:
        with held():  # whole files
            write(some, device)

    def write(some: Sequence[Row], device: Device) -> None:
        if not final:
            used.append(device)
            speed = {"bandwidth": device.bandwidth, "tensor_rate": device.tensor_rate}
            record.write({**opening, "device": device.name, **speed, "environment": environment()})
        final.extend(some)
        for row in some:
            record.write(row.line())
        # Written after each workload, so that a run that is cut short leaves what it had.
        if summary is not None:
            summary.parent.mkdir(parents=True, exist_ok=True)
            summary.write_text(markdown(final, device), encoding="utf-8")
        if benchmark_json is not None:
            write_pytest_benchmark(benchmark_json, final, device)

    try:
        bench(torch, peers, todo, chosen_modes, also_wrong, lambda text: out.print(text, markup=False), done)
    except KeyboardInterrupt:
        if not final:
            raise
        out.print(f"interrupted after {len({row.workload for row in final})} of {len(todo)} workloads")
    except DeviceLostError as error:
        lost = str(error)
    record.close()
    show.say(out, markdown(final, used[0]))
    if lost:
        reached = len({row.workload for row in final})
        show.say(out, f"ended in workload {reached} of {len(todo)}: {lost}")
        return FAIL
    return exit_status(final)
