"""Is a target right on this build: whole shapes against float64 on two heads, and a small call against its noise floor.

Both judgements are work for the CPU, done by other processes while kernels compile. Truths are kept in the cache folder
by the hash of their inputs.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kernels_cuda.cache import cache_dir
from oracles.contract import Contract
from oracles.problem import Array, Problem
from verikda.bench import workloads as shapes
from verikda.bench.peers import Peer, Runner
from verikda.bench.workloads import Gates, Workload
from verikda.call import Call
from verikda.case import Case
from verikda.checks.transform import head_axis, revised
from verikda.floor import judge
from verikda.inputs import make_call
from verikda.targets.base import Target

Verdict = tuple[str, float | None]
"""Words such as "pass, worst 1.3 (dg)", and the ratio in them."""


def small_case(gates: Gates, safe_gate: bool = False, heads: int = 2) -> Case:
    """A case with these gates of which the noise floor can judge two heads in seconds.

    Parameters
    ----------
    heads : those of the workload, because some libraries compile and tune their kernels for each number of them.
    """
    regime, magnitude = {"fast": ("random", 2.5), "slow": ("slow", 2.0), "fused": ("random", 2.5)}.get(
        gates, ("random", 1.0)
    )
    fused, delta = gates == "fused", gates == "none"
    same = "same" if fused or delta else "float32"
    return Case(
        lengths=(130,), heads=heads, K=shapes.K, V=shapes.V, dtype="bfloat16", rule="delta" if delta else "kda",
        gate_regime=regime, gate_magnitude=magnitude, g_dtype="same" if fused else "float32", beta_dtype=same,
        gate_in_kernel=fused, lower_bound=shapes.LOWER_BOUND if fused else None, A_log=fused, dt_bias=fused,
        qk_l2norm=fused, beta_sigmoid=fused, safe_gate=safe_gate and not delta,
    )  # fmt: skip


@cache
def small_call(gates: Gates, safe_gate: bool, heads: int, backward: bool) -> Call:
    """The call of `small_case`."""
    return make_call(small_case(gates, safe_gate, heads), backward=backward)


def two_heads(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The first and the last head of inputs or outputs by name; heads do not see each other."""
    return {n: np.take(x, (0, -1), axis=head_axis(n)) for n, x in arrays.items()}


def judge_small(
    outputs: Mapping[str, Array], dtypes: Mapping[str, str], problem: Problem, contract: Contract
) -> Verdict:
    """What the noise floor says of a result."""
    verdict = judge(outputs, dtypes, problem, contract, backward=problem.do is not None)
    ratios = {n: j.ratio for n, j in verdict.outputs.items() if j.ratio is not None}
    worst = max(ratios, key=lambda n: ratios[n], default="")
    return (
        (f"{verdict.verdict}, worst {ratios[worst]:.2f} ({worst})", ratios[worst]) if worst else (verdict.verdict, None)
    )


def small_verdict(pool: Executor, target: Target, gates: Gates, safe_gate: bool, heads: int) -> Future[Verdict]:
    """The verdict on two heads of a small call, run now and judged in the pool."""
    call = small_call(gates, safe_gate, heads, target.capabilities.backward)
    result = target.run(call)
    p = call.problem
    given = {f.name: x for f in fields(p) if isinstance(x := getattr(p, f.name), np.ndarray)}
    part = revised(p, two_heads(given))
    return pool.submit(judge_small, two_heads(result.outputs), dict(result.dtypes), part, target.contract(call))


def kept_truth(problem: Problem) -> dict[str, Array]:
    """`workloads.truth`, from the cache folder where it has been computed before."""
    digest = hashlib.sha256()
    for f in fields(problem):
        value = getattr(problem, f.name)
        digest.update(f.name.encode() + (value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()))
    folder = cache_dir() / "truth"
    path = folder / f"{digest.hexdigest()[:32]}.npz"
    try:
        with np.load(path) as kept:
            return dict(kept)
    except (OSError, ValueError, EOFError):  # absent or damaged: it is computed again
        pass
    found = shapes.truth(problem)
    folder.mkdir(exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, suffix=".npz")
    with os.fdopen(handle, "wb") as file:
        np.savez(file, allow_pickle=False, **found)
    Path(name).replace(path)
    return found


def ask_truth(pool: Executor, w: Workload, given: Mapping[str, Any]) -> list[Future[dict[str, Array]]]:
    """The truth of each sampled head of a workload, computed in the pool."""
    return [
        pool.submit(kept_truth, shapes.slice_problem(given, [where], w.lengths)) for where in shapes.sampled_heads(w)
    ]


def together(w: Workload, parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The truths of single heads as `workloads.heads` gives them; sums over the batch only where it is one row."""
    per_head = ("dA_log", "ddt_bias")
    names = [n for n in parts[0] if w.B == 1 or n not in per_head]
    return {n: np.concatenate([p[n] for p in parts], axis=0 if n in per_head else 2) for n in names}


def answers(torch: Any, w: Workload, peer: Peer, runner: Runner) -> dict[str, Array]:
    """Some heads of what a peer gives at the full shape, with and without gradients."""
    given = shapes.draw(torch, w, 0)
    if shapes.DEVICE == "cuda":
        # The allocator hands this memory out again, so what is read before it is written reads NaN.
        torch.full((1 << 31,), float("nan"), device=shapes.DEVICE)
    x = runner.take(given)
    made = {"o without gradients": runner.forward(x)["o"]}
    if "backward" in peer.modes(w):
        made |= runner.both(x)
    where = shapes.sampled_heads(w)
    outputs = {n: x for n, x in made.items() if w.B == 1 or n not in ("dA_log", "ddt_bias")}
    return shapes.heads(outputs, where)
