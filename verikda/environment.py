"""What a result depends on besides its case: versions, platform, sources."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path

_OWN = ("verikda", "numpy", "hypothesis", "mpmath", "ml_dtypes")
PACKAGES = (*_OWN, "torch", "transformers", "triton", "fla-core", "cupy-cuda13x", "cupy-cuda12x")


def versions() -> dict[str, str]:
    """Installed versions of the packages that a result can depend on, and of Python."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name == "verikda":
                from verikda import __version__

                found[name] = __version__
    return found


def environment() -> dict[str, object]:
    """The `environment` field of every record: versions, platform, machine, command line."""
    return {
        "versions": versions(),
        "platform": f"{platform.system()} {platform.machine()}",
        # where an absolute path led is nobody's business but this machine's
        "command": " ".join(["verikda", *(Path(a).name if a.startswith("/") else a for a in sys.argv[1:])]),
    }
