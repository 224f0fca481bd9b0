"""Faults planted in kernels, each shown to be seen by the host runtime; the healthy form of each shown to pass."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from ctypes import c_float, c_int32, c_int64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import HERE, Array, launch

from kernels_cuda.host_build import compiler, sanitizer_library
from kernels_cuda.modules import ORDERS, Host, LaunchError

FAULTS = HERE / "faults.cu"
BOOL = ("false", "true")
INSTANCES = (
    *(f"{kernel}<{on}>" for kernel in ("reversed", "warp_reversed", "rounds", "tail") for on in BOOL),
    *(f"pipeline<{pending},{on}>" for pending in (1, 2) for on in BOOL),
    "shared_overrun", "global_overrun", "early_exit", "divergent_barriers", "absent_lanes", "mixed_collectives",
    "misaligned", "many_parameters", "arrivals", "uninitialised", *(f"deep<{n}>" for n in (1 << 14, 1 << 18)),
)  # fmt: skip
N = 64


def host(**options: Any) -> Host:
    return Host(source=FAULTS, instances=INSTANCES, **options)


def line_of(mark: str) -> str:
    """`faults.cu:12` of the line that carries the comment FAULT: mark."""
    for number, line in enumerate(FAULTS.read_text().splitlines(), 1):
        if line.rstrip().endswith(f"FAULT: {mark}"):
            return f"faults.cu:{number}"
    raise AssertionError(f"no line is marked {mark}")


def error_of(backend: Host, kernel: str, *args: Any, **options: Any) -> str:
    with pytest.raises(LaunchError) as caught:
        launch(backend, kernel, *args, **options)
    return str(caught.value)


def ramp(n: int = N) -> Array:
    return np.arange(1, n + 1, dtype=np.float32)


def zeros(n: int = N) -> Array:
    return np.zeros(n, np.float32)


# ---- races: the result is wrong under at least one order, and right and bit-identical without the fault


def outputs(kernel: str, inputs: Array, *scalars: Any, threads: int = N, shared: int, **options: Any) -> list[Array]:
    """The result under forward, reverse and three shuffled orders."""
    runs = [host(order=order, **options) for order in ORDERS] + [
        host(order="shuffled", seed=s, **options) for s in (1, 2)
    ]
    return [launch(r, kernel, inputs.copy(), zeros(threads), *scalars, threads=threads, shared=shared)[1] for r in runs]


def right(results: list[Array], want: Array) -> list[bool]:
    return [bool(np.array_equal(r, want)) for r in results]


@pytest.mark.parametrize("kernel", ["reversed", "warp_reversed"])
def test_missing_barrier(kernel: str) -> None:
    x = ramp()
    want = x[::-1] if kernel == "reversed" else x.reshape(-1, 32)[:, ::-1].ravel()
    assert all(right(outputs(f"{kernel}<true>", x, shared=4 * N), want))
    assert not any(right(outputs(f"{kernel}<false>", x, shared=4 * N), want))


def test_missing_barrier_before_a_refill() -> None:
    x = ramp(4 * N)
    want = sum(x.reshape(4, N)[i, ::-1] * (i + 1) for i in range(4))
    assert all(right(outputs("rounds<true>", x, c_int32(4), shared=4 * N), want))
    assert not all(right(outputs("rounds<false>", x, c_int32(4), shared=4 * N), want))


def pipeline_results(pending: int, barrier: bool, late: bool) -> list[bool]:
    x = ramp(5 * 4 * N)
    want = x.reshape(5, N, 4)[:, ::-1].sum(axis=(0, 2))
    kernel = f"pipeline<{pending},{str(barrier).lower()}>"
    return right(outputs(kernel, x, c_int32(5), shared=2 * 16 * N, late_copies=late), want)


def test_copy_pipeline_with_its_waits_is_right_whenever_copies_land() -> None:
    assert all(pipeline_results(1, True, late=False))
    assert all(pipeline_results(1, True, late=True))


def test_wait_too_lax_is_seen_only_when_copies_are_late() -> None:
    assert all(pipeline_results(2, True, late=False)), (
        "copies that land at once hide the fault: why late is the default"
    )
    assert not any(pipeline_results(2, True, late=True))


def test_missing_barrier_before_the_next_copy() -> None:
    assert not all(pipeline_results(1, False, late=True))


def test_unfilled_tail_reads_poison() -> None:
    x = ramp()
    want = np.full(N, x[:50].sum(), np.float32)
    assert all(right(outputs("tail<true>", x, c_int32(50), shared=4 * N), want))
    unfilled = outputs("tail<false>", x, c_int32(50), shared=4 * N)
    assert all(np.isnan(r).all() for r in unfilled)
    assert all(right(outputs("tail<false>", x, c_int32(50), shared=4 * N, poison=0), want)), "zeros would hide it"


# ---- what would hang or corrupt on a GPU ---------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_early_exit_names_the_barrier(order: str) -> None:
    error = error_of(host(order=order), "early_exit", zeros(), c_int32(40), threads=N)
    assert "early exit: " in error
    assert f"40 of 64 threads (first 0) wait in sync() at {line_of('early_exit')}" in error
    assert "24 of 64 threads (first 40) returned from the kernel" in error


def test_everybody_leaving_or_staying_is_fine() -> None:
    for leave in (0, N):
        launch(host(), "early_exit", zeros(), c_int32(leave), threads=N)


@pytest.mark.parametrize("order", ORDERS)
def test_divergent_barriers_name_both_lines(order: str) -> None:
    error = error_of(host(order=order), "divergent_barriers", zeros(), c_int32(10), threads=N)
    assert "divergent threads" in error
    assert line_of("divergent_barriers, first") in error
    assert line_of("divergent_barriers, second") in error


def test_a_warp_without_all_its_lanes_is_a_deadlock() -> None:
    error = error_of(host(), "absent_lanes", zeros(), c_int32(31), threads=N)
    assert "deadlock: " in error
    assert f"wait in shfl_xor at {line_of('absent_lanes')}" in error
    assert f"2 of 64 threads (first 31) wait in sync() at {line_of('absent_lanes, the others')}" in error


def test_lanes_in_different_collectives() -> None:
    error = error_of(host(), "mixed_collectives", zeros(), c_int32(7), threads=N)
    assert "thread 7 calls shfl_up" in error
    assert "thread 0 waits in shfl_xor" in error


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (0, "ld128 at faults.cu"),
        (1, "cp_async16 destination at faults.cu"),
        (2, "cp_async16 source at faults.cu"),
        (3, "ldmatrix_x4 at faults.cu"),
        (4, "outside shared memory: byte 512, the block has 512"),
        (5, "ldmatrix_x4 at faults.cu"),
        (6, "cp_async16 destination at faults.cu"),
        (7, "returned with 1 cp.async copies never waited for"),
    ],
)
def test_addresses_that_hardware_refuses(what: int, sentence: str) -> None:
    x = np.zeros(4 * N, np.float32)
    error = error_of(host(), "misaligned", x, zeros(4 * N), c_int32(what), threads=32, shared=512)
    assert sentence in error
    assert ("not 16-byte aligned" in error) == (what < 4)


def test_shared_memory_overrun_without_a_sanitizer() -> None:
    launch(host(), "shared_overrun", zeros(), c_int32(0), threads=N, shared=4 * N)
    error = error_of(host(), "shared_overrun", zeros(), c_int32(1), threads=N, shared=4 * N)
    assert "shared memory overrun: byte 256 was written, the block has 256" in error


def test_after_an_error_the_library_runs_again() -> None:
    backend = host()
    for _ in range(3):
        error_of(backend, "early_exit", zeros(), c_int32(40), threads=N)
        _, out = launch(backend, "reversed<true>", ramp(), zeros(), threads=N, shared=4 * N)
        assert np.array_equal(out, ramp()[::-1])


# ---- the launch itself ---------------------------------------------------------------------------


def many(*args: Any) -> str:
    return error_of(host(), "many_parameters", *args, threads=32)


def test_arguments_are_checked() -> None:
    (out,) = launch(host(), "many_parameters", c_int32(1), c_int64(2), c_float(3), zeros(32), threads=32)
    assert (out == 6).all()
    assert many(c_int32(1), c_int64(2), c_float(3)).endswith("many_parameters takes 4 arguments; given: 3")
    assert many(c_int32(1), c_int32(2), c_float(3), zeros(32)).endswith(
        "argument 1 of many_parameters has 8 bytes; given: 4"
    )
    with pytest.raises(TypeError, match="argument 0 of many_parameters is a int; pass a ctypes value"):
        launch(host(), "many_parameters", 1, c_int64(2), c_float(3), zeros(32), threads=32)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"threads": 33}, r"block is \(33,1,1\); allowed: \(n,1,1\) with n a multiple of 32 up to 1024"),
        ({"threads": 1056}, "multiple of 32 up to 1024"),
        ({"threads": 32, "grid": (1, 65536, 1)}, r"grid is \(1,65536,1\); allowed"),
        ({"threads": 32, "shared": 232449}, "232449 bytes of shared memory asked for; allowed: 232448"),
    ],
)
def test_impossible_launches(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        launch(host(), "arrivals", np.zeros(1, np.int32), np.zeros(1, np.int32), **options)


def test_unknown_order() -> None:
    with pytest.raises(ValueError, match="order is 'sorted'; allowed: forward, reverse, shuffled"):
        Host(order="sorted")


def test_empty_grid_does_nothing() -> None:
    count, _ = launch(host(), "arrivals", np.zeros(1, np.int32), np.zeros(1, np.int32), threads=32, grid=(0, 1, 1))
    assert count[0] == 0


def arrivals(**options: Any) -> list[int]:
    order = np.full(3 * 96, -1, np.int32)
    launch(host(**options), "arrivals", np.zeros(1, np.int32), order, threads=96, grid=(3, 1, 1))
    return list(order)


def test_thread_and_block_orders() -> None:
    assert arrivals(order="forward") == list(range(288))
    assert arrivals(order="reverse") == list(range(287, -1, -1))
    drawn = [arrivals(order="shuffled", seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(drawn[0]) == list(range(288))


@pytest.mark.parametrize("poison", [0x7FFF7FFF, 0xDEADBEEF, 0])
def test_each_block_starts_with_poison(poison: int) -> None:
    for _ in range(2):
        (out,) = launch(host(poison=poison), "uninitialised", np.zeros(32, np.uint32), grid=(4, 1, 1), shared=128)
        assert (out == poison).all()


def test_libraries_share_their_threads() -> None:
    """A process may load hundreds of kernels: stacks of each own would exhaust the mappings the system allows."""

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    launch(host(), "reversed<true>", ramp(1024), zeros(1024), threads=1024, shared=4096)
    before = mappings()
    apart = Host(source=FAULTS)
    launch(apart, "reversed<true>", ramp(1024), zeros(1024), threads=1024, shared=4096)
    assert mappings() - before < 50


# ---- other builds of the runtime -----------------------------------------------------------------


def test_ucontext_fibers_agree() -> None:
    """The switch for processors other than x86-64."""
    (want, *_) = outputs("rounds<true>", ramp(4 * N), c_int32(4), shared=4 * N)
    assert all(right(outputs("rounds<true>", ramp(4 * N), c_int32(4), shared=4 * N, defines=("VK_UCONTEXT",)), want))
    for order in ORDERS:
        backend = host(order=order, defines=("VK_UCONTEXT",))
        assert "early exit" in error_of(backend, "early_exit", zeros(), c_int32(40), threads=N)


def run_elsewhere(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: what it does may kill it."""
    script = f"import sys; sys.path[:0] = {[str(HERE), *sys.path]!r}\nfrom test_host_runtime import *\n{body}"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"} | environment,
    )  # fmt: skip


@pytest.fixture(scope="module")
def preload() -> dict[str, str]:
    if "clang" in compiler()[1]:
        pytest.skip("the address sanitizer build needs g++")
    return {"LD_PRELOAD": str(sanitizer_library())}


@pytest.mark.parametrize("memory", ["global", "shared"])
def test_address_sanitizer_names_the_line_of_an_overrun(preload: dict[str, str], memory: str) -> None:
    body = f"launch(host(sanitize='address'), '{memory}_overrun', zeros(), c_int32({{}}), threads=N, shared=4 * N)"
    done = run_elsewhere(body.format(1), **preload)
    assert done.returncode != 0
    assert "ERROR: AddressSanitizer" in done.stderr
    assert line_of(f"{memory}_overrun") in done.stderr
    healthy = run_elsewhere(body.format(0), **preload)
    assert healthy.returncode == 0, healthy.stderr


def test_address_sanitizer_lets_healthy_kernels_pass(preload: dict[str, str]) -> None:
    done = run_elsewhere(
        """
for order in ORDERS:
    sanitized = host(sanitize="address", order=order)
    for _ in range(2):
        _, out = launch(sanitized, "rounds<true>", ramp(4 * N), zeros(), c_int32(4), threads=N, shared=4 * N)
        _, out = launch(sanitized, "pipeline<1,true>", ramp(20 * N), zeros(), c_int32(5), threads=N, shared=32 * N)
        assert np.array_equal(out, ramp(20 * N).reshape(5, N, 4)[:, ::-1].sum(axis=(0, 2)))
        assert "early exit" in error_of(sanitized, "early_exit", zeros(), c_int32(40), threads=N)
        assert "deadlock" in error_of(sanitized, "absent_lanes", zeros(), c_int32(31), threads=N)
print("fine")
""",
        **preload,
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_stack_overflow_meets_the_guard_page() -> None:
    body = "launch(host(), 'deep<{}>', zeros(32), c_int32(5), threads=32)"
    assert run_elsewhere(body.format(1 << 14)).returncode == 0
    assert run_elsewhere(body.format(1 << 18)).returncode == -signal.SIGSEGV


def test_null_pointers_reach_the_kernel_as_null() -> None:
    body = "from ctypes import c_void_p\nlaunch(host(), 'global_overrun', c_void_p(0), c_int32(0), threads=32)"
    assert run_elsewhere(body).returncode == -signal.SIGSEGV
