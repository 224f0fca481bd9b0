"""Config files with which flash-linear-attention's kernels run without being tuned for every new combination of sizes.

With FLA_CACHE_MODE=default a kernel takes the `default_config` of FLA_CONFIG_DIR/{kernel_name}.json; each file written
here has the first config that the library would try. Kernels under Triton's own `autotune` read no file.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verikda.record import check_folders
from verikda.targets.base import TargetError
from verikda.targets.fla import library_function

SHOWN = 8
"""Kernels without a file that are named: the import of one operator may bring those of all others."""


def tuned_kernels(modules: Mapping[str, Any]) -> dict[str, Any]:
    """The tuners of Triton in the modules of fla, by the module and name of their kernels.

    Parameters
    ----------
    modules : by name, as in `sys.modules`.
    """
    found = {}
    for name, module in modules.items():
        if name.partition(".")[0] == "fla":
            for value in list(_attributes(module).values()):
                found.update(_tuners(value))
    return found


def _tuners(value: Any) -> dict[str, Any]:
    """Those in a chain of Triton's decorators: each has what it decorates as `fn`, the last the Python function."""
    tuners = []
    while "fn" in (own := _attributes(value)):
        # of one config Triton runs that one, untuned
        if isinstance(own.get("configs"), list) and len(own["configs"]) > 1:
            tuners.append(value)
        value = own["fn"]
    return {f"{value.__module__}.{value.__name__}": tuner for tuner in tuners}


def _attributes(value: Any) -> Mapping[str, Any]:
    """An object's own: `getattr` would ask objects that make up any attribute, such as torch.ops."""
    own: Mapping[str, Any] = getattr(value, "__dict__", {})
    return own


def write_configs(kernels: Mapping[str, Any], folder: Path, triton_version: str) -> tuple[int, list[str]]:
    """Write the first config of each kernel.

    Parameters
    ----------
    kernels : see `tuned_kernels`.
    folder : made if it is missing.

    Returns
    -------
    tuple[int, list[str]]
        How many kernels have a file now, and the others: without a file's name, or with one that another kernel needs
        for another config.
    """
    wanted: dict[str | None, dict[str, dict[str, Any]]] = {}
    for place, kernel in kernels.items():
        wanted.setdefault(getattr(kernel, "kernel_name", None), {})[place] = _config(kernel.configs[0])
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    left: list[str] = []
    for name, configs in wanted.items():
        config, *others = configs.values()
        if name is None or any(other != config for other in others):
            left += configs
            continue
        file = {"kernel_name": name, "triton_version": triton_version, "default_config": config}
        (folder / f"{name}.json").write_text(json.dumps(file, indent=2) + "\n", encoding="utf-8")
        written += len(configs)
    return written, sorted(left)


def _config(config: Any) -> dict[str, Any]:
    names = ("kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg")
    return {**{name: getattr(config, name) for name in names}, "ir_override": None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Import the library, write, and say how to use it."""
    parser = argparse.ArgumentParser(
        prog="python -m verikda.targets.fla_untuned",
        description="Writes config files with which flash-linear-attention's kernels run without tuning.",
    )
    parser.add_argument("folder", type=Path, help="of the files, one for each kernel")
    folder: Path = parser.parse_args(arguments).folder
    try:
        check_folders(folder=folder)
        library_function("kda", "chunk_kda", "fla")
        library_function("delta_rule", "chunk_delta_rule", "fla:delta")
        kernels = tuned_kernels(sys.modules)
        if not any(hasattr(kernel, "kernel_name") for kernel in kernels.values()):
            raise TargetError("no kernel of fla reads a config file: pip install 'fla-core>=0.6'")
        written, left = write_configs(kernels, folder, sys.modules["triton"].__version__)
    except (TargetError, ValueError, OSError) as error:
        print(str(error).removeprefix("--"), file=sys.stderr)  # the folder is no option here
        return 2
    text = (
        f"wrote configs of {written} kernels; use them with "
        f"FLA_CACHE_MODE=default FLA_CONFIG_DIR={shlex.quote(str(folder.resolve()))}"
    )
    if left:
        more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        text += f"; without a file, so tuned still: {', '.join(left[:SHOWN])}{more}"
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
