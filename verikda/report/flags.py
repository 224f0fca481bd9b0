"""verikda's own kernels built with other compiler flags than theirs, as targets: what do they cost in precision?

On a GPU only: on the CPU another compiler makes the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kernels_cuda.build import NUMERICS, compiler
from kernels_cuda.cache import uncached
from kernels_cuda.modules import load
from verikda.targets import own
from verikda.targets.base import Target

FLAGS: Mapping[str, tuple[str, ...]] = {
    "as shipped": NUMERICS,
    "no fused multiply-add": ("--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=false"),
    "subnormals flushed": ("--ftz=true", "--prec-div=true", "--prec-sqrt=true", "--fmad=true"),
    "fast division and root": ("--ftz=false", "--prec-div=false", "--prec-sqrt=false", "--fmad=true"),
    "fast math": ("--use_fast_math",),
}
"""Sets of flags by what a report calls them."""


def flag_targets() -> list[Target]:
    """One target for each set of flags; none without a GPU."""
    if own.gpu_missing() is not None:
        return []
    plain, fresh = replace(own.EVERYTHING, layouts=("contiguous",)), uncached(compiler())
    builds = {label: flags if flags is NUMERICS else (*flags, *fresh) for label, flags in FLAGS.items()}
    return [own.on(load("cuda", flags=flags), f"verikda, {label}", plain) for label, flags in builds.items()]
