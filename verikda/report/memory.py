"""Claim: recomputing intermediates in the backward saves memory; how much, and what does it cost in time?

On a GPU through torch: the bytes that a forward leaves allocated until its backward, the peak of both, and their time.
"""

from __future__ import annotations

import statistics
from typing import Any

SHAPE = (1, 8192, 32, 128)
"""B, T, H, K = V; bfloat16, float32 gates of about -0.1."""
REPEATS = 20


def memory_lines() -> list[dict[str, Any]]:
    """The "claim" line, its verdict "not run" and the reason in `detail` without a GPU."""
    line: dict[str, Any] = {"kind": "claim", "claim": "recompute", "shape": list(SHAPE), "repeats": REPEATS}
    try:
        import torch
    except ImportError as error:
        return [line | {"verdict": "not run", "detail": f"It runs through torch, which cannot be imported ({error})."}]
    if not torch.cuda.is_available():
        return [line | {"verdict": "not run", "detail": "It needs a GPU."}]
    device = torch.cuda.get_device_name()
    rows = {name: _measure(torch, recompute) for name, recompute in (("recomputed", True), ("kept", False))}
    return [line | {"verdict": "measured", "detail": "", "device": device, "rows": rows}]


def _measure(torch: Any, recompute: bool) -> dict[str, float]:
    from verikda import chunk_kda

    B, T, H, D = SHAPE
    torch.manual_seed(0)

    def drawn(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(*shape, device="cuda").to(dtype)

    q, k = (torch.nn.functional.normalize(drawn(B, T, H, D), dim=-1) for _ in range(2))
    v, do = drawn(B, T, H, D), drawn(B, T, H, D)
    g = -0.1 * drawn(B, T, H, D, dtype=torch.float32).abs()
    beta = torch.rand(B, T, H, device="cuda")
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]

    def both() -> tuple[int, int]:
        before = torch.cuda.memory_allocated()
        o, _ = chunk_kda(q, k, v, g, beta, disable_recompute=not recompute)
        held = torch.cuda.memory_allocated() - before
        torch.autograd.grad(o, inputs, do)
        return before, held

    both()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, held = both()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        both()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {"held_bytes": float(held), "peak_bytes": float(peak), "milliseconds": round(statistics.median(times), 4)}
