"""chunk_kda, chunk_delta_rule and recurrent_kda on torch tensors, against the float64 recurrence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import small

from oracles.recurrence import forward_reverse
from verikda.ops import chunk_delta_rule, chunk_kda, recurrent_kda

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")

PROBLEMS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "pack, softplus, everything fused": {
        "T": 40, "offsets": [0, 0, 17, 36, 36], "gate": "softplus", "parameters": True, "qk_l2norm": True,
        "beta_sigmoid": True, "allow_neg_eigval": True,
    },
    "bounded, bare": {"gate": "bounded", "B": 2, "h0": False},
    "bounded": {"gate": "bounded", "parameters": True},
    "delta": {"gate": "none", "B": 2},
    "reset": {"g": np.where(np.arange(19)[:, None, None] == 7, -np.inf, -0.5) * np.ones((1, 19, 2, 5))},
}  # fmt: skip
NAMES = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta", "initial_state": "dh0", "A_log": "dA_log",
         "dt_bias": "ddt_bias"}  # fmt: skip


def call(p: Any, v_first: bool = False, recompute: bool = True, **own: str) -> dict[str, Any]:
    """Outputs and gradients by the names of the oracle, states in [K,V] order."""
    given = small.arguments(p, small.in_torch(**own), v_first)
    function = chunk_delta_rule if p.gate == "none" else chunk_kda
    o, ht = function(**given, disable_recompute=not recompute)
    dht = torch.tensor(p.dht.swapaxes(-1, -2) if v_first else p.dht, dtype=torch.float32)
    leaves = {NAMES[n]: x for n, x in given.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    grads = torch.autograd.grad([o, ht], list(leaves.values()), [torch.tensor(p.do, dtype=o.dtype), dht])
    found = {"o": o.detach(), "ht": ht.detach(), **dict(zip(leaves, grads, strict=True))}
    for name in ("ht", "dh0"):
        if v_first and name in found:
            found[name] = found[name].swapaxes(-1, -2)
    return found


@pytest.mark.parametrize("name", PROBLEMS)
def test_against_the_recurrence(name):
    p = small.make(**PROBLEMS[name])
    wanted, found = forward_reverse(p), call(p, v_first="pack" in name)
    assert set(found) == {n for n, x in wanted.items() if x is not None}
    for n, x in found.items():
        small.close(x.reshape(wanted[n].shape), wanted[n])
    kept = call(p, v_first="pack" in name, recompute=False)
    assert all(torch.equal(kept[n], x) for n, x in found.items())


def test_the_comparison_can_fail():
    p = small.make()
    wrong = p.beta.copy()
    wrong[0, 3, 0] += 1e-3
    found = call(replace(p, beta=wrong))
    with pytest.raises(AssertionError):
        small.close(found["o"], forward_reverse(p)["o"])


@pytest.mark.parametrize("chunk_size", [32, 64])
def test_chunk_size_is_a_parameter(chunk_size):
    p = small.make(T=35)
    given = small.arguments(p, small.in_torch(grad=False)) | {"chunk_size": chunk_size}
    o, ht = chunk_kda(**given)
    wanted = forward_reverse(p)
    small.close(o, wanted["o"])
    small.close(ht, wanted["ht"])


def test_parameters_of_other_dtypes_get_gradients_of_theirs():
    p = small.make(gate="bounded", parameters=True)
    p = replace(p, A_log=np.array([0.5, -0.25]), dt_bias=np.array([[1, 0.5, 0, -1, 2], [0, 0, 3, -2, 1.0]]))
    given = small.arguments(p, small.in_torch(A_log="bfloat16", dt_bias="float16"))
    given["A_log"] = given["A_log"].detach().reshape(1, 1, 2, 1).requires_grad_()
    o, _ = chunk_kda(**given)
    dA, db = torch.autograd.grad(o, [given["A_log"], given["dt_bias"]], torch.tensor(p.do, dtype=torch.float32))
    assert (dA.dtype, dA.shape, db.dtype) == (torch.bfloat16, (1, 1, 2, 1), torch.float16)
    wanted = forward_reverse(replace(p, dht=None))
    small.close(dA.double().reshape(2), wanted["dA_log"], 2.0**-8)
    small.close(db.double().reshape(2, 5), wanted["ddt_bias"], 2.0**-11)


def test_sixteen_bit_gradients_have_the_dtypes_of_their_arguments():
    p = small.make(dtype="bfloat16")
    found = call(p, dtype="bfloat16", beta="bfloat16")
    kinds = {n: str(x.dtype).removeprefix("torch.") for n, x in found.items()}
    assert kinds == {
        "o": "bfloat16", "ht": "float32", "dq": "bfloat16", "dk": "bfloat16", "dv": "bfloat16", "dg": "float32",
        "dbeta": "bfloat16", "dh0": "float32",
    }  # fmt: skip
    small.close(found["o"].double(), forward_reverse(p)["o"], 2.0**-5)


def test_one_gradient_or_one_output():
    p = small.make()
    given = small.arguments(p, small.in_torch())
    o, ht = chunk_kda(**given)
    do, dht = torch.tensor(p.do, dtype=torch.float32), torch.tensor(p.dht, dtype=torch.float32)
    for roots, seeds, q in (([o], [do], replace(p, dht=None)), ([ht], [dht], replace(p, do=None))):
        dk, dh0 = torch.autograd.grad(roots, [given["k"], given["initial_state"]], seeds, retain_graph=True)
        wanted = forward_reverse(q)
        small.close(dk, wanted["dk"])
        small.close(dh0, wanted["dh0"])
    for name in ("q", "k", "v", "g", "initial_state"):
        given[name] = given[name].detach()
    (dbeta,) = torch.autograd.grad(chunk_kda(**given)[0], given["beta"], do)
    small.close(dbeta, forward_reverse(replace(p, dht=None))["dbeta"])


def test_views_equal_their_contiguous_copies():
    p = small.make(B=2)
    given = small.arguments(p, small.in_torch(grad=False))
    plain = chunk_kda(**given)
    wide = torch.zeros(2, 19, 1, 10)
    wide[..., ::2] = given["q"]
    turned = given["g"].permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    shifted = torch.zeros(given["v"].numel() + 1)
    shifted[1:] = given["v"].flatten()
    views = {"q": wide[..., ::2], "g": turned, "v": shifted[1:].view(given["v"].shape)}
    assert not views["q"].is_contiguous()
    for x, y in zip(plain, chunk_kda(**{**given, **views}), strict=True):
        assert torch.equal(x, y)
    flat = given["g"][:, :, :1, :1]
    leaf = flat.clone().requires_grad_()
    o, _ = chunk_kda(**{**given, "g": leaf.expand(-1, -1, 2, 5)})
    o.sum().backward()
    assert leaf.grad.shape == (2, 19, 1, 1)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(reentrant, recompute):
    from torch.utils.checkpoint import checkpoint

    p = small.make()

    def grads(run):
        given = small.arguments(p, small.in_torch())
        leaves = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        o, ht = run(lambda *_: chunk_kda(**given, disable_recompute=not recompute), leaves)
        torch.autograd.backward([o, ht], [torch.ones_like(o), torch.ones_like(ht)])
        return [x.grad for x in leaves]

    plain = grads(lambda f, leaves: f())
    again = grads(lambda f, leaves: checkpoint(f, *leaves, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_what_the_reverse_needs_must_not_change():
    given = small.arguments(small.make(), small.in_torch())
    k = given["k"] * 1
    o, _ = chunk_kda(**{**given, "k": k})
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_no_second_derivative():
    given = small.arguments(small.make(), small.in_torch())
    (dq,) = torch.autograd.grad((chunk_kda(**given)[0] ** 2).sum(), given["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        dq.sum().backward()


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [((2, 0), None), ((0, 19), None), ((1, 0), [0, 0, 0]), ((1, 4), [0, 0]), ((1, 4), [0]), ((1, 0), [0])],
)
@pytest.mark.parametrize("gate", ["log", "softplus", "none"])
def test_without_tokens(shape, offsets, gate):
    p = small.make(B=shape[0], T=shape[1], offsets=offsets, gate=gate, parameters=gate == "softplus")
    found = call(p)
    assert found["o"].shape == p.v.shape
    assert not found["o"].any()
    small.close(found["ht"], p.h0)
    small.close(found["dh0"], p.dht)
    for name, x in found.items():
        assert torch.isfinite(x).all(), name
        if name not in ("ht", "dh0"):
            assert not x.any(), name


def test_states_between_chunks():
    p = small.make(T=40, offsets=[0, 17, 17, 36])
    given = small.arguments(p, small.in_torch(), v_first=True)
    with pytest.raises(ValueError, match=r"^return_intermediate_states=True gives an h without gradients, .*no_grad"):
        chunk_kda(**given, return_intermediate_states=True)
    with torch.no_grad():
        o, ht, h = chunk_kda(**given, return_intermediate_states=True)
        plain = chunk_kda(**given)
    assert torch.equal(o, plain[0])
    assert torch.equal(ht, plain[1])
    assert h.shape == (1, 4, 2, 3, 5)  # two chunks, none, two
    assert torch.equal(h[0, 0], given["initial_state"][0])
    assert torch.equal(h[0, 2], given["initial_state"][2])


def test_decoding_token_by_token():
    p = small.make(T=4)
    given = small.arguments(p, small.in_torch(grad=False))
    given.pop("chunk_size")
    state, rows = given.pop("initial_state"), []
    for t in range(4):
        one = {n: given[n][:, t : t + 1] for n in ("q", "k", "v", "g", "beta")}
        o, state = recurrent_kda(**{**given, **one}, initial_state=state)
        rows.append(o)
    wanted = forward_reverse(p)
    small.close(torch.cat(rows, 1), wanted["o"])
    small.close(state, wanted["ht"])


def test_under_torch_compile_the_call_is_left_alone():
    given = small.arguments(small.make(), small.in_torch())
    compiled = torch.compile(lambda q: chunk_kda(**{**given, "q": 2 * q})[0], backend="eager")
    o = compiled(given["q"])
    assert torch.equal(o, chunk_kda(**{**given, "q": 2 * given["q"]})[0])
    o.sum().backward()
    assert given["q"].grad is not None
