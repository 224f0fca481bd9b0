"""Which file holds which kernel, and a hash of everything that decides what a kernel computes."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent
INCLUDE = ROOT / "include"
HOST = ROOT / "host"
PLANS = ("backward.py", "build.py", "forward.py", "instances.py", "modules.py", "nvrtc.py")
"""What decides which instances run, with which tiles, buffers, arguments and compiler flags."""

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_KERNEL = re.compile(r"VK_KERNEL(?:_BOUNDS\s*\([^;{}]*?\))?\s+void\s+(\w+)\s*\(")


def base_name(instance: str) -> str:
    """`prepare` of the name expression `prepare<bf16,64,1,true>` or `vk::prepare<vk::bf16,64,1,true>`.

    Raises
    ------
    ValueError
        If `instance` is not a kernel name with optional template arguments.
    """
    match = re.fullmatch(r"(?:\w+::)*(\w+)(?:<.*>)?", instance.strip())
    if match is None:
        raise ValueError(f"{instance!r} is no kernel name; write it as in C++, for example 'prepare<bf16,64,1,true>'")
    return match[1]


def kernel_files() -> tuple[Path, ...]:
    """The .cu files, in name order."""
    return tuple(sorted(ROOT.glob("*.cu")))


def headers() -> tuple[Path, ...]:
    """Every header, and the runtime of the host twin."""
    found = [*ROOT.glob("*.cuh"), *INCLUDE.glob("*.cuh"), *HOST.glob("*.hpp"), *HOST.glob("*.cpp")]
    return tuple(sorted(found))


def kernels_in(source: Path) -> tuple[str, ...]:
    """Names of the kernels that `source` defines."""
    return tuple(_KERNEL.findall(source.read_text()))


@cache
def _directory() -> dict[str, Path]:
    where: dict[str, Path] = {}
    for path in kernel_files():
        for name in kernels_in(path):
            if where.setdefault(name, path) != path:
                raise ValueError(f"kernel {name} is defined in {where[name].name} and in {path.name}; rename one")
    return where


def source_of(instance: str) -> Path:
    """The .cu file of a kernel instance.

    Raises
    ------
    ValueError
        If no file of this package defines the kernel.
    """
    name = base_name(instance)
    try:
        return _directory()[name]
    except KeyError:
        known = ", ".join(sorted(_directory())) or "none"
        raise ValueError(f"no kernel named {name}; known kernels: {known}") from None


def texts(source: Path) -> dict[str, str]:
    """Text of `source` and of every file it includes, directly or not: what a cache key must contain.

    Both branches of a conditional include count, so a change to the host twin also recompiles for the GPU.
    """
    found: dict[str, str] = {}
    waiting = [source.resolve()]
    while waiting:
        path = waiting.pop()
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        if name in found:
            continue
        found[name] = path.read_text()
        for included in _INCLUDE.findall(found[name]):
            beside, shared = path.parent / included, INCLUDE / included
            if beside.exists() or shared.exists():
                waiting.append((beside if beside.exists() else shared).resolve())
    return found


def source_hash() -> str:
    """SHA-256 over all kernel sources, headers and launch plans, 16 hex digits.

    Evidence names the kernels it was made with by this. A plan counts as much as a source: a wrong tile size, grid or
    compiler flag makes right sources give wrong results.
    """
    digest = hashlib.sha256()
    for path in (*kernel_files(), *headers(), *(ROOT / name for name in PLANS)):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
        digest.update(path.read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()[:16]
