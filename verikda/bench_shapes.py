"""What is timed: shapes, gates, inputs on a GPU, the fewest bytes they move, and the float64 truth of some heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from oracles.problem import Array, Problem
from oracles.recurrence import forward_reverse

K = V = 128
L2_BYTES = 60_000_000
"""Of an H200. Inputs are rotated over twice as much, so that no repeat finds its inputs in the cache."""

Gates = Literal["fast", "slow", "none"]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Workload:
    """One shape and kind of gate; K = V = 128, bfloat16.

    Attributes
    ----------
    B, T, H : batch rows, tokens, heads.
    gates : "fast" (about -2.5 nats per token), "slow" (about -0.02), "none" (DeltaNet).
    """

    B: int
    T: int
    H: int
    gates: Gates

    @property
    def rule(self) -> str:
        """The operator it calls."""
        return "delta" if self.gates == "none" else "kda"

    @property
    def title(self) -> str:
        """As reports name it."""
        return "DeltaNet" if self.gates == "none" else f"KDA, {self.gates} gates"

    @property
    def shape(self) -> str:
        """B,T,H as text."""
        return f"{self.B},{self.T},{self.H}"


def workloads(shapes: str) -> tuple[Workload, ...]:
    """The workloads of "quick" or "full".

    Raises
    ------
    ValueError
        For another name.
    """
    quick = ((1, 8192, 32), (8, 2048, 32))
    known = {"quick": quick, "full": (*quick, (1, 8192, 96), (1, 32768, 32))}
    if shapes not in known:
        raise ValueError(f"shapes is {shapes!r}; use quick or full")
    kinds: tuple[Gates, ...] = ("fast", "slow", "none")
    return tuple(Workload(*shape, gates) for shape in known[shapes] for gates in kinds)


def least_bytes(w: Workload, backward: bool) -> int:
    """Fewest bytes through device memory: every input read once, every output written once.

    Forward: q, k, v, g, beta in, o out. Forward and backward by autograd: the backward besides reads them and do
    again and writes dq, dk, dv, dg, dbeta. g and beta of KDA are float32; DeltaNet has a bfloat16 beta and no g.
    """
    per_gate = 4 * K + 4 if w.rule == "kda" else 2
    forward = 2 * (2 * K + 2 * V) + per_gate
    reverse = forward + 2 * (2 * K + V) + per_gate
    return w.B * w.T * w.H * (forward + reverse if backward else forward)


def input_sets(w: Workload, peers: int) -> int:
    """Sets of inputs to rotate over: past twice the cache, and more than the peers so that each meets every set."""
    return max(peers + 1, math.ceil(2 * L2_BYTES / least_bytes(w, backward=False)))


def draw(torch: Any, w: Workload, seed: int, device: str = "cuda") -> dict[str, Any]:
    """Tensors q, k (of length 1), v, g, beta, do of a workload; those with a gradient require it."""
    made = draw_shape(torch, (w.B, w.T, w.H, K, V), w.gates, seed, device)
    return {n: x.requires_grad_(n != "do") for n, x in made.items()}


def draw_shape(
    torch: Any, shape: tuple[int, int, int, int, int], gates: Gates, seed: int, device: str
) -> dict[str, Any]:
    """As `draw` for (B, T, H, K, V), without gradients. g = -5 sigmoid(x) or -0.04 sigmoid(x), beta = sigmoid(x)."""
    B, T, H, key, value = shape
    source = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(size, generator=source, device=device, dtype=dtype)

    normalize = torch.nn.functional.normalize
    made = {n: normalize(normal(B, T, H, key), dim=-1) for n in ("q", "k")}
    made["v"] = normal(B, T, H, value)
    if gates != "none":
        made["g"] = normal(B, T, H, key, dtype=torch.float32).sigmoid_().mul_(-5.0 if gates == "fast" else -0.04)
    made["beta"] = normal(B, T, H, dtype=torch.float32).sigmoid_()
    if gates == "none":
        made["beta"] = made["beta"].to(torch.bfloat16)
    made["do"] = normal(B, T, H, value)
    return made


def arguments(given: Mapping[str, Any]) -> list[Any]:
    """q, k, v, (g,) beta: the positional arguments that every public function has."""
    return [given[n] for n in ("q", "k", "v", "g", "beta") if n in given]


def forward_only(torch: Any, function: Function, given: Mapping[str, Any]) -> dict[str, Any]:
    """{"o"} of one call without gradients."""
    with torch.no_grad():
        return {"o": function(*arguments(given))[0]}


def both_ways(torch: Any, function: Function, given: Mapping[str, Any]) -> dict[str, Any]:
    """O and the gradients of <o, do>, by name."""
    leaves = arguments(given)
    names = [f"d{n}" for n in ("q", "k", "v", "g", "beta") if n in given]
    o = function(*leaves)[0]
    return {"o": o.detach(), **dict(zip(names, torch.autograd.grad([o], leaves, [given["do"]]), strict=True))}


def sampled_heads(w: Workload) -> tuple[tuple[int, int], ...]:
    """(batch row, head) whose truth is computed: the first and the last."""
    return ((0, 0), (w.B - 1, w.H - 1))


def heads(outputs: Mapping[str, Any], where: Sequence[tuple[int, int]]) -> dict[str, Array]:
    """Float64 copies of some heads of tensors [B,T,H,...], side by side as heads of one batch row."""
    return {
        n: np.stack([x[b, :, h].detach().double().cpu().numpy() for b, h in where], axis=1)[None]
        for n, x in outputs.items()
    }


def slice_problem(given: Mapping[str, Any], where: Sequence[tuple[int, int]]) -> Problem:
    """The call of some heads alone. Heads do not see each other, so its truth is that of the whole call."""
    part = heads(given, where)
    return Problem(
        q=part["q"], k=part["k"], v=part["v"], g=part.get("g"), beta=part["beta"], do=part["do"],
        scale=part["q"].shape[-1] ** -0.5, gate="log" if "g" in part else "none",
    )  # fmt: skip


def truth(problem: Problem) -> dict[str, Array]:
    """Outputs and gradients by the float64 token recurrence; ht is left out, as the timed calls do not ask for it."""
    return {n: x for n, x in forward_reverse(problem).items() if n != "ht"}


def relative_l2(actual: Array, wanted: Array) -> float:
    """|actual - wanted| / |wanted|; inf where anything is not finite, or shapes differ, or only the truth is 0."""
    if actual.shape != wanted.shape or not np.isfinite(actual).all():
        return math.inf
    error, size = float(np.linalg.norm(actual - wanted)), float(np.linalg.norm(wanted))
    if size == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / size
