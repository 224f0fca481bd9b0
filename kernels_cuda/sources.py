"""Which file holds which kernel, and a hash of everything a kernel is compiled from."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent
INCLUDE = ROOT / "include"
HOST = ROOT / "host"

_KERNEL = re.compile(r"VK_KERNEL(?:_BOUNDS\s*\([^;{}]*?\))?\s+void\s+(\w+)\s*\(")


def base_name(instance: str) -> str:
    """`prepare` of the name expression `prepare<bf16,64>` or `vk::prepare<vk::bf16,64>`.

    Raises
    ------
    ValueError
        If `instance` is not a kernel name with optional template arguments.
    """
    match = re.fullmatch(r"(?:\w+::)*(\w+)(?:<.*>)?", instance.strip())
    if match is None:
        raise ValueError(f"{instance!r} is no kernel name; write it as in C++, for example 'prepare<bf16,64>'")
    return match[1]


def kernel_files() -> tuple[Path, ...]:
    """The .cu files, in name order."""
    return tuple(sorted(ROOT.glob("*.cu")))


def headers() -> tuple[Path, ...]:
    """Everything a .cu file may include, on either side."""
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
    """Text of `source` and of all headers, keyed by name: what a cache key must contain."""
    found = {str(path.relative_to(ROOT)): path.read_text() for path in headers()}
    found |= {f"beside/{path.name}": path.read_text() for path in sorted(source.parent.glob("*.cuh"))}
    return found | {"source": source.read_text()}


def source_hash() -> str:
    """SHA-256 over all kernel sources and headers, 16 hex digits: evidence names the kernels it was made with."""
    digest = hashlib.sha256()
    for path in (*kernel_files(), *headers()):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode())
        digest.update(path.read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()[:16]
