"""verikda's own kernels built with other compiler flags than theirs, as targets: what do they cost in precision?

On a GPU only: on the CPU another compiler makes the code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from kernels_cuda.build import NUMERICS, compiler
from kernels_cuda.cache import uncached
from kernels_cuda.modules import load
from oracles.problem import Array
from verikda.report.grid import Point
from verikda.report.measure import measure_and_keep, rounded
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


@cache
def flag_targets() -> tuple[Target, ...]:
    """One target for each set of flags, the shipped one first; none without a GPU."""
    if own.gpu_missing() is not None:
        return ()
    plain, fresh = replace(own.EVERYTHING, layouts=("contiguous",)), uncached(compiler())
    builds = {label: flags if flags is NUMERICS else (*flags, *fresh) for label, flags in FLAGS.items()}
    return tuple(own.on(load("cuda", flags=flags), f"verikda, {label}", plain) for label, flags in builds.items())


def flag_lines(point: Point) -> Iterator[dict[str, Any]]:
    """The line of each build; `changed` is the share of values, by output, that are others than the shipped build's."""
    measured = [measure_and_keep(target, point) for target in flag_targets()]
    for line, result in measured:
        shipped = measured[0][1]
        if result is not None and shipped is not None:
            line["changed"] = {n: rounded(_changed(x, shipped.outputs[n])) for n, x in result.outputs.items()}
        yield line


def _changed(x: Array, shipped: Array) -> float:
    return float(np.mean(~((x == shipped) | (np.isnan(x) & np.isnan(shipped)))))
