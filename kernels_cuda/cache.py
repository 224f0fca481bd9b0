"""Compiled kernels by content: one directory per key, complete or absent, rebuilt when damaged."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_META = "meta.json"
_ADVICE = "set VERIKDA_CACHE to a writable directory"


def cache_dir() -> Path:
    """Where compiled kernels are kept: $VERIKDA_CACHE, else $XDG_CACHE_HOME/verikda, else ~/.cache/verikda.

    Raises
    ------
    OSError
        If the directory cannot be made or written.
    """
    if chosen := os.environ.get("VERIKDA_CACHE"):
        path = Path(chosen)
    else:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verikda"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make the kernel cache {path} ({error}); {_ADVICE}") from error
    if not os.access(path, os.W_OK):
        raise OSError(f"the kernel cache {path} is not writable; {_ADVICE}")
    return path


def uncached(compiler: str) -> tuple[str, ...]:
    """Flags with which a compiler really compiles.

    NVRTC has a cache of its own where there is a driver, from 12.9 on, and it hands out code made with another --ftz:
    on an H200, 13.5 gave equal cubins for --ftz=false and --ftz=true.

    Parameters
    ----------
    compiler : as `kernels_cuda.build.compiler` names it, for example "NVRTC 13.0".
    """
    name, _, version = compiler.partition(" ")
    new = name == "NVRTC" and tuple(map(int, version.split("."))) >= (12, 9)
    return ("--no-cache",) if new else ()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read(entry: Path, artifact: str) -> dict[str, Any] | None:
    """Meta of a sound entry, None for an absent or damaged one."""
    try:
        meta: dict[str, Any] = json.loads((entry / _META).read_text())
        return meta if meta["sha256"] == _sha256(entry / artifact) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fetch(
    key: Mapping[str, Any], artifact: str, build: Callable[[Path], Mapping[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """The artifact for `key`, built if there is none.

    Parameters
    ----------
    key : everything that decides the artifact's bytes; JSON values.
    artifact : its file name.
    build : called with the path at which to write it; returns JSON values to keep beside it.

    Returns
    -------
    path, meta : the file, and what `build` returned.
    """
    root = cache_dir()
    entry = root / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    if (meta := _read(entry, artifact)) is not None:
        return entry / artifact, meta["kept"]

    # Built aside and renamed, so that another process sees all of it or nothing.
    work = Path(tempfile.mkdtemp(prefix="building-", dir=root))
    try:
        kept = dict(build(work / artifact))
        (work / _META).write_text(json.dumps({"sha256": _sha256(work / artifact), "kept": kept}))
        try:
            os.rename(work, entry)
        except OSError:  # somebody was faster, or a damaged entry is in the way
            if (meta := _read(entry, artifact)) is not None:
                return entry / artifact, meta["kept"]
            damaged = Path(tempfile.mkdtemp(prefix="damaged-", dir=root))
            os.rename(entry, damaged / "entry")
            os.rename(work, entry)
            shutil.rmtree(damaged, ignore_errors=True)
        return entry / artifact, kept
    finally:
        shutil.rmtree(work, ignore_errors=True)
