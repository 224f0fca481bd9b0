"""What this machine has, and what each part of verikda can therefore do."""

from __future__ import annotations

from collections.abc import Callable

from rich.markup import escape

from verikda import show
from verikda.environment import versions


def _gpu() -> str:
    try:
        import cupy
    except ImportError as error:
        return f"no: cupy cannot be imported ({error}); pip install 'verikda[cuda13]' or 'verikda[cuda12]'"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"no: {error}".splitlines()[0]
    names = [cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]
    driver = cupy.cuda.runtime.driverGetVersion()
    return f"yes: {', '.join(names)}; driver for CUDA {driver // 1000}.{driver % 1000 // 10}"


def _device_compiler() -> str:
    from kernels_cuda import build

    return build.compiler()


def _host_compiler() -> str:
    from kernels_cuda import host_build

    path, version = host_build.compiler()
    return f"{path} ({version})"


def _torch() -> str:
    try:
        import torch
    except ImportError as error:
        return f"no ({error}); pip install 'verikda[torch]'"
    return f"yes: {torch.__version__}, {'GPU' if torch.cuda.is_available() else 'CPU only'}"


def _cache() -> str:
    from kernels_cuda.cache import cache_dir

    return str(cache_dir())


def _sources() -> str:
    from kernels_cuda.sources import source_hash

    return source_hash()


def _proven() -> str:
    from verikda.evidence import proven

    return proven()


PROBES: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("GPU", "run the kernels on a GPU", _gpu),
    ("CUDA compiler", "compile the kernels for a GPU", _device_compiler),
    ("C++ compiler", "run the kernels on the CPU", _host_compiler),
    ("torch", "check torch functions, chunk_kda on tensors", _torch),
    ("kernel cache", "compiled kernels are kept here", _cache),
    ("kernel sources", "hash that reports name", _sources),
    ("GPU evidence", "what reports/h200 shows of these sources", _proven),
)


def probe(find: Callable[[], str]) -> str:
    """The finding, or the error in one line: a doctor must not fall ill."""
    try:
        return find()
    except Exception as error:
        return f"no: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def doctor_command() -> int:
    """Print versions and probes."""
    out = show.console()
    rows = show.table("what", "for", "says")
    for what, purpose, find in PROBES:
        rows.add_row(what, purpose, escape(probe(find)))  # or [cuda13] would be taken for a style
    out.print(rows)
    packages = show.table("package", "version")
    for name, version in versions().items():
        packages.add_row(name, version)
    out.print(packages)
    return 0
