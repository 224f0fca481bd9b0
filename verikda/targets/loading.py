"""From "package.module:function" to the function, and from a function to what ran."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verikda.targets.base import TargetError, told


def load(spec: str) -> Any:
    """What `spec`, "package.module:function", names; modules of the current folder count.

    Importing the module runs its code.

    Raises
    ------
    TargetError
        When the text has another form, the module cannot be imported, or it has no such name.
    """
    module_name, colon, path = spec.partition(":")
    if not colon or not module_name or not path:
        raise TargetError(f"{spec!r} is not of the form package.module:function")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise TargetError(
            f"{module_name!r} is not a module name: write package.module:function, without .py or slashes"
        )
    module = _import(module_name)
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise TargetError(
                f"module {module_name} ({_file(module)}) has no {path!r}; its callables are: "
                f"{', '.join(public[:20]) or 'none'}"
            )
        found = getattr(found, part)
    return found


def _import(name: str) -> Any:
    folder = str(Path.cwd())
    here = folder in sys.path or "" in sys.path
    if not here:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise TargetError(
                f"no module named {error.name}: install it, or run from the folder that holds it (now {folder})"
            ) from error
        raise TargetError(f"importing {name} failed: it needs {error.name}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raise TargetError(f"importing {name} failed: {told(error)}") from error
    finally:
        if not here and folder in sys.path:
            sys.path.remove(folder)


def describe(function: Callable[..., Any]) -> str:
    """Qualified name, file and line, and package version of the code that `function` is.

    The file and line are those of the code object itself, so a wrapper shows as the wrapper that it is.
    """
    while isinstance(function, functools.partial):
        function = function.func
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
    code = getattr(function, "__code__", None)
    place = f" ({short(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""
    return f"{name}{place}{_version(name.partition('.')[0])}"


def _version(package: str) -> str:
    found = getattr(sys.modules.get(package), "__version__", None)
    if found is None:
        try:
            found = importlib.metadata.version(package)
        except (importlib.metadata.PackageNotFoundError, ValueError):
            return ""
    return f", {package} {found}"


def _file(module: Any) -> str:
    return short(inspect.getsourcefile(module) or "built in")


def short(path: str) -> str:
    """The path from its package root on, so that records do not carry a machine's folders."""
    parts = Path(path).parts
    for root in ("site-packages", "dist-packages"):
        if root in parts:
            return "/".join(parts[parts.index(root) + 1 :])
    try:
        return Path(path).resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return parts[-1] if parts else path
