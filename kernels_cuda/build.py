"""Compile kernels for NVIDIA GPUs: cubin, mangled names and register use, with no GPU needed.

NVRTC is called directly and not through CuPy, which appends -ftz=true and so loses subnormals. Every flag that changes
a value is spelled out in `NUMERICS`; it is part of the cache key and belongs into every report.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from kernels_cuda import cache as _cache
from kernels_cuda import nvrtc
from kernels_cuda import ptx as _ptx
from kernels_cuda.host_build import CompileError
from kernels_cuda.sources import INCLUDE, base_name, source_of, texts

ARCHES = ("sm_80", "sm_90a", "sm_100", "sm_120")
NUMERICS = ("--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=true")


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel: registers per thread; bytes of spills, of stack, of static shared memory."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel instance.

    Attributes
    ----------
    path : the cubin.
    instance, symbol : its name expression and its mangled name.
    arch, flags, compiler : how it was made.
    resources : register use, None where the compiler did not say.
    opcodes : how often each instruction stands in its PTX, see `kernels_cuda.ptx.opcodes`; None where there was no PTX.
    """

    path: Path
    instance: str
    symbol: str
    arch: str
    flags: tuple[str, ...]
    compiler: str
    resources: Resources | None
    opcodes: Mapping[str, int] | None


@cache
def _nvcc() -> tuple[str, str] | None:
    path = shutil.which("nvcc")
    if path is None:
        return None
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return path, "nvcc " + answer.strip().splitlines()[-1]


def compiler() -> str:
    """The compiler that will be used: NVRTC where there is one, else nvcc.

    Raises
    ------
    CompileError
        If there is neither.
    """
    if version := nvrtc.version():
        return version
    if (found := _nvcc()) is not None:
        return found[1]
    raise CompileError("compiling for a GPU needs NVRTC or nvcc; install nvidia-cuda-nvrtc (pip) or the CUDA toolkit")


def parse_resources(log: str) -> dict[str, Resources]:
    """Resources of each kernel in a ptxas -v log, by mangled name."""
    found: dict[str, Resources] = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        symbol = part[: part.index("'")]

        def number(pattern: str, text: str = part) -> int:
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        found[symbol] = Resources(
            registers=number(r"Used (\d+) registers"),
            spill_stores=number(r"(\d+) bytes spill stores"),
            spill_loads=number(r"(\d+) bytes spill loads"),
            stack=number(r"(\d+) bytes stack frame"),
            shared=number(r"(\d+) bytes smem"),
        )
    return found


def _compile_nvrtc(source: Path, instance: str, options: Sequence[str]) -> tuple[bytes, str, str, str]:
    text = source.read_text() + "\nusing namespace vk;\n"
    code, lowered, log, ptx = nvrtc.compile_cubin(text, str(source), options, [instance])
    return code, lowered[instance], log, ptx


def _compile_nvcc(source: Path, instance: str, options: Sequence[str]) -> tuple[bytes, str, str, str]:
    found = _nvcc()
    assert found is not None
    with tempfile.TemporaryDirectory() as folder:
        unit, out = Path(folder) / "unit.cu", Path(folder) / "unit.cubin"
        # A host reference makes the front end emit the instance.
        reference = f"void* const vk_instance = reinterpret_cast<void*>(&{instance});"
        unit.write_text(f'#include "{source}"\nusing namespace vk;\n{reference}\n')
        command = [found[0], "-cubin", *options, str(unit), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        log = done.stdout + done.stderr
        if done.returncode != 0:
            raise CompileError(f"{' '.join(command)}\n{log[-6000:]}")
        name = base_name(instance)
        symbols = [s for s in parse_resources(log) if f"{len(name)}{name}" in s]
        if len(symbols) != 1:
            raise CompileError(f"nvcc emitted {len(symbols)} kernels for {instance}, not one: {', '.join(symbols)}")
        return out.read_bytes(), symbols[0], log, ""


def build(
    instance: str,
    arch: str,
    *,
    source: Path | None = None,
    flags: Sequence[str] = NUMERICS,
    lineinfo: bool = False,
) -> Cubin:
    """One kernel instance for one architecture, from the cache or compiled now.

    Parameters
    ----------
    instance : name expression as in C++, for example "prepare<bf16,64>".
    arch : for example "sm_90a".
    source : the .cu file; by default the one of this package that defines the kernel.
    flags : the flags that change values.
    lineinfo : keep source lines for profilers.

    Raises
    ------
    CompileError
        If there is no compiler, or it refuses the source.
    """
    source = source_of(instance) if source is None else source
    chosen = compiler()
    options = (
        f"-arch={arch}",
        "-std=c++17",
        *flags,
        f"-I{INCLUDE}",
        f"-I{source.parent}",
        "--ptxas-options=-v",
        *(("-lineinfo",) if lineinfo else ()),
    )
    recorded = tuple(option for option in options if not option.startswith("-I"))
    key = {
        "kind": "cubin",
        "instance": instance,
        "compiler": chosen,
        "flags": recorded,
        "texts": texts(source) | {"ptx.py": Path(_ptx.__file__).read_text()},
    }

    def make(artifact: Path) -> dict[str, object]:
        compile_ = _compile_nvrtc if chosen.startswith("NVRTC") else _compile_nvcc
        code, symbol, log, ptx = compile_(source, instance, options)
        artifact.write_bytes(code)
        resources = parse_resources(log).get(symbol)
        return {
            "symbol": symbol,
            "resources": asdict(resources) if resources else None,
            "opcodes": _ptx.opcodes(ptx, symbol) if ptx else None,
        }

    path, kept = _cache.fetch(key, "kernel.cubin", make)
    resources = Resources(**kept["resources"]) if kept["resources"] else None
    return Cubin(path, instance, kept["symbol"], arch, recorded, chosen, resources, kept["opcodes"])


def compile_all(arch: str, instances: Iterable[str] | None = None, *, workers: int = 1) -> list[Cubin]:
    """Compile instances for one architecture, by default every one that a launch plan can ask for (some minutes).

    Raises
    ------
    CompileError
        At the first instance that does not compile.
    """
    if instances is None:
        from kernels_cuda import instances as _instances  # imports the launch plans

        instances = _instances.instances(arch).kernels
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda instance: build(instance, arch), instances))
