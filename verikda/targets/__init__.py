"""Targets: the implementations that can be checked, and how they are found by name.

Besides the built-in names, any "package.module:function" with a public signature is a target, and so is
whatever a package registers under the entry-point group "verikda.targets".
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from verikda.targets.base import Target, TargetError, told
from verikda.targets.contracts import Declared, contract_by_name

__all__ = ["Available", "Target", "TargetError", "available", "contract_by_name", "made_here", "registered", "resolve"]

GROUP = "verikda.targets"


@dataclass(frozen=True)
class BuiltIn:
    """A target that comes with this package: where it is made, and which modules it needs."""

    description: str
    module: str
    factory: str
    needs: tuple[str, ...] = ()
    install: str = ""
    takes_contract: bool = False


BUILT_IN = {
    "verikda": BuiltIn(
        "own kernels: on the GPU if there is one, else the same sources on the CPU", "verikda.targets.own", "best"
    ),
    "verikda:host": BuiltIn("own kernels on the CPU (needs a C++ compiler)", "verikda.targets.own", "host"),
    "verikda:cuda": BuiltIn(
        "own kernels on the GPU (needs one)",
        "verikda.targets.own",
        "cuda",
        ("cupy",),
        "pip install 'verikda[cuda13]' (or cuda12)",
    ),
    "emulator": BuiltIn(
        "the chunked algorithm in NumPy, rounded to nearest where the contract says",
        "verikda.targets.emulator",
        "Emulator",
        takes_contract=True,
    ),
    "zoo": BuiltIn(
        "a healthy chunked implementation in NumPy; zoo:FAULT is the same with one planted fault",
        "verikda.zoo.target",
        "ZooTarget",
    ),
    "transformers": BuiltIn(
        "Kimi-Linear's chunk_kimi_delta_attention, the torch path, on the CPU",
        "verikda.targets.transformers",
        "chunked",
        ("torch", "transformers"),
        "pip install 'verikda[peers]'",
    ),
    "transformers:recurrent": BuiltIn(
        "Kimi-Linear's recurrent_kimi_delta_attention, the torch path, on the CPU",
        "verikda.targets.transformers",
        "recurrent",
        ("torch", "transformers"),
        "pip install 'verikda[peers]'",
    ),
    "transformers:cuda": BuiltIn(
        "the same chunked function on the GPU",
        "verikda.targets.transformers",
        "on_gpu",
        ("torch", "transformers"),
        "pip install 'verikda[peers]'",
    ),
    "fla": BuiltIn(
        "flash-linear-attention's chunk_kda, both paths by safe_gate (GPU)",
        "verikda.targets.fla",
        "chunked",
        ("torch", "fla"),
        "pip install fla-core einops",
    ),
    "fla:recurrent": BuiltIn(
        "flash-linear-attention's fused_recurrent_kda, forward only (GPU)",
        "verikda.targets.fla",
        "recurrent",
        ("torch", "fla"),
        "pip install fla-core einops",
    ),
    "fla:delta": BuiltIn(
        "flash-linear-attention's chunk_delta_rule (GPU)",
        "verikda.targets.fla",
        "delta",
        ("torch", "fla"),
        "pip install fla-core einops",
    ),
    "cudnn": BuiltIn(
        "cuDNN frontend's Kimi Delta Attention, forward and backward (Hopper GPU)",
        "verikda.targets.cudnn",
        "training",
        ("torch", "cudnn"),
        "pip install 'nvidia-cudnn-frontend>=1.32'",
    ),
    "cudnn:forward": BuiltIn(
        "its forward alone, with gate, norm and sigmoid in the kernel (Hopper GPU)",
        "verikda.targets.cudnn",
        "forward",
        ("torch", "cudnn"),
        "pip install 'nvidia-cudnn-frontend>=1.32'",
    ),
    "jla": BuiltIn(
        "jax-linear-attention's kda (Hopper GPU)",
        "verikda.targets.jla",
        "kda",
        ("jax", "jla"),
        "pip install jax-linear-attention 'jax[cuda13]==0.11.2'",
    ),
    "jla:delta": BuiltIn(
        "jax-linear-attention's deltanet (Hopper GPU)",
        "verikda.targets.jla",
        "delta",
        ("jax", "jla"),
        "pip install jax-linear-attention 'jax[cuda13]==0.11.2'",
    ),
    "flashkda": BuiltIn(
        "MoonshotAI's FlashKDA, forward only (Hopper GPU)",
        "verikda.targets.flashkda",
        "forward",
        ("torch", "flash_kda"),
        "build it from github.com/MoonshotAI/FlashKDA",
    ),
}


@dataclass(frozen=True)
class Available:
    """One line of the list of targets; `reason` says what is missing where it is not installed."""

    name: str
    description: str
    installed: bool
    reason: str = ""


def available() -> list[Available]:
    """The built-in targets and those that installed packages register, with what is missing for each."""
    lines = []
    for name, entry in BUILT_IN.items():
        missing = [m for m in entry.needs if importlib.util.find_spec(m) is None]
        reason = f"no module named {', '.join(missing)}: {entry.install}" if missing else ""
        lines.append(Available(name, entry.description, not missing, reason))
    for point in _entry_points():
        if point.name not in BUILT_IN:
            where = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
            lines.append(Available(point.name, f"{point.value}, registered by {where}", True))
    return lines


def made_here(line: Available) -> Available:
    """The line after its target has been made: not installed, with the reason, where that fails.

    That its modules are there says little: they may need a GPU. Making it imports them, which takes seconds.
    """
    if not line.installed:
        return line
    try:
        resolve(line.name)
    except Exception as error:  # one broken library must not hide the other lines
        return replace(line, installed=False, reason=str(error) or type(error).__name__)
    return line


def resolve(name: str, *, contract: Declared | None = None, device: str | None = None) -> Target:
    """The target called `name`.

    Parameters
    ----------
    name : a built-in name, one that an installed package registers, or "package.module:function". The latter
        two may also name a ready-made target, or a class that makes one without arguments.
    contract : the rounding contract of a function or of the emulator, instead of the one it declares.
    device : where a torch function runs, such as "cpu" or "cuda:1".

    Raises
    ------
    TargetError
        When there is no such target or it cannot be used; one sentence says why and what to do.
    """
    if name in BUILT_IN:
        entry = BUILT_IN[name]
        options = {"contract": contract} if entry.takes_contract and contract is not None else {}
        _refuse_options(name, None if options else contract, device)
        return cast(Target, getattr(importlib.import_module(entry.module), entry.factory)(**options))
    if name.startswith("zoo:"):
        from verikda.zoo.target import zoo_target

        _refuse_options(name, contract, device)
        return zoo_target(name)
    for point in _entry_points():
        if point.name == name:
            try:
                found = point.load()
            except (Exception, SystemExit) as error:
                raise TargetError(f"target {name}: loading {point.value} failed: {told(error)}") from error
            return as_target(found, name, contract, device)
    if ":" not in name:
        known = [line.name for line in available()]
        raise TargetError(f"target {name!r} is not known: use one of {', '.join(known)}, or package.module:function")
    from verikda.targets.loading import load

    return as_target(load(name), name, contract, device)


def as_target(found: Any, name: str, contract: Declared | None = None, device: str | None = None) -> Target:
    """A target from a target, a class of targets, or a function with a public signature.

    A function works on torch tensors, or on NumPy arrays where its attribute `verikda_arrays` is "numpy".

    Raises
    ------
    TargetError
        When it is none of these.
    """
    if isinstance(found, type) and _is_target(found):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise TargetError(f"{name}: making the target failed: {told(error)}") from error
    if _is_target(found):
        _refuse_options(name, contract, device)
        return cast(Target, found)
    if not callable(found):
        raise TargetError(f"{name} is a {type(found).__name__}, neither a function nor a target")
    function: Callable[..., Any] = found
    arrays = getattr(function, "verikda_arrays", "torch")
    if arrays == "numpy":
        from verikda.targets.numpy_function import NumpyFunction

        if device not in (None, "cpu"):
            raise TargetError(f"{name} works on NumPy arrays; device {device!r} does not apply")
        return NumpyFunction(function, name, contract=contract)
    if arrays != "torch":
        raise TargetError(f"{name}: verikda_arrays is {arrays!r}; use 'torch' or 'numpy'")
    from verikda.targets.torch_function import TorchFunction

    return TorchFunction(function, name, contract=contract, device=device)


def _refuse_options(name: str, contract: Declared | None, device: str | None) -> None:
    for option, value in (("contract", contract), ("device", device)):
        if value is not None:
            raise TargetError(f"target {name} declares its own {option}; {option} {value!r} cannot be set for it")


def _is_target(thing: Any) -> bool:
    return all(hasattr(thing, part) for part in ("name", "capabilities", "contract", "run"))


def registered(name: str) -> list[tuple[str, str]]:
    """Module and attribute of what installed packages register as `name`, unless a built-in target has that name."""
    return [(point.module, point.attr) for point in _entry_points() if point.name == name and name not in BUILT_IN]


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name)
