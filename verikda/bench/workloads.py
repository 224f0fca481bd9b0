"""What is timed: shapes, gates, inputs on a GPU, the least work they ask for, and the float64 truth of some heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from oracles.problem import Array, Problem
from oracles.recurrence import forward_reverse
from verikda.choose import choose

K = V = 128
L2_BYTES = 60_000_000
"""Of an H200. Inputs are rotated over twice as much, so that no repeat finds its inputs in the cache."""
DEVICE = "cuda"
LOWER_BOUND = -5.0
"""Of the gate in the kernel."""
PACK = (1300, 547, 2048, 963, 271, 3063)

Gates = Literal["fast", "slow", "fused", "none"]
Mode = Literal["forward", "backward", "forward+backward"]
Function = Callable[..., Any]

KINDS: tuple[Gates, ...] = get_args(Gates)
MODES: tuple[Mode, ...] = get_args(Mode)
TITLES: Mapping[Gates, str] = {
    "fast": "KDA, fast gates", "slow": "KDA, slow gates", "fused": "KDA, all fused", "none": "DeltaNet",
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """One shape and kind of gate; K = V = 128, bfloat16.

    Attributes
    ----------
    B, T, H : batch rows, tokens, heads.
    gates : KDA with float32 log gates, "fast" (about -2.5 nats per token) or "slow" (about -0.02), or "fused" (raw
        bfloat16 gates and beta, norm, bounded gate and sigmoid in the kernel, fast); "none" is DeltaNet.
    lengths : of packed sequences, T together, or empty for a batch.
    """

    B: int
    T: int
    H: int
    gates: Gates
    lengths: tuple[int, ...] = ()

    @property
    def rule(self) -> str:
        """The operator it calls."""
        return "delta" if self.gates == "none" else "kda"

    @property
    def title(self) -> str:
        """As reports name it."""
        return TITLES[self.gates]

    @property
    def shape(self) -> str:
        """B,T,H as text, of a pack the number of sequences and their tokens."""
        return f"{self.B},{self.T},{self.H}" if not self.lengths else f"pack of {len(self.lengths)}: {self.T},{self.H}"


Shape = tuple[int, int, int, tuple[int, ...]]
_USUAL: Shape = (1, 8192, 32, ())
_PACKED: Shape = (1, sum(PACK), 32, PACK)
_SETS: Mapping[str, tuple[tuple[Shape, tuple[Gates, ...]], ...]] = {
    "quick": ((_USUAL, KINDS), ((8, 2048, 32, ()), ("fast",)), (_PACKED, ("fast",)), ((1, 8192, 4, ()), ("fast",))),
    "full": tuple(
        (shape, KINDS)
        for shape in (
            # 32 heads first: other numbers of them make some libraries tune their kernels anew
            *(_USUAL, (8, 2048, 32, ()), (2, 4096, 32, ()), (1, 32768, 32, ()), _PACKED),
            *((1, 8192, 96, ()), (1, 8192, 8, ()), (1, 8192, 4, ())),
        )
    ),
}


def workloads(shapes: Sequence[str], kinds: Sequence[str] = ()) -> tuple[Workload, ...]:
    """The workloads of "quick", "full", "pack" or "B,T,H", together and each once.

    Parameters
    ----------
    shapes : names of sets, or shapes such as "1,8192,32".
    kinds : of gates; empty are all that the set has, for a shape of its own all there are.

    Raises
    ------
    ValueError
        For another name.
    """
    choose("kind", KINDS, kinds)
    found = [
        Workload(*shape[:3], gates, shape[3])
        for name in shapes
        for shape, all_kinds in _shapes(name)
        for gates in all_kinds
        if not kinds or gates in kinds
    ]
    if not found:
        raise ValueError(
            f"no shape of {', '.join(shapes)} is timed with {', '.join(kinds)}; name another shape or kind"
        )
    return tuple(dict.fromkeys(found))


def _shapes(name: str) -> tuple[tuple[Shape, tuple[Gates, ...]], ...]:
    if name in _SETS:
        return _SETS[name]
    if name == "pack":
        return ((_PACKED, KINDS),)
    parts = name.split(",")
    if len(parts) == 3 and all(part.strip().isdigit() and int(part) > 0 for part in parts):
        B, T, H = (int(part) for part in parts)
        return (((B, T, H, ()), KINDS),)
    raise ValueError(f"shapes is {name!r}; use quick, full, pack, or B,T,H such as 1,8192,32")


def least_bytes(w: Workload, mode: Mode) -> int:
    """Fewest bytes through device memory: every input read once, every output written once.

    Forward: q, k, v, g, beta in, o out. Backward: those and do in (o is not needed), dq, dk, dv, dg, dbeta out. Log
    gates and their beta are float32; raw gates, their beta, and the beta of DeltaNet, which has no gate, bfloat16.
    """
    per_gate = {"none": 2, "fused": 2 * K + 2}.get(w.gates, 4 * K + 4)
    forward = 2 * (2 * K + 2 * V) + per_gate
    reverse = forward + 2 * (2 * K + V) + per_gate
    return w.B * w.T * w.H * {"forward": forward, "backward": reverse, "forward+backward": forward + reverse}[mode]


def least_flops(w: Workload, mode: Mode, chunk: int = 16) -> float:
    """Operations on tensor cores in chunks of 16 rows, the fewest of the usual sizes; elementwise work is not counted.

    Forward: the state in three products and its part of each chunk, Aqk, L, their products with v and the inverse.
    """
    C = chunk
    forward = 2 * (3 * K * V + C * (2 * K + 2 * V) + C * C / 3)
    reverse = 2 * (8 * K * V + C * (9 * K + 5 * V) + 2 * C * C + C * C / 3)
    return w.B * w.T * w.H * {"forward": forward, "backward": reverse, "forward+backward": forward + reverse}[mode]


def input_sets(w: Workload, peers: int) -> int:
    """Sets of inputs to rotate over: past twice the cache, and such that peers in turn each meet every set."""
    sets = max(2, math.ceil(2 * L2_BYTES / least_bytes(w, "forward")))
    while math.gcd(sets, peers) != 1:
        sets += 1
    return sets


def draw(torch: Any, w: Workload, seed: int) -> dict[str, Any]:
    """Tensors q, k, v, g, beta, A_log, dt_bias, do of a workload, as far as it has them; all but do with gradients."""
    made = draw_shape(torch, (w.B, w.T, w.H, K, V), w.gates, seed, DEVICE)
    return {n: x.requires_grad_(n != "do") for n, x in made.items()}


def draw_shape(
    torch: Any, shape: tuple[int, int, int, int, int], gates: Gates, seed: int, device: str
) -> dict[str, Any]:
    """As `draw` for (B, T, H, K, V), without gradients.

    q and k have length 1, g = -5 sigmoid(x) or -0.04 sigmoid(x), beta = sigmoid(x); of "fused" all are raw.
    """
    B, T, H, key, value = shape
    source = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(size, generator=source, device=device, dtype=dtype)

    normalize = torch.nn.functional.normalize if gates != "fused" else lambda x, dim: x
    made = {n: normalize(normal(B, T, H, key), dim=-1) for n in ("q", "k")}
    made["v"] = normal(B, T, H, value)
    if gates == "fused":
        made["g"], made["beta"] = normal(B, T, H, key), normal(B, T, H)
        made["A_log"] = normal(H, dtype=torch.float32).mul_(0.25)
        made["dt_bias"] = normal(H * key, dtype=torch.float32).mul_(0.25)
    else:
        if gates != "none":
            made["g"] = normal(B, T, H, key, dtype=torch.float32).sigmoid_().mul_(-5.0 if gates == "fast" else -0.04)
        made["beta"] = normal(B, T, H, dtype=torch.float32).sigmoid_()
        if gates == "none":
            made["beta"] = made["beta"].to(torch.bfloat16)
    made["do"] = normal(B, T, H, value)
    return made


LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
"""Inputs with gradients, in the order of the public signature."""


def sampled_heads(w: Workload) -> tuple[tuple[int, int], ...]:
    """(batch row, head) whose truth is computed: the first and the last."""
    return ((0, 0), (w.B - 1, w.H - 1))


def heads(outputs: Mapping[str, Any], where: Sequence[tuple[int, int]]) -> dict[str, Array]:
    """Float64 copies of some heads of tensors [B,T,H,...], side by side as heads of one batch row.

    A_log [H], dt_bias [H*K] and their gradients are taken by head alone.
    """
    found = {}
    for n, x in outputs.items():
        if n.endswith("A_log"):
            found[n] = np.array([_float64(x[h]) for _, h in where])
        elif n.endswith("dt_bias"):
            found[n] = np.stack([_float64(x.reshape(-1, _channels(outputs))[h]) for _, h in where])
        else:
            found[n] = np.stack([_float64(x[b, :, h]) for b, h in where], axis=1)[None]
    return found


def _channels(outputs: Mapping[str, Any]) -> int:
    """K, from q or its gradient."""
    return int(next(outputs[n] for n in ("q", "dq") if n in outputs).shape[-1])


def _float64(x: Any) -> Array:
    """A float64 copy of a torch tensor or of an array of another library."""
    host = x.detach().double().cpu().numpy() if hasattr(x, "detach") else x
    return np.array(host, dtype=np.float64)


def slice_problem(given: Mapping[str, Any], where: Sequence[tuple[int, int]], lengths: Sequence[int] = ()) -> Problem:
    """The call of some heads alone. Heads do not see each other, so its truth is that of the whole call.

    Inputs with A_log are raw: norm, bounded gate and sigmoid are in the operator.
    """
    part: dict[str, Any] = {"g": None, **heads(given, where)}
    raw = "A_log" in part
    return Problem(
        **part, scale=part["q"].shape[-1] ** -0.5,
        gate="bounded" if raw else "none" if part["g"] is None else "log", lower_bound=LOWER_BOUND if raw else None,
        qk_l2norm=raw, beta_sigmoid=raw, cu_seqlens=np.cumsum([0, *lengths], dtype=np.int64) if lengths else None,
    )  # fmt: skip


def truth(problem: Problem) -> dict[str, Array]:
    """Outputs and gradients by the float64 token recurrence; ht is left out, as the timed calls do not ask for it."""
    return {n: x for n, x in forward_reverse(problem).items() if n != "ht"}


def leaves(given: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that have gradients, in the order of the public signature."""
    return {n: given[n] for n in LEAVES if n in given}


def keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the public signature that these inputs are for; raw inputs (A_log) set the flags."""
    flags = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    return leaves(given) | ({**flags, "lower_bound": LOWER_BOUND} if "A_log" in given else {})


def forward_only(torch: Any, function: Function, given: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """{"o"} of one call without gradients."""
    with torch.no_grad():
        return {"o": function(**keywords(given), **more)[0]}


def both_ways(torch: Any, function: Function, given: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """O and the gradients of <o, do>, by name."""
    o = function(**keywords(given), **more)[0]
    inputs = leaves(given)
    gradients = torch.autograd.grad([o], list(inputs.values()), [given["do"]])
    return {"o": o.detach(), **{f"d{n}": x for n, x in zip(inputs, gradients, strict=True)}}


def relative_l2(actual: Array, wanted: Array) -> float:
    """|actual - wanted| / |wanted|; inf where anything is not finite, or shapes differ, or only the truth is 0."""
    if actual.shape != wanted.shape or not np.isfinite(actual).all():
        return math.inf
    error, size = float(np.linalg.norm(actual - wanted)), float(np.linalg.norm(wanted))
    if size == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / size
