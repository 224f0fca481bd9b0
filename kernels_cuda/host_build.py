"""Compile kernels for the processor: the same .cu files under g++ or clang++, with the host twin of the primitives.

Flags: -O1, which compiles four times as fast as -O3 and runs a fifth slower, to the same bits; no -ffast-math;
-ffp-contract=off, so that a result depends on the source and not on which compiler fused which product (kernels write
`fma` where they mean one); -fno-math-errno, which changes no value.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernels_cuda import cache as _cache
from kernels_cuda.sources import HOST, INCLUDE, source_of, texts

_RUNTIME = HOST / "runtime.cpp"
_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fstack-clash-protection",  # a frame larger than the guard page cannot jump over it
)
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})


class CompileError(RuntimeError):
    """A kernel does not compile; carries the compiler's own words."""


@dataclass(frozen=True)
class HostLibrary:
    """A compiled shared library.

    Attributes
    ----------
    path, runtime : the library, whose `vk_kernel(i)` is instance i, and the one whose `vk_launch` runs it.
    instances : its kernels.
    compiler, flags : how it was made.
    """

    path: Path
    runtime: Path
    instances: tuple[str, ...]
    compiler: str
    flags: tuple[str, ...]


@cache
def compiler() -> tuple[str, str]:
    """Path and version of the C++ compiler: $CXX if set, else g++, else clang++.

    Raises
    ------
    CompileError
        If there is none.
    """
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else ("g++", "clang++"):
        if path := shutil.which(name):
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                return path, answer.stdout.splitlines()[0]
    missing = f"CXX={chosen} is not a C++ compiler" if chosen else "neither g++ nor clang++ is on PATH"
    raise CompileError(f"running kernels on the CPU needs a C++17 compiler, and {missing}; install g++ or set CXX")


@cache
def _machine_flags() -> tuple[str, ...]:
    """x86-64-v3 where this processor has it: without hardware FMA, `fma` is a slow library call."""
    try:
        line = next(row for row in Path("/proc/cpuinfo").read_text().splitlines() if row.startswith("flags"))
    except (OSError, StopIteration):
        return ()
    return ("-march=x86-64-v3",) if set(line.split()) >= _V3 else ()


def _variant_flags(sanitize: str | None) -> tuple[str, ...]:
    if sanitize is None:
        return ("-O1",)
    if sanitize != "address":
        raise ValueError(f"sanitize is {sanitize!r}; allowed: None or 'address'")
    if "clang" in compiler()[1]:
        raise CompileError(f"the address sanitizer build needs g++, and the compiler is {compiler()[1]}; set CXX=g++")
    return ("-O1", "-g", "-fsanitize=address", "-fno-omit-frame-pointer")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)}\n{(done.stderr or done.stdout)[-6000:]}")


def _runtime(flags: tuple[str, ...]) -> Path:
    """The fiber runtime: one library for all kernels of a process, so that their threads share one set of stacks."""
    path, version = compiler()
    key = {"kind": "runtime", "compiler": [path, version], "flags": flags, "texts": texts(_RUNTIME)}

    def make(artifact: Path) -> dict[str, str]:
        _run([path, *flags, "-shared", str(_RUNTIME), "-o", str(artifact)])
        return {}

    return _cache.fetch(key, "runtime.so", make)[0]


def build(
    instances: Sequence[str], *, source: Path | None = None, sanitize: str | None = None, defines: Sequence[str] = ()
) -> HostLibrary:
    """A shared library with these kernel instances of one .cu file, from the cache or compiled now.

    Parameters
    ----------
    instances : name expressions as in C++, for example "prepare<bf16,64,1,true>".
    source : the .cu file; by default the one of this package that defines the first instance.
    sanitize : None, or "address" (then the process must start with the sanitizer's library preloaded).
    defines : macros, for example "VK_UCONTEXT".

    Raises
    ------
    CompileError
        If there is no compiler, or it refuses the source.
    """
    source = source_of(instances[0]) if source is None else source
    path, version = compiler()
    flags = (*_FLAGS, *_machine_flags(), *_variant_flags(sanitize), *(f"-D{name}" for name in defines))
    runtime = _runtime(flags)
    key = {
        "kind": "host",
        "instances": list(instances),
        "compiler": [path, version],
        "flags": flags,
        "texts": texts(source),
        "runtime": str(runtime),  # the library names it by its path
    }

    def make(artifact: Path) -> dict[str, str]:
        rows = "".join(f'        vk::host::make_kernel<&{name}>("{name}"),\n' for name in instances)
        unit = artifact.with_name("unit.cpp")
        unit.write_text(
            f'#include "{source}"\nusing namespace vk;\n'
            'extern "C" __attribute__((visibility("default"))) const vk::host::Kernel* vk_kernel(int i) {\n'
            f"    static constexpr vk::host::Kernel kernels[] = {{\n{rows}    }};\n    return &kernels[i];\n}}\n"
        )
        _run([path, *flags, f"-I{INCLUDE}", "-shared", str(unit), str(runtime), "-o", str(artifact)])
        return {}

    return HostLibrary(_cache.fetch(key, "kernels.so", make)[0], runtime, tuple(instances), version, flags)


def sanitizer_library() -> Path:
    """The address sanitizer's runtime, to be preloaded into the process that loads a sanitized library.

    Raises
    ------
    CompileError
        If the compiler does not have it.
    """
    path, version = compiler()
    answer = subprocess.run([path, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    library = Path(answer.stdout.strip())
    if not library.is_absolute():
        raise CompileError(f"{version} has no address sanitizer runtime; install it, or use the plain build")
    return library
