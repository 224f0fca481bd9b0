"""The torch adapter: a right function is right through it, and each planted fault shows."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import calls
import numpy as np
import pytest

from oracles.recurrence import forward_reverse
from verikda.case import LAYOUTS

torch = pytest.importorskip("torch", reason="the torch adapter needs PyTorch: pip install 'verikda[torch]'")

import toy_kda  # noqa: E402

from verikda.targets import fresh_memory, torch_function  # noqa: E402
from verikda.targets.base import TargetError  # noqa: E402
from verikda.targets.torch_function import TorchFunction  # noqa: E402


def target(function=toy_kda.chunk_kda, **options):
    return TorchFunction(function, "toy", device="cpu", **options)


def assert_right(result, call, rtol=1e-5):
    expected = forward_reverse(call.problem)
    assert set(result.outputs) == set(expected)
    for name, value in expected.items():
        assert np.abs(result.outputs[name] - value).max(initial=0) <= rtol * (np.abs(value).max(initial=0) + 1), name
    assert result.changed == ()


CALLS = {
    "plain": calls.make(h0=False, dht=False),
    "states": calls.make(),
    "state gradient only": calls.make(do=False),
    "grouped": calls.make(shape=(1, 6, 2, 6, 3, 2)),
    "v first": calls.make(state_v_first=True),
    "v first, no h0": calls.make(state_v_first=True, h0=False),
    "packed": calls.make(shape=(1, 7, 1, 2, 3, 4), cu_seqlens=[0, 2, 2, 6], offsets="int32"),
    "norm": calls.make(problem={"qk_l2norm": True}),
    "sigmoid": calls.make(problem={"beta_sigmoid": True}),
    "negative": calls.make(problem={"beta_sigmoid": True, "allow_neg_eigval": True}),
    "softplus": calls.make(gate="softplus", params=True),
    "bounded": calls.make(gate="bounded", params=True, safe_gate=True),
    "bounded without parameters": calls.make(gate="bounded"),
    "empty": calls.make(shape=(1, 0, 1, 2, 3, 4), cu_seqlens=[0, 0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_arrives(name):
    assert_right(target().run(CALLS[name]), CALLS[name])


def test_scale_arrives():
    call = calls.make()
    call = replace(call, problem=replace(call.problem, scale=-0.3))
    assert_right(target().run(call), call)


def test_delta_rule():
    call = calls.make(gate="none", shape=(1, 5, 2, 2, 3, 4))
    t = target(toy_kda.chunk_delta_rule)
    assert t.capabilities.rules == ("delta",)
    assert_right(t.run(call), call)


def test_other_convention():
    call = calls.make()
    assert_right(target(toy_kda.long_names).run(call), call)


@pytest.mark.parametrize("poison", [None, np.nan, 1e30])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_memory_changes_nothing(dtype, layout, poison):
    call = calls.make(dtype, shape=(1, 7, 1, 2, 3, 4), cu_seqlens=[0, 2, 2, 6])
    plain, other = target().run(call), target().run(replace(call, layout=layout, poison=poison))
    assert other.changed == ()
    assert all(np.array_equal(plain.outputs[n], other.outputs[n]) for n in plain.outputs)
    assert set(other.layouts) == {"q", "k", "v", "g", "beta", "h0", "cu_seqlens", "do", "dht"}
    assert all(got.split(":")[0] in (layout, "sliced") for got in other.layouts.values())


def test_dtypes_are_recorded():
    result = target().run(calls.make("bfloat16", g_dtype="float32"))
    assert result.dtypes["o"] == result.dtypes["dq"] == "bfloat16"
    assert result.dtypes["ht"] == result.dtypes["dg"] == result.dtypes["dh0"] == "float32"


def test_tensors_arrive_as_asked():
    seen = {}

    def f(q, k, v, g, beta, cu_seqlens=None):
        seen.update(q=q, cu=cu_seqlens, grad=torch.is_grad_enabled())
        return toy_kda.chunk_kda(q, k, v, g, beta, cu_seqlens=cu_seqlens)

    call = calls.make(
        "float16",
        shape=(1, 4, 2, 2, 3, 4),
        cu_seqlens=[0, 3, 4],
        offsets="int32",
        h0=False,
        dht=False,
        layout="strided",
    )
    target(f).run(call)
    assert seen["q"].dtype == torch.float16
    assert seen["q"].stride(-1) == 2
    assert seen["q"].requires_grad
    assert seen["cu"].dtype == torch.int32
    target(f).run(replace(call, layout="misaligned", backward=False))
    assert seen["q"].is_contiguous()
    assert seen["q"].data_ptr() % 64 == 2
    assert not seen["q"].requires_grad
    assert not seen["grad"]


def test_the_final_state_is_asked_for_or_not():
    asked = []

    def f(q, k, v, g, beta, output_final_state=False):
        asked.append(output_final_state)
        return toy_kda.chunk_kda(q, k, v, g, beta, output_final_state=output_final_state)

    call = calls.make(h0=False, dht=False)
    assert "ht" in target(f).run(call).outputs
    assert "ht" not in target(f).run(replace(call, final_state=False)).outputs
    assert asked == [True, False]


def test_what_ran_is_recorded():
    ran = target().run(calls.make(backward=False)).ran
    assert "toy_kda.chunk_kda" in ran
    assert "toy_kda.py:" in ran
    assert ran.endswith(f", torch {torch.__version__} on cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_a_gpu(layout):
    call = calls.make(
        "bfloat16", shape=(1, 7, 1, 2, 3, 4), cu_seqlens=[0, 2, 2, 6], offsets="int32", layout=layout, poison=np.nan
    )
    gpu = TorchFunction(toy_kda.chunk_kda, "toy", device="cuda").run(call)
    assert torch.cuda.get_device_name() in gpu.ran
    assert_right(gpu, call, rtol=0.02)

    def write_past_the_end(q, k, v, g, beta, initial_state=None, output_final_state=False, cu_seqlens=None):
        k.detach().as_strided((1,), (1,), 0).fill_(5)
        return toy_kda.chunk_kda(q, k, v, g, beta, None, initial_state, output_final_state, cu_seqlens=cu_seqlens)

    broken = TorchFunction(write_past_the_end, "toy", device="cuda").run(call)
    assert broken.changed == ("memory around k",)


# Planted faults


def broken(change):
    """A right function with `change(tensors by name)` run on its inputs first."""

    def f(q, k, v, g, beta, initial_state=None, output_final_state=False, cu_seqlens=None):
        inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        inputs |= change(inputs) or {}
        return toy_kda.chunk_kda(
            **inputs, initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens
        )

    return target(f)


def test_writing_into_an_input_is_seen():
    def scale_in_place(x):
        x["k"].data.mul_(2)

    assert broken(scale_in_place).run(calls.make()).changed == ("k",)


def test_writing_beside_an_input_is_seen():
    def write_past_the_end(x):
        q = x["q"].detach()
        q.as_strided((1,), (1,), q.storage_offset() + q.numel()).fill_(5)

    assert broken(write_past_the_end).run(calls.make()).changed == ("memory around q",)


def test_writing_in_the_backward_is_seen():
    class Zero(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            return v.clone()

        @staticmethod
        def backward(ctx, d):
            d.zero_()
            return d

    def f(q, k, v, g, beta):
        o = toy_kda.chunk_kda(q, k, v, g, beta)[0]
        return Zero.apply(o)

    assert target(f).run(calls.make(h0=False, dht=False)).changed == ("do",)


def reads_past_the_end(x):
    # Rounds the token count up to 4 and multiplies what lies there by a zero mask, as tile loads do.
    k = x["k"].detach()
    tail = k.as_strided((4,), (1,), k.storage_offset() + k.numel())
    return {"k": x["k"] + 0 * tail.sum()}


def test_reading_past_the_end_is_seen_with_poison():
    call = calls.make()
    assert_right(broken(reads_past_the_end).run(call), call)
    assert np.isnan(broken(reads_past_the_end).run(replace(call, poison=np.nan)).outputs["o"]).all()


def test_reading_padding_rows_is_seen_with_poison():
    def sums_all_rows(x):
        return {"q": x["q"] + 0 * x["v"].sum()}

    call = calls.make(shape=(1, 7, 1, 2, 3, 4), cu_seqlens=[0, 2, 2, 6])
    assert_right(broken(sums_all_rows).run(call), call)
    assert np.isnan(broken(sums_all_rows).run(replace(call, poison=np.nan)).outputs["o"][:, :6]).all()


UNWRITTEN = {
    "empty": lambda x: torch.empty(x.shape, dtype=x.dtype),
    "empty_like": lambda x: torch.empty_like(x),
    "empty_strided": lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype),
    "empty_permuted": lambda x: torch.empty_permuted(x.shape, (0, 1, 3, 2), dtype=x.dtype),
    "Tensor.new_empty": lambda x: x.new_empty(x.shape),
    "Tensor.new_empty_strided": lambda x: x.new_empty_strided(x.shape, x.stride()),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("maker", fresh_memory.MAKERS)
def test_a_row_that_is_never_written_is_nan(maker, dtype):
    """Forward and backward, whatever the allocator hands out: here it is memory that held the right answer."""

    class AllButTheLastRow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return AllButTheLastRow.written(x)

        @staticmethod
        def backward(ctx, d):
            return AllButTheLastRow.written(d)

        @staticmethod
        def written(x):
            y = UNWRITTEN[maker](x)
            y[:, :-1] = x[:, :-1]
            return y

    def f(q, k, v, g, beta):
        return AllButTheLastRow.apply(toy_kda.chunk_kda(q, k, AllButTheLastRow.apply(v), g, beta)[0])

    outputs = target(f).run(calls.make(dtype, h0=False, dht=False)).outputs
    for name in ("o", "dv"):
        assert np.isnan(outputs[name][:, -1]).all(), name
    assert np.isfinite(outputs["o"][:, :-1]).all()


@pytest.mark.parametrize("name", CALLS)
def test_a_result_has_the_bits_of_a_call_on_other_memory(name, monkeypatch):
    """Of a function that writes everything it takes, the adapter changes nothing by filling memory before."""
    filled = target().run(CALLS[name]).outputs
    monkeypatch.setattr(torch_function, "poisoned", nullcontext)
    plain = target().run(CALLS[name]).outputs
    assert filled.keys() == plain.keys()
    assert all(np.array_equal(filled[n], x, equal_nan=True) for n, x in plain.items())


def test_compiled_functions_take_filled_memory_too():
    """By a function, not a method; nor does what torch.compile takes while it traces become part of the program."""

    def f(x):
        return torch.cat([torch.empty_like(x), x.new_empty(2).zero_(), 2 * x])

    compiled, again = torch.compile(f, backend="aot_eager"), torch.compile(f, backend="aot_eager")
    x = torch.ones(3)
    again(x)
    with fresh_memory.poisoned():
        for function in (compiled, again):
            found = function(x)
            assert found[:3].isnan().all()
            assert found[3:].tolist() == [0, 0, 2, 2, 2]


def test_integers_and_memory_that_is_filled_are_left_alone():
    with fresh_memory.poisoned():
        assert torch.empty(3, dtype=torch.int32).dtype == torch.int32
        assert torch.zeros(3).eq(0).all()
        assert torch.empty(3, requires_grad=True).requires_grad
        assert torch.empty(0).numel() == 0


@pytest.mark.parametrize("layout", ["sliced", "strided"])
def test_ignoring_strides_is_seen(layout):
    def as_if_contiguous(x):
        q = x["q"]
        return {"q": q.as_strided(q.shape, torch.empty(q.shape).stride(), q.storage_offset())}

    call = calls.make()
    right = target().run(call).outputs
    assert np.array_equal(broken(as_if_contiguous).run(call).outputs["o"], right["o"])
    wrong = broken(as_if_contiguous).run(replace(call, layout=layout)).outputs
    assert not np.allclose(wrong["o"], right["o"])


def test_ignoring_the_storage_offset_is_seen():
    def from_the_start(x):
        return {"q": x["q"].as_strided(x["q"].shape, x["q"].stride(), 0)}

    call = calls.make()
    assert not np.allclose(broken(from_the_start).run(call).outputs["o"], target().run(call).outputs["o"])


def test_calls_that_make_no_sense():
    with pytest.raises(ValueError, match="a call with backward needs do or dht"):
        target().run(calls.make(do=False, dht=False))
    call = calls.make()
    with pytest.raises(ValueError, match="not representable in bfloat16"):
        target().run(replace(call, dtypes=dict(call.dtypes, q="bfloat16")))


def test_device_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TargetError, match="asks for device 'cuda', but torch finds no GPU"):
        TorchFunction(toy_kda.chunk_kda, "toy", device="cuda")


def test_a_device_that_torch_does_not_know_is_refused():
    with pytest.raises(TargetError, match=r"asks for device 'gpu': .*; use 'cpu' or 'cuda'"):
        TorchFunction(toy_kda.chunk_kda, "toy", device="gpu")
    assert TorchFunction(toy_kda.chunk_kda, "toy", device=torch.device("cpu")).device == "cpu"


def test_a_function_may_answer_the_name_of_a_contract():
    call = calls.make()
    toy = TorchFunction(toy_kda.chunk_kda, "toy", device="cpu", contract=lambda _: "float32")
    assert toy.contract(call) == TorchFunction(toy_kda.chunk_kda, "toy", device="cpu", contract="float32").contract(
        call
    )
    toy = TorchFunction(toy_kda.chunk_kda, "toy", device="cpu", contract=lambda _: 32)
    with pytest.raises(TargetError, match="the declared contract answered 32 for a call; it must answer"):
        toy.contract(call)


def test_contracts():
    call = calls.make("bfloat16", chunk_size=32)
    assert target().contract(call).name == "storage-bfloat16-c32"
    assert target(contract="recurrent32").contract(call).chunk is None
    with pytest.raises(TargetError, match="contract 'storage8' is not known: use one of storage16"):
        target(contract="storage8")
    with pytest.raises(TargetError, match="its contract is a int"):
        target(contract=5)

    def f(q, k, v, g, beta):
        pass

    f.verikda_contract = "float32"
    assert target(f).contract(call).name == "float32-c32"
