"""Certify the float64 recurrence against arbitrary precision: `python -m oracles.certify`.

Prints, for each regime and output, the largest error relative to the largest value of that
output, and exits with 1 when one exceeds 1e-12. With `--size`, measures time and peak memory
of `forward_reverse` as T grows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt

from oracles import multiprecision, recurrence
from oracles.problem import GRADIENTS, OUTPUTS, Array, Problem

LIMIT = 1e-12
"""Largest accepted error. bfloat16, float16 and float32 outputs round at 4e-3, 5e-4 and 6e-8."""

__all__ = ["LIMIT", "REGIMES", "errors", "main", "relative_error"]


def relative_error(values: Array, exact: npt.NDArray[Any]) -> float:
    """Largest |values - exact| over the largest |exact|, or over the smallest normal float64 where that is larger."""
    if values.shape != exact.shape:
        raise ValueError(f"shapes differ: {values.shape} and {exact.shape}.")
    if not values.size:
        return 0.0
    if not np.isfinite(values).all():
        return float("inf")
    with mpmath.workdps(50):
        worst = max(abs(mpmath.mpf(float(x)) - y) for x, y in zip(values.flat, exact.flat, strict=True))
        return float(worst / max(np.finfo(np.float64).tiny, *(abs(y) for y in exact.flat)))


def errors(problem: Problem, digits: int = 50) -> dict[str, float]:
    """`relative_error` of every output and gradient of float64 against `digits` digits."""
    found, exact = recurrence.forward_reverse(problem), multiprecision.forward_reverse(problem, digits)
    if found.keys() != exact.keys():
        raise ValueError(f"the references return different outputs: {sorted(found)} and {sorted(exact)}.")
    return {name: relative_error(found[name], exact[name]) for name in (*OUTPUTS, *GRADIENTS) if name in found}


def _unit(x: Array) -> Array:
    y: Array = x / np.sqrt((x * x).sum(-1, keepdims=True))
    return y


def _base(seed: int, T: int = 20, H: int = 1, HV: int = 2, K: int = 6, V: int = 5, B: int = 1) -> Problem:
    """Stable and well mixed: unit keys, beta in (0, 1), decays around 0.2 nats."""
    r = np.random.default_rng(seed)
    return Problem(
        q=r.normal(size=(B, T, H, K)),
        k=_unit(r.normal(size=(B, T, H, K))),
        v=r.normal(size=(B, T, HV, V)),
        g=-0.2 * r.exponential(size=(B, T, HV, K)),
        beta=r.uniform(size=(B, T, HV)),
        scale=K**-0.5,
        h0=r.normal(size=(B, HV, K, V)),
        do=r.normal(size=(B, T, HV, V)),
        dht=r.normal(size=(B, HV, K, V)),
    )


def _with_g(seed: int, gate: Callable[[Array, np.random.Generator], Any], **sizes: int) -> Problem:
    """The base with its g replaced by gate(g, generator)."""
    p = _base(seed, **sizes)
    assert p.g is not None
    return replace(p, g=np.broadcast_to(gate(p.g, np.random.default_rng(seed + 1)), p.g.shape).copy())


def _mixed(g: Array, r: np.random.Generator) -> Array:
    return np.where(np.arange(g.shape[-1]) % 2 == 0, -5.0, -1e-4 * r.uniform(size=g.shape))


def _one_slow(g: Array, r: np.random.Generator) -> Array:
    return np.where(np.arange(g.shape[-1]) == 2, -1e-6, -4.99)


def _spike(g: Array, r: np.random.Generator) -> Array:
    return np.where(np.arange(g.shape[1])[None, :, None, None] == 7, -60.0, 0.01 * g)


def _reset(g: Array, r: np.random.Generator) -> Array:
    g = g.copy()
    g[:, 0], g[:, 6, 0], g[:, 11, :, 2:4], g[:, -1, 1] = (-np.inf,) * 4
    return g


def _scattered_reset(g: Array, r: np.random.Generator) -> Array:
    return np.where(r.uniform(size=g.shape) < 0.3, -np.inf, g)


def _keys(seed: int, spread: float, beta: float, g: float) -> Problem:
    """Keys within `spread` of one direction."""
    p = _base(seed)
    k = _unit(p.k[:, :1] + spread * np.random.default_rng(seed + 1).normal(size=p.k.shape))
    return replace(p, k=k, beta=np.full_like(p.beta, beta), g=np.full(p.beta.shape + p.k.shape[-1:], g))


def _scaled(seed: int, **exponents: int) -> Problem:
    p = _base(seed)
    return replace(p, **{name: np.ldexp(getattr(p, name), e) for name, e in exponents.items()})


def _betas(seed: int, values: list[float]) -> Problem:
    p = _base(seed)
    return replace(p, beta=np.random.default_rng(seed + 1).choice(values, size=p.beta.shape))


def _gated(seed: int, bounded: float | None, spread: float, A_log: float | None = 0.0, bias: bool = True) -> Problem:
    """Raw gates spread over +-spread, with head-wise A_log around `A_log`."""
    r = np.random.default_rng(seed + 1)
    p = _base(seed)
    HV, K = p.beta.shape[2], p.k.shape[3]
    logs: Array | None = None if A_log is None else r.normal(A_log, 1.0, size=(HV,))
    return replace(
        p,
        gate="softplus" if bounded is None else "bounded",
        lower_bound=bounded,
        g=spread * r.uniform(-1, 1, size=(1, p.k.shape[1], HV, K)),
        A_log=logs,
        dt_bias=r.normal(size=(HV, K)) if bias else None,
    )


def _one_channel(seed: int) -> Problem:
    """The gradient lies along q and k: the norm lets 1e-6 of it through."""
    p, r = _base(seed, K=1), np.random.default_rng(seed + 1)
    return replace(p, q=r.uniform(2, 3, size=p.q.shape), k=r.uniform(2, 3, size=p.k.shape), qk_l2norm=True)


def _zero_rows(seed: int) -> Problem:
    p = replace(_base(seed), qk_l2norm=True)
    p.q[:, 3], p.k[:, 5], p.k[:, 0] = 0.0, 0.0, 0.0
    return p


def _activated(seed: int, spread: float, neg: bool) -> Problem:
    p = _base(seed)
    raw = spread * np.random.default_rng(seed + 1).uniform(-1, 1, size=p.beta.shape)
    return replace(p, beta=raw, beta_sigmoid=True, allow_neg_eigval=neg)


def _packed(seed: int, everything: bool) -> Problem:
    """Lengths 0, 5, 1, 0, 9, 0 and three rows that belong to nobody and hold NaN."""
    r = np.random.default_rng(seed + 1)
    p = _base(seed, T=18, H=2, HV=4, K=3, V=7)
    for array in (p.q, p.k, p.v, p.g, p.beta, p.do):
        assert array is not None
        array[:, 15:] = np.nan
    offsets = np.cumsum([0, 0, 5, 1, 0, 9, 0])
    p = replace(p, cu_seqlens=offsets, h0=r.normal(size=(6, 4, 3, 7)), dht=r.normal(size=(6, 4, 3, 7)))
    if not everything:
        return p
    return replace(
        p, gate="softplus", A_log=r.normal(size=4), dt_bias=r.normal(size=(4, 3)), qk_l2norm=True, beta_sigmoid=True
    )


REGIMES: Mapping[str, Callable[[], Problem]] = {
    "random": lambda: _base(1),
    "random, T = 100, K = V = 8": lambda: _base(2, T=100, HV=1, K=8, V=8),
    "no gate": lambda: replace(_base(3), g=None, gate="none"),
    "no states, no final gradient": lambda: replace(_base(4), h0=None, dht=None),
    "only a final gradient": lambda: replace(_base(4), do=None),
    "gates at -5": lambda: _with_g(5, lambda g, r: -5.0),
    "gates near 0": lambda: _with_g(6, lambda g, r: 1e-5 * g),
    "gates 0": lambda: _with_g(7, lambda g, r: 0.0),
    "gates equal over channels": lambda: _with_g(8, lambda g, r: g[..., :1]),
    "fast and slow channels": lambda: _with_g(9, _mixed),
    "one slow channel": lambda: _with_g(10, _one_slow),
    "spike": lambda: _with_g(11, _spike),
    "gates at -800": lambda: _with_g(12, lambda g, r: np.where(r.uniform(size=g.shape) < 0.2, -800.0, g)),
    "hard reset": lambda: _with_g(13, _reset),
    "hard reset, scattered": lambda: _with_g(14, _scattered_reset),
    "gates up to +0.1": lambda: _with_g(15, lambda g, r: r.uniform(-0.1, 0.1, size=g.shape)),
    "same key, beta near 1": lambda: _keys(16, 0.0, 0.9997, -3e-5),
    "same key, beta 1": lambda: _keys(17, 0.0, 1.0, 0.0),
    "near-collinear keys": lambda: _keys(18, 1e-3, 0.999, -1e-3),
    "same key, beta 2": lambda: _keys(19, 0.0, 2.0, 0.0),
    "beta 0, 1 or 2": lambda: _betas(20, [0.0, 1.0, 2.0]),
    "beta 0": lambda: _betas(21, [0.0]),
    "beta up to 2": lambda: replace(_base(22), beta=2 * _base(22).beta),
    "long keys": lambda: _scaled(23, k=1),
    "short keys": lambda: _scaled(24, k=-20),
    "large v and h0": lambda: _scaled(25, v=100, h0=100),
    "small v, large do": lambda: _scaled(26, v=-100, h0=-100, do=100, dht=100),
    "large q": lambda: _scaled(27, q=60),
    "softplus": lambda: _gated(28, None, 3.0),
    "softplus, extreme": lambda: _gated(29, None, 300.0, A_log=2.0),
    "softplus, beyond exp": lambda: _gated(30, None, 1e5, A_log=5.0),
    "softplus, no A_log, no bias": lambda: _gated(31, None, 3.0, A_log=None, bias=False),
    "softplus, small multiplier": lambda: _gated(51, None, 1e4, A_log=-9.0),
    "softplus, beyond float64": lambda: _gated(52, None, 1e300, A_log=690.0),
    "bounded": lambda: _gated(32, -5.0, 3.0),
    "bounded, extreme": lambda: _gated(33, -5.0, 300.0, A_log=2.0),
    "bounded, beyond exp": lambda: _gated(34, -0.01, 1e5, A_log=5.0),
    "bounded, no A_log, no bias": lambda: _gated(35, -1.0, 3.0, A_log=None, bias=False),
    "q/k norm": lambda: replace(_scaled(36, k=3), qk_l2norm=True),
    "q/k norm, one channel": lambda: _one_channel(50),
    "q/k norm, zero rows": lambda: _zero_rows(37),
    "q/k norm, tiny": lambda: replace(_scaled(38, k=-12, q=-40), qk_l2norm=True),
    "q/k norm, huge": lambda: replace(_scaled(39, k=100, q=100), qk_l2norm=True),
    "sigmoid": lambda: _activated(40, 4.0, False),
    "sigmoid, extreme": lambda: _activated(41, 800.0, False),
    "2 sigmoid": lambda: _activated(42, 40.0, True),
    "packed": lambda: _packed(43, False),
    "packed, everything fused": lambda: _packed(44, True),
    "batch of 3, groups of 3": lambda: _base(45, B=3, T=6, H=2, HV=6),
    "K = 1": lambda: _base(46, K=1),
    "V = 1": lambda: _base(47, V=1),
    "one token": lambda: _base(48, T=1),
    "no token": lambda: _base(49, T=0),
}
"""Name and maker of every problem that is certified."""


def _certify(digits: int) -> int:
    names = (*OUTPUTS, *GRADIENTS)
    width = max(map(len, REGIMES))
    print(f"largest error of float64 against {digits} digits, relative to the largest value; limit {LIMIT:g}")
    print(" " * width, *(f"{name:>8}" for name in names))
    worst = 0.0
    for regime, make in REGIMES.items():
        found = errors(make(), digits)
        worst = max(worst, *found.values())
        print(f"{regime:{width}}", *(f"{found[name]:8.1e}" if name in found else " " * 8 for name in names))
    print(f"worst {worst:.1e}: {'certified' if worst <= LIMIT else 'NOT certified'}")
    return int(worst > LIMIT)


def _measure(T: int) -> tuple[float, float]:
    """Seconds and peak resident GiB of one forward and reverse, in a process of its own."""
    import subprocess

    code = (
        "import resource, time; from oracles import certify, recurrence;"
        f"p = certify._base(0, T={T}, H=4, HV=4, K=128, V=128);"
        "s = time.perf_counter(); recurrence.forward_reverse(p); s = time.perf_counter() - s;"
        "print(s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)"
    )
    seconds, gib = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    return float(seconds), float(gib)


def _size() -> int:
    print("4 heads, K = V = 128, float64, forward and reverse")
    for T in (1024, 2048, 4096, 8192):
        seconds, gib = _measure(T)
        print(f"T {T:5}  {seconds:6.1f} s  {1e3 * seconds / T:6.3f} ms per token  peak {gib:.2f} GiB")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m oracles.certify", description=__doc__)
    parser.add_argument("--digits", type=int, default=50, help="decimal digits of the reference")
    parser.add_argument("--size", action="store_true", help="measure time and memory instead")
    options = parser.parse_args(arguments)
    return _size() if options.size else _certify(options.digits)


if __name__ == "__main__":
    sys.exit(main())
