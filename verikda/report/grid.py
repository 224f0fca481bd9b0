"""The declared grids: which cases a report measures, and what it keeps of each.

Every axis of a grid is a series of cases that differ in that knob alone, in each dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from verikda.case import DTYPES, Case

GATES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Nats per token: around every ln(max)/C, which run from 0.17 (float16, C = 64) to 5.5 (float32, C = 16)."""

KEYS = ("orthogonal", "random", "alternating", "collinear", "repeated")
"""Key regimes by the size of the cosine between keys, smallest first."""


@dataclass(frozen=True)
class Grid:
    """Sizes and axes of one grid.

    Attributes
    ----------
    name : as on the command line.
    heads, channels, tokens : H, K = V and T of a case where the series does not vary them.
    gates, chunks, keys, lengths, seeds : the axes.
    regimes : (gate regime, nats per token, key regime, beta regime) of the series from which verdicts come first.
    long_channels : K = V of the series of lengths.
    flags : whether verikda's kernels are also measured as other compiler flags build them, on a GPU.
    """

    name: str
    heads: int
    channels: int
    tokens: int
    gates: tuple[float, ...]
    chunks: tuple[int, ...]
    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    seeds: int
    regimes: tuple[tuple[str, float, str, str], ...]
    long_channels: int = 32
    flags: bool = False


_REGIMES = (
    ("random", 1.0, "random", "random"),
    ("model", 1.0, "random", "random"),
    ("mixed", 2.0, "random", "random"),
    ("spike", 1.0, "random", "random"),
    ("slow", 1.0, "collinear", "near_one"),
)

GRIDS = {
    "quick": Grid("quick", 2, 32, 130, GATES, (16, 32, 64), KEYS, (16, 64, 256, 1024), 4, _REGIMES),
    # for kernels that are built for K = V = 128 and chunks of 64
    "wide": Grid("wide", 2, 128, 130, GATES, (64,), KEYS, (64, 256, 1024), 4, _REGIMES, 128, flags=True),
    "full": Grid(
        "full", 2, 128, 258, tuple(2.0 ** (e / 2) for e in range(-10, 13)), (16, 32, 64), KEYS,
        (16, 64, 256, 1024, 4096), 8,
        (*_REGIMES, ("zero", 1.0, "random", "random"), ("one_slow", 2.0, "random", "random"),
         ("ragged", 1.0, "random", "random"), ("heads", 1.0, "random", "random"),
         ("zero_rows", 1.0, "zero_rows", "zero_rows"), ("tiny_steps", 1.0, "repeated", "one"),
         ("random", 1.0, "random", "up_to_two")),
        flags=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One case of a series.

    Attributes
    ----------
    series : "regimes", "gates", "keys", "lengths", "seeds", "safe", "stages" or "flags".
    case : what is run.
    keep : what is kept besides ratios and errors, of "ulps", "bias", "positions", "contracts".
    """

    series: str
    case: Case
    keep: frozenset[str] = frozenset()


def points(grid: Grid) -> Iterator[Point]:
    """Every point of a grid, the ones that tell most first: a run that is cut short has something of each dtype."""
    for dtype in DTYPES:
        yield from _of_dtype(grid, _base(grid, dtype))


def flag_points(grid: Grid) -> Iterator[Point]:
    """What kernels built with other compiler flags are measured on.

    Besides the regimes a call with everything in the kernel, which divides and takes roots, and one whose gradients
    are subnormal numbers; float16 would have nothing else but zeros there.
    """
    for dtype in DTYPES:
        base = _base(grid, dtype)
        fused = replace(base, gate_in_kernel=True, A_log=True, dt_bias=True, qk_l2norm=True, beta_sigmoid=True)
        tiny = replace(base, q_exponent=-8, v_exponent=-64, do_exponent=-64)
        for case in (*_regimes(grid, base), fused, *((tiny,) if dtype != "float16" else ())):
            yield Point("flags", case)


def _base(grid: Grid, dtype: str) -> Case:
    return Case(
        lengths=(grid.tokens,), heads=grid.heads, K=grid.channels, V=grid.channels, dtype=dtype, h0="random", dht=True
    )


def _regimes(grid: Grid, base: Case) -> Iterator[Case]:
    for gate, size, keys, beta in grid.regimes:
        yield replace(base, gate_regime=gate, gate_magnitude=size, key_regime=keys, beta_regime=beta)


def _of_dtype(grid: Grid, base: Case) -> Iterator[Point]:
    for case in _regimes(grid, base):
        yield Point("regimes", case, frozenset({"contracts"}))
    yield Point("stages", replace(base, lengths=(128,), gate_regime="random", gate_magnitude=0.1))
    for seed in range(grid.seeds):
        case = replace(base, heads=4, gate_regime="random", gate_magnitude=0.1, seed=seed)
        yield Point("seeds", case, frozenset({"bias", "ulps"} if seed == 0 else {"bias"}))
    for keys in grid.keys:
        case = replace(base, gate_regime="slow", key_regime=keys, beta_regime="near_one")
        yield Point("keys", case)
    for gate, size in (("bound", 5.0), ("mixed", 3.0)):
        for safe in (False, True):
            yield Point("safe", replace(base, gate_regime=gate, gate_magnitude=size, safe_gate=safe))
    for chunk in grid.chunks:
        for size in grid.gates:
            yield Point("gates", replace(base, gate_regime="bound", gate_magnitude=size, chunk_size=chunk))
    for n in grid.lengths:
        longest = n == max(grid.lengths)
        channels = grid.long_channels
        case = replace(base, heads=1, K=channels, V=channels, lengths=(n,), gate_regime="slow")
        yield Point("lengths", case, frozenset({"positions"} if longest else ()))
