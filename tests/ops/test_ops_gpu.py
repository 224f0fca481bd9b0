"""The operators on a GPU: the caller's stream, no waiting, CUDA graphs, torch and CuPy arrays. Skipped without one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import small

from oracles.recurrence import forward_reverse
from verikda.ops import chunk_kda, chunk_kda_bwd, chunk_kda_fwd
from verikda.targets.own import gpu_missing

pytestmark = pytest.mark.skipif(gpu_missing() is not None, reason=f"needs a GPU: {gpu_missing()}")


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")
    if not module.cuda.is_available():
        pytest.skip("needs PyTorch built for CUDA")
    return module


def on_gpu(p: Any, grad: bool = False) -> dict[str, Any]:
    given = small.arguments(p, small.in_torch(grad=False))
    moved = {n: x.cuda() if hasattr(x, "cuda") else x for n, x in given.items()}
    return {n: x.requires_grad_(grad) if hasattr(x, "cuda") and x.is_floating_point() else x for n, x in moved.items()}


@pytest.mark.parametrize("offsets", [None, [0, 0, 17, 36]])
def test_gradients(torch, offsets):
    p = small.make(T=40, offsets=offsets)
    given = on_gpu(p, grad=True)
    o, ht = chunk_kda(**given)
    names = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta", "initial_state": "dh0"}
    seeds = [torch.tensor(x, dtype=torch.float32, device="cuda") for x in (p.do, p.dht)]
    grads = torch.autograd.grad([o, ht], [given[n] for n in names], seeds)
    wanted = forward_reverse(p)
    for n, x in zip(("o", "ht", *names.values()), (o, ht, *grads), strict=True):
        small.close(x.detach().cpu(), wanted[n])


def test_nothing_waits(torch):
    given = on_gpu(small.make(T=40, offsets=[0, 0, 17, 36]), grad=True)
    chunk_kda(**given)[0].sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, ht = chunk_kda(**given)
        (o.sum() + ht.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_current_stream_is_used(torch):
    """Inputs are made on a side stream behind a long wait; a call on any other stream would read them too early."""
    given = on_gpu(small.make(T=40))
    plain = chunk_kda(**given)
    late = torch.zeros_like(given["v"])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late.copy_(given["v"])
        o, ht = chunk_kda(**{**given, "v": late})
    side.synchronize()
    assert torch.equal(o, plain[0])
    assert torch.equal(ht, plain[1])


def test_cuda_graph(torch):
    """Captured once, replayed with other values and other offsets in the same buffers."""
    p, other = small.make(T=40, offsets=[0, 0, 17, 36]), small.make(T=40, offsets=[0, 20, 21, 40])
    given = on_gpu(p, grad=True)
    do = torch.tensor(p.do, dtype=torch.float32, device="cuda")
    leaves = [given[n] for n in ("q", "k", "v", "g", "beta", "initial_state")]

    def step() -> tuple[Any, ...]:
        o, ht = chunk_kda(**given)
        return o, ht, *torch.autograd.grad(o, leaves, do)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    changed = on_gpu(other)
    with torch.no_grad():
        for name, x in given.items():
            if isinstance(x, torch.Tensor):
                x.copy_(changed[name])
    graph.replay()
    for x, y in zip(captured, step(), strict=True):
        assert torch.equal(x, y)
    wanted = forward_reverse(other)
    small.close(captured[0].detach().cpu(), wanted["o"])


def test_low_level(torch):
    p = small.make(T=40, offsets=[0, 17, 36, 36])
    given = {n: x for n, x in on_gpu(p).items() if n not in (
        "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")}  # fmt: skip
    parts = chunk_kda_fwd(**given, disable_recompute=True)
    _, _, g, Aqk, Akk, *inner, h, _ = parts
    assert h.shape == (1, 40 // small.CHUNK + 3, 2, 5, 3)
    assert not h[:, 4:].any()
    exact = chunk_kda_fwd(**given, cu_seqlens_cpu=given["cu_seqlens"].cpu(), return_intermediate_states=True)[-2]
    assert torch.equal(exact, h[:, :4])
    saved = {"g": g, "h": h, **dict(zip(("w", "u", "qg", "kg", "v_new"), inner, strict=True))}
    start = {"Aqk": Aqk, "Akk": Akk, "g_org": given.pop("g"), "do": torch.tensor(p.do, device="cuda").float()}
    given.pop("output_final_state")
    again = chunk_kda_bwd(**given, **start)
    kept = chunk_kda_bwd(**given, **start, **saved, disable_recompute=True)
    for x, y in zip(again, kept, strict=True):
        if x is not None:
            small.close(y.cpu(), x.double().cpu().numpy(), 2.0**-20)


def test_wrong_offsets_hurt_nobody(torch):
    given = on_gpu(small.make(T=40, offsets=[0, 0, 17, 36]))
    for values in ([0, 90, 17, 1 << 40], [5, -3, 2, 1]):
        given["cu_seqlens"] = torch.tensor(values, device="cuda")
        chunk_kda(**given)
        torch.cuda.synchronize()


def test_devices_do_not_mix(torch):
    given = on_gpu(small.make(T=40, offsets=[0, 0, 17, 36]))
    with pytest.raises(TypeError, match=r"^cu_seqlens is on cpu, but q is on cuda:0; move it there"):
        chunk_kda(**{**given, "cu_seqlens": given["cu_seqlens"].cpu()})
    with pytest.raises(TypeError, match=r"^cu_seqlens_cpu is on cuda:0; it is the copy on the CPU"):
        chunk_kda(**given, cu_seqlens_cpu=given["cu_seqlens"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cupy_gives_the_bits_of_torch(torch, dtype):
    cupy = pytest.importorskip("cupy")
    p = small.make(T=40, offsets=[0, 0, 17, 36], dtype=dtype)
    numpy = small.arguments(p, small.in_numpy(dtype))
    arrays = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in numpy.items()}
    tensors = small.arguments(p, small.in_torch(dtype, grad=False))
    tensors = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in tensors.items()}
    with cupy.cuda.Stream(non_blocking=True) as stream:
        found = chunk_kda(**arrays)
    stream.synchronize()
    for x, y in zip(found, chunk_kda(**tensors), strict=True):
        assert np.array_equal(cupy.asnumpy(x).astype(np.float64), y.double().cpu().numpy())
