"""What compiled kernels must not contain: spills, stack, static shared memory, and instructions that lose digits.

    python -m kernels_cuda.audit                          # the usual instances, on sm_90a
    python -m kernels_cuda.audit sm_80 --all --workers 8

Forbidden in PTX: flush-to-zero and approximations other than exp2's (`APPROXIMATIONS`), TF32 but for the decayed rows
of 16-bit calls, sums in 16 bits, atomics, arrays in local memory, and addresses made of a 64-bit offset that was cut to
32 bits. `SPILLS` lists the instances that spill nevertheless; a number in it that is too high is a problem as well.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping

from kernels_cuda import instances
from kernels_cuda.build import ARCHES, NUMERICS, Cubin, build, compile_all, compiler
from kernels_cuda.cache import uncached
from kernels_cuda.sources import base_name

APPROXIMATIONS = ("ex2.approx.f32", "ex2.approx.ftz.f32")
"""2 ulp, part of every contract. The second flushes results below 2^-126; it is the core of expf too."""
SPILLS: Mapping[str, Mapping[str, int]] = {
    "sm_80": {"prepare<bf16,64,3,true>": 32},
}
"""Most bytes, stored and loaded together, by architecture and instance: what `COMPILER` needs.

It is held to the registers with which two blocks share a multiprocessor; `anew` of device.cuh keeps others within them.
"""
COMPILER = "NVRTC 13.5"

TF32 = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
_TF32_ALLOWED = re.compile(r"prepare<(bf16|f16),\d+,[1-9],")
"""Where the contract of 16-bit calls has it (`oracles.contract.operands_tf32`). Without a gate no row is decayed."""

_FORBIDDEN = {
    r"\.ftz": "flushes subnormal numbers",
    r"\.approx|^div\.full": "is approximate",
    r"tf32": "rounds operands to TF32",
    r"^(mma|wgmma)\b(?!.*\.f32\.(f16\.f16|bf16\.bf16|tf32\.tf32)(\.f32)?$)": "does not add in float32",
    r"^(atom|red)\b": "adds in an order of its own",
    r"^(ld|st)\.(volatile\.)?local|^\.local$": "uses local memory",
    r"^cut offset$": "is an address made of a 64-bit offset cut to 32 bits",
}

_UNUSUAL = re.compile(
    r"(prepare|backward_local|backward_intra)<.*,false>|chunk_state<.*,(false,true|true,false|false,false)>"
)  # ragged, or no output


def problems(made: Cubin, spills: Mapping[str, int]) -> list[str]:
    """What is wrong with a compiled instance.

    Parameters
    ----------
    spills : bytes that instances may spill, stores and loads together.

    Raises
    ------
    ValueError
        If the compiler reported nothing to judge by.
    """
    if made.resources is None or made.opcodes is None:
        raise ValueError(f"{made.compiler} reports neither registers nor PTX of {made.instance}; use NVRTC")
    found = [
        f"{opcode} ({count} times) {why}"
        for opcode, count in made.opcodes.items()
        for pattern, why in _FORBIDDEN.items()
        if opcode not in APPROXIMATIONS
        and re.search(pattern, opcode)
        and not (opcode == TF32 and _TF32_ALLOWED.match(made.instance))
    ]
    spilled, allowed = made.resources.spill_stores + made.resources.spill_loads, spills.get(made.instance, 0)
    if spilled > allowed:
        found.append(f"spills {spilled} bytes, {allowed} are allowed")
    if spilled < allowed and made.compiler == COMPILER:
        found.append(f"spills {spilled} bytes and {allowed} are allowed: lower the number in SPILLS")
    if made.resources.stack and not spilled:
        found.append(f"has {made.resources.stack} bytes of stack")
    if made.resources.shared:
        found.append(f"has {made.resources.shared} bytes of static shared memory, which the host does not poison")
    return [f"{made.instance} on {made.arch}: {text}" for text in found]


def usual(arch: str) -> list[str]:
    """Instances of K = V = 128 and chunk 64 with whole rows: on sm_90a all in bfloat16 and float32.

    On other architectures the last one of each kernel in bfloat16.
    """
    dtypes = ("bfloat16", "float32") if arch == "sm_90a" else ("bfloat16",)
    found = instances.instances(arch, dtypes=dtypes, chunks=(64,), channels=(128,)).kernels
    names = [name for name in found if not _UNUSUAL.match(name)]
    return names if arch == "sm_90a" else list({base_name(name): name for name in names}.values())


def audit(arch: str, names: Iterable[str], workers: int = 1) -> list[str]:
    """Problems of instances on one architecture; compiles what is not in the cache.

    What NVRTC took from its own cache it says nothing about: that is compiled again.
    """
    made = compile_all(arch, names, workers=workers)
    if fresh := uncached(compiler()):
        made = [m if m.resources else build(m.instance, arch, flags=(*NUMERICS, *fresh)) for m in made]
    return [problem for m in made for problem in problems(m, SPILLS.get(arch, {}))]


def main() -> int:
    """Run from the command line; 0 if nothing is wrong."""
    parser = argparse.ArgumentParser(prog="python -m kernels_cuda.audit", description=__doc__.splitlines()[0])
    parser.add_argument("arch", nargs="*", help=f"architectures, of {', '.join(ARCHES)}; by default sm_90a")
    parser.add_argument("--all", action="store_true", help="every instance that a launch plan can ask for")
    parser.add_argument("--workers", type=int, default=1, help="compilers at a time")
    given = parser.parse_args()
    if unknown := [arch for arch in given.arch if arch not in ARCHES]:
        parser.error(f"{unknown[0]} is no architecture of these kernels; use {', '.join(ARCHES)}")
    found: list[str] = []
    for arch in given.arch or ["sm_90a"]:
        names = list(instances.instances(arch).kernels) if given.all else usual(arch)
        wrong = audit(arch, names, given.workers)
        print(*wrong, f"{arch}: {len(names)} instances, {len(wrong)} problems", sep="\n")
        found += wrong
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
