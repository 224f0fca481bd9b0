"""NVRTC through its C interface: a few functions, no GPU and no CUDA toolkit needed, only the library."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kernels_cuda.host_build import CompileError


def _candidates() -> list[str]:
    found: list[str] = []
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        found.append(str(load_nvidia_dynamic_lib("nvrtc").abs_path))
    except Exception:  # absent, or it knows no NVRTC: its own exception types differ between versions
        pass
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            found += [str(path) for path in sorted(Path(home).glob("lib*/libnvrtc.so*"))]
    return [*found, "libnvrtc.so.13", "libnvrtc.so.12"]


@cache
def library() -> ctypes.CDLL | None:
    """The NVRTC library, or None if there is none."""
    for name in _candidates():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def version() -> str:
    """For example "NVRTC 13.0"; "" if there is no NVRTC."""
    nvrtc = library()
    if nvrtc is None:
        return ""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"NVRTC {major.value}.{minor.value}"


def compile_cubin(
    text: str, name: str, options: Sequence[str], expressions: Sequence[str]
) -> tuple[bytes, dict[str, str], str, str]:
    """Compile CUDA C++ to a cubin.

    Parameters
    ----------
    text, name : the source and the file name shown in messages.
    options : compiler options, for example "-arch=sm_90a".
    expressions : name expressions of the kernels wanted.

    Returns
    -------
    cubin, lowered, log, ptx : the code, the mangled name of each expression, what the compiler said, the code before
        registers were given out.

    Raises
    ------
    CompileError
        If there is no NVRTC, or it refuses the source.
    """
    nvrtc = library()
    if nvrtc is None:
        raise CompileError("there is no NVRTC library; install nvidia-cuda-nvrtc")
    program = ctypes.c_void_p()
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(status: int, detail: str = "") -> None:
        if status != 0:
            raise CompileError(f"{name}: {nvrtc.nvrtcGetErrorString(status).decode()} {detail}".rstrip())

    def fetch(size: str, get: str) -> bytes:
        count = ctypes.c_size_t()
        check(getattr(nvrtc, size)(program, ctypes.byref(count)))
        buffer = ctypes.create_string_buffer(count.value)
        check(getattr(nvrtc, get)(program, buffer))
        return buffer.raw

    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None))
    try:
        for expression in expressions:
            check(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        encoded = [option.encode() for option in options]
        status = nvrtc.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
        log = fetch("nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")
        check(status, f"with {' '.join(options)}\n{log[-6000:]}")
        lowered = {}
        for expression in expressions:
            mangled = ctypes.c_char_p()
            check(nvrtc.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(mangled)))
            lowered[expression] = (mangled.value or b"").decode()
        ptx = fetch("nvrtcGetPTXSize", "nvrtcGetPTX").rstrip(b"\0").decode()
        return fetch("nvrtcGetCUBINSize", "nvrtcGetCUBIN"), lowered, log, ptx
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
