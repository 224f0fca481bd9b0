"""The items of `verikda.evidence`: each takes torch and gives (passed, what it says, numbers)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal

import numpy as np

from oracles.problem import Problem
from oracles.recurrence import forward_reverse
from verikda.bench import REL_LIMIT
from verikda.bench import workloads as shapes
from verikda.case import DTYPES, Case
from verikda.inputs import make_call
from verikda.targets.fresh_memory import poisoned

Found = tuple[bool, str, dict[str, Any]]


def _numbers(errors: Mapping[str, float]) -> str:
    return ", ".join(f"{n} {e:.1e}" for n, e in errors.items())


def same_bits(torch: Any, a: Any, b: Any) -> bool:
    """Whether two tensors have equal shape, dtype and bits: NaN equals itself, and 0 is not -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool(torch.equal(a.detach().contiguous().view(whole), b.detach().contiguous().view(whole)))


def different(torch: Any, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that differ in a bit, or that one side lacks."""
    return [n for n in dict.fromkeys([*a, *b]) if n not in a or n not in b or not same_bits(torch, a[n], b[n])]


def long(torch: Any, device: str = "cuda", T: int = 65536) -> Found:
    """Slow gates, so that the state carries thousands of tokens; two heads, of which the last is compared.

    The last and the first 1024 tokens count by themselves too: errors that grow along the sequence, or back along it,
    would hide in the norm of the whole.
    """
    from verikda import chunk_kda

    given = shapes.draw_shape(torch, (1, T, 2, 64, 64), "slow", 0, device)
    given = {n: x.requires_grad_(n != "do") for n, x in given.items()}
    where = ((0, 1),)
    found = shapes.heads(shapes.both_ways(torch, chunk_kda, given), where)
    wanted = shapes.truth(shapes.slice_problem(given, where))
    errors = {n: shapes.relative_l2(found[n], x) for n, x in wanted.items()}
    end = min(T, 1024)
    errors |= {f"{n} of the last {end}": shapes.relative_l2(found[n][:, -end:], x[:, -end:]) for n, x in wanted.items()}
    errors |= {f"{n} of the first {end}": shapes.relative_l2(found[n][:, :end], x[:, :end]) for n, x in wanted.items()}
    worst = max(errors, key=lambda n: errors[n])
    whole = _numbers({n: errors[n] for n in wanted})
    return errors[worst] <= REL_LIMIT, f"relative L2 {whole}; worst {worst} {errors[worst]:.1e}", errors


def many(torch: Any, device: str = "cuda", N: int = 4096, K: int = 256) -> Found:
    """A pack of N short sequences with initial and final states; the first, the last and some others are compared."""
    from verikda import chunk_kda

    random = np.random.default_rng(0)
    lengths = random.integers(1, 4, N)
    offsets = np.cumsum([0, *lengths])
    T, HV = int(offsets[-1]), 2
    given = shapes.draw_shape(torch, (1, T, HV, K, K), "fast", 1, device)
    source = torch.Generator(device=device).manual_seed(2)
    h0, dht = (torch.randn((N, HV, K, K), generator=source, device=device) for _ in range(2))
    leaves = {**{n: x for n, x in given.items() if n != "do"}, "h0": h0}
    for x in leaves.values():
        x.requires_grad_()
    cu_seqlens = torch.tensor(offsets, device=device)
    inputs = {n: x for n, x in given.items() if n != "do"}
    states: dict[str, Any] = {"initial_state": h0, "output_final_state": True}
    with poisoned():  # so that what is not written is not finite
        o, ht = chunk_kda(**inputs, **states, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens.cpu())
        gradients = torch.autograd.grad([o, ht], list(leaves.values()), [given["do"], dht])
    found = {"o": o, "ht": ht, **{f"d{n}": x for n, x in zip(leaves, gradients, strict=True)}}

    chosen = sorted({0, 1, N - 2, N - 1, *(int(i) for i in random.integers(0, N, 20))})
    rows = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in chosen])

    def part(name: str, x: Any) -> Any:
        kept = x[chosen] if name in ("h0", "ht", "dh0", "dht") else x[:, torch.as_tensor(rows, device=device)]
        return kept.detach().double().cpu().numpy()

    problem = Problem(
        **{n: part(n, x) for n, x in {**given, "h0": h0, "dht": dht}.items()},
        scale=K**-0.5, cu_seqlens=np.cumsum([0, *lengths[chosen]], dtype=np.int64),
    )  # fmt: skip
    wanted = forward_reverse(problem)
    errors = {n: shapes.relative_l2(part(n, found[n]), x) for n, x in wanted.items()}
    finite = all(bool(torch.isfinite(x).all()) for x in found.values())
    says = f"{N} sequences, {T} tokens; relative L2 of {len(chosen)} of them {_numbers(errors)}"
    return finite and max(errors.values()) <= REL_LIMIT, says + ("" if finite else "; not all is finite"), errors


def large(torch: Any, device: str = "cuda", T: int = 65600, H: int = 128, K: int = 128) -> Found:
    """B T H K past 2^31, forward: an offset kept in 32 bits would put the last samples elsewhere."""
    from verikda import chunk_kda

    B = 2
    given = shapes.draw_shape(torch, (B, T, H, K, K), "fast", 3, device)
    del given["do"]

    def call(some: Mapping[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            o, ht = chunk_kda(**some, output_final_state=True)
        return {"o": o, "ht": ht}

    whole = call(given)
    wrong = []
    for b, h in ((B - 1, H - 1), (B - 1, 0), (0, H - 1), (0, 0)):
        single = call({n: x[b : b + 1, :, h : h + 1].contiguous() for n, x in given.items()})
        here = {"o": whole["o"][b : b + 1, :, h : h + 1], "ht": whole["ht"][b : b + 1, h : h + 1]}
        wrong += [f"{n} of sample {b}, head {h}" for n in different(torch, here, single)]
        zero = [n for n, x in single.items() if not bool(x.any()) or not bool(torch.isfinite(x).all())]
        wrong += [f"{n} of sample {b}, head {h} alone is zero or not finite" for n in zero]
    elements = B * T * H * K
    says = f"{elements} elements ({elements / 2**31:.4f} x 2^31), 4 samples alone"
    return not wrong, says + (f"; different: {', '.join(wrong)}" if wrong else ""), {"elements": elements}


def repeat(
    torch: Any, device: str = "cuda", shape: tuple[int, int, int] = (1, 8192, 32), times: int = 50,
    one: Callable[..., dict[str, Any]] = shapes.both_ways,
) -> Found:  # fmt: skip
    """The same bits from every call: alone, on memory that held NaN, and beside a stream of matrix products."""
    from verikda import chunk_kda

    given = shapes.draw_shape(torch, (*shape, shapes.K, shapes.V), "fast", 4, device)
    given = {n: x.requires_grad_(n != "do") for n, x in given.items()}
    first = {n: x.clone() for n, x in one(torch, chunk_kda, given).items()}
    wrong: dict[str, list[str]] = {}
    for kind in ("alone", "on reused memory", "another stream busy"):
        busy = kind == "another stream busy" and device == "cuda"
        side: Any = torch.cuda.Stream() if busy else None
        a: Any = torch.randn((4096, 4096), device=device, dtype=torch.bfloat16) if busy else None
        for i in range(times if kind != "on reused memory" else times // 5):
            if kind == "on reused memory" and device == "cuda":
                # The allocator hands this block out again, so what is read before it is written reads NaN.
                torch.cuda.empty_cache()
                torch.full((1 << 32,), float("nan"), device=device, dtype=torch.bfloat16)
            if side is not None:
                with torch.cuda.stream(side):
                    for _ in range(20):
                        a @ a
            names = different(torch, first, one(torch, chunk_kda, given))
            if names:
                wrong.setdefault(kind, []).append(f"{i} ({', '.join(names)})")
    finite = all(bool(torch.isfinite(x).all()) for x in first.values())
    says = f"{', '.join(first)} of {times} calls alone, {times // 5} on reused memory, {times} with another stream busy"
    for kind, found in wrong.items():
        says += f"; {kind} {len(found)} differ, first {found[0]}"
    numbers = {"differing": {kind: len(found) for kind, found in wrong.items()}, "repeats": times}
    return not wrong and finite, says + ("" if finite else "; not all is finite"), numbers


def graph(torch: Any, device: str = "cuda", shape: tuple[int, int, int] = (2, 2048, 8)) -> Found:
    """Forward and backward captured once; replayed, replayed again, and replayed on inputs overwritten in place."""
    from verikda import chunk_kda

    def drawn(seed: int) -> dict[str, Any]:
        made = shapes.draw_shape(torch, (*shape, shapes.K, shapes.V), "fast", seed, device)
        return {n: x.requires_grad_(n != "do") for n, x in made.items()}

    given, other = drawn(5), drawn(6)
    wanted, after = (shapes.both_ways(torch, chunk_kda, x) for x in (given, other))
    if not different(torch, wanted, after):
        return False, "other inputs gave the same bits, so a replay cannot show anything", {}
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        held = shapes.both_ways(torch, chunk_kda, given)
    wrong = []
    for name, expected in (("first replay", wanted), ("second replay", wanted), ("replay on new inputs", after)):
        if expected is after:
            with torch.no_grad():
                for n, x in given.items():
                    x.copy_(other[n])
        for x in held.values():
            x.fill_(float("nan"))
        captured.replay()
        torch.cuda.synchronize()
        wrong += [f"{n} of the {name}" for n in different(torch, expected, held)]
    says = f"{', '.join(wanted)} of 3 replays" + (f"; different: {', '.join(wrong)}" if wrong else "")
    return not wrong, says, {"differing": len(wrong)}


def covering_cases(dtypes: Sequence[str] = DTYPES, rules: Sequence[str] = ("kda", "delta")) -> Iterator[Case]:
    """Small calls that together launch every kernel: whole and odd rows, padded packs, states, flags, wide channels."""
    for dtype, chunk, rule in product(dtypes, (16, 32, 64), rules):
        common: dict[str, Any] = {"dtype": dtype, "chunk_size": chunk, "rule": rule, "h0": "random", "dht": True}
        inside: dict[str, Any] = {"gate_in_kernel": True, "A_log": True, "dt_bias": True} if rule == "kda" else {}
        yield Case(lengths=(70,), heads=1, K=64, V=64, **common)
        yield Case(
            lengths=(33, 0, 1, 64), packed=True, tail_padding=3, heads=1, groups=2, K=33, V=17, qk_l2norm=True,
            beta_sigmoid=True, state_v_first=True, recompute=False, **inside, **common,
        )  # fmt: skip
        yield Case(lengths=(35, 35), heads=1, K=256, V=136, **common)


def cover(
    torch: Any, where: Literal["cuda", "host"] = "cuda", cases: Iterable[Case] | None = None, arch: str = "sm_90a"
) -> Found:
    """Every kernel launched at small sizes, for a sanitizer to watch: memory, races, values never written."""
    from kernels_cuda.instances import instances
    from kernels_cuda.sources import base_name
    from verikda.ops import engine
    from verikda.targets import own

    target = own.cuda() if where == "cuda" else own.host()
    failed = []
    ran = 0
    for case in covering_cases() if cases is None else cases:
        result = target.run(make_call(case))
        ran += 1
        failed += [f"{n} of {case.to_json()}" for n, x in result.outputs.items() if not np.isfinite(x).all()]
    launched = {base_name(name) for name in engine.backend(where).ready}
    missing = sorted({base_name(name) for name in instances(arch).kernels} - launched)
    says = f"{ran} calls launched {len(launched)} kernels"
    says += f"; never launched: {', '.join(missing)}" if missing else ""
    says += f"; not finite: {failed[0]}" if failed else ""
    return not missing and not failed, says, {"calls": ran, "kernels": sorted(launched)}


RUN: dict[str, Callable[[Any], Found]] = {
    "long": long, "many": many, "large": large, "repeat": repeat, "graph": graph, "cover": cover
}  # fmt: skip
