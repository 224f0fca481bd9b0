"""The backward kernels on the host backend: against float64 under the noise floor, and in exact relations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from host_backward import run_backward

from kernels_cuda.backward import INTERMEDIATES, backward
from kernels_cuda.forward import SHARED_LIMIT, Forward
from kernels_cuda.modules import Backend, load
from oracles.arithmetic import Exact, Stochastic
from oracles.chunked import emulate
from oracles.contract import Contract, chunked32, operands_tf32
from oracles.recurrence import forward_reverse
from verikda.call import Call
from verikda.case import Case
from verikda.floor import LIMIT, judge
from verikda.inputs import make_call

HOST = load("host")
TOKENS = ("dq", "dk", "dv", "dg", "dbeta")


def contract_of(call: Call) -> Contract:
    dtype = call.dtypes["q"]
    return chunked32(call.chunk_size) if dtype == "float32" else operands_tf32(dtype, call.chunk_size)


def run(backend: Backend = HOST, **knobs: Any) -> tuple[Call, dict[str, np.ndarray], dict[str, str]]:
    call = make_call(Case(**knobs), backward=True)
    return call, *run_backward(backend, call)


def assert_floor(call: Call, out: dict[str, np.ndarray], dtypes: dict[str, str]) -> None:
    judgement = judge(out, dtypes, call.problem, contract_of(call), backward=True)
    assert judgement.verdict != "inconclusive", judgement.detail
    ratios = {name: x.ratio for name, x in judgement.outputs.items()}
    p = call.problem
    expected = {"o", "ht", "dq", "dk", "dv", "dbeta"} | ({"dg"} if p.g is not None else set())
    given = {"dh0": p.h0, "dA_log": p.A_log, "ddt_bias": p.dt_bias}
    assert set(ratios) == expected | {name for name, x in given.items() if x is not None}
    assert all(ratio is None or ratio <= LIMIT for ratio in ratios.values()), ratios


# Instances of the kernels worth running; the knobs around them vary so that every flag meets float64 somewhere.
CASES: list[dict[str, Any]] = [
    {"dtype": "bfloat16", "lengths": (150,), "K": 64, "V": 40, "h0": "random", "heads": 2, "dht": True},
    {"dtype": "bfloat16", "lengths": (129,), "K": 128, "V": 70, "gate_regime": "bound", "gate_magnitude": 5.0},
    {"dtype": "bfloat16", "lengths": (70,), "K": 256, "V": 17, "gate_regime": "one_slow", "dht": True},
    {"dtype": "bfloat16", "lengths": (63, 0, 66, 1), "packed": True, "tail_padding": 5, "K": 33, "V": 1,
     "groups": 3, "h0": "random", "state_v_first": True, "offsets": "int32", "dht": True},
    {"dtype": "bfloat16", "chunk_size": 32, "lengths": (49, 49), "K": 24, "V": 56, "groups": 2, "g_dtype": "same",
     "beta_dtype": "same", "gate_in_kernel": True, "A_log": True, "dt_bias": True, "qk_l2norm": True,
     "beta_sigmoid": True},
    {"dtype": "bfloat16", "chunk_size": 16, "lengths": (17, 31), "packed": True, "K": 7, "V": 9, "g_dtype": "same",
     "key_regime": "repeated", "beta_regime": "one", "gate_regime": "slow", "dht": True},
    {"dtype": "float16", "lengths": (100,), "K": 48, "V": 24, "h0": "random", "gate_in_kernel": True, "dht": True,
     "lower_bound": -5.0, "A_log": True, "qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": True},
    {"dtype": "float16", "lengths": (130,), "K": 64, "V": 16, "rule": "delta", "heads": 2, "groups": 2,
     "key_regime": "collinear", "beta_regime": "near_one", "qk_l2norm": True, "dht": True},
    {"dtype": "bfloat16", "chunk_size": 32, "lengths": (97,), "K": 64, "V": 16, "rule": "delta", "scale": -0.75,
     "h0": "random"},
    {"dtype": "float32", "lengths": (90,), "K": 64, "V": 24, "h0": "random", "gate_regime": "mixed", "dht": True},
    {"dtype": "float32", "chunk_size": 32, "lengths": (40, 0, 33), "packed": True, "K": 130, "V": 12,
     "gate_regime": "ragged", "gate_in_kernel": True, "dt_bias": True, "lower_bound": -5.0, "tail_padding": 70},
    {"dtype": "float32", "chunk_size": 16, "lengths": (35,), "K": 3, "V": 5, "rule": "delta",
     "beta_regime": "up_to_two", "dht": True},
    {"dtype": "bfloat16", "lengths": (20,), "K": 256, "V": 256, "g_dtype": "same", "h0": "random"},
    {"dtype": "float32", "chunk_size": 16, "lengths": (18, 18), "K": 1, "V": 131, "gate_in_kernel": True, "A_log": True,
     "beta_sigmoid": True, "state_v_first": True, "h0": "random", "dht": True},
    {"dtype": "float16", "chunk_size": 32, "lengths": (9, 40), "packed": True, "K": 17, "V": 2, "gate_in_kernel": True,
     "lower_bound": -1.0, "dt_bias": True, "g_dtype": "same", "beta_dtype": "same"},
    {"dtype": "float16", "chunk_size": 16, "lengths": (20, 3), "packed": True, "K": 6, "V": 70, "rule": "delta",
     "beta_dtype": "same", "state_v_first": True, "h0": "random", "dht": True},
]  # fmt: skip


@pytest.mark.parametrize("knobs", CASES, ids=lambda k: f"{k['dtype']}-c{k.get('chunk_size', 64)}-K{k['K']}")
def test_floor(knobs: dict[str, Any]) -> None:
    assert_floor(*run(**knobs))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("gate", "keys", "beta"),
    [
        ("reset", "random", "random"),
        ("spike", "collinear", "near_one"),
        ("zero", "repeated", "one"),
        ("bound", "alternating", "up_to_two"),
        ("last_row_strong", "sparse_int", "binary"),
        ("tiny_steps", "small", "random"),
        ("model", "zero_rows", "zero"),
        ("one_slow", "random", "zero_rows"),
    ],
)
def test_floor_over_regimes(dtype: str, gate: str, keys: str, beta: str) -> None:
    knobs: dict[str, Any] = {
        "lengths": (100,), "K": 64, "V": 24, "h0": "random", "dht": True, "gate_magnitude": 5.0, "seed": 5,
    }  # fmt: skip
    assert_floor(*run(dtype=dtype, gate_regime=gate, key_regime=keys, beta_regime=beta, **knobs))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_only_the_final_state_has_a_gradient(dtype: str) -> None:
    call = make_call(Case(lengths=(100,), K=64, V=24, dtype=dtype, h0="random", dht=True), backward=True)
    call = replace(call, problem=replace(call.problem, do=np.zeros_like(call.problem.v)))
    assert_floor(call, *run_backward(HOST, call))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", ["kda", "delta"])
def test_intermediates(dtype: str, rule: str) -> None:
    """Each is within the noise of its contract, per head and chunk, and zero where masked."""
    call = make_call(Case(lengths=(100,), K=64, V=24, dtype=dtype, rule=rule, h0="random", heads=2), backward=True)
    found, _ = run_backward(HOST, call, keep=INTERMEDIATES)
    contract = contract_of(call)
    inner = emulate(call.problem, contract, Exact(), backward=True, intermediates=True).intermediates
    noisy = emulate(
        call.problem, contract, Stochastic(np.random.default_rng(0), 8), backward=True, intermediates=True
    ).intermediates
    T, HV, C = 100, 2, 64
    for name in INTERMEDIATES:
        if name == "X":  # dL = diag(beta) X
            beta = call.problem.beta[0].T
            found["dL"] = found.pop("X") * beta.T[None, :, :, None]
            name = "dL"
        truth = inner[name][0]  # [HV, chunks, C, D]
        if name == "dS":
            result = found[name].swapaxes(0, 1)
        else:
            rows = np.zeros((HV, 128, *found[name].shape[3:]))
            rows[:, :T] = found[name][0].swapaxes(0, 1)
            result = rows.reshape(HV, -1, C, *rows.shape[2:])
            if name in ("dAqk", "dA", "dL"):
                assert (result == np.tril(result, 0 if name == "dAqk" else -1)).all(), f"{name} above the diagonal"
            padding = np.arange(128).reshape(-1, C) >= T
            truth = np.where(padding[None, :, :, None], 0.0, truth)
        if name == "dA":  # only its strictly lower triangle is used
            truth = np.tril(truth, -1)
        deviation = np.broadcast_to(noisy[name], (8, 1, *inner[name].shape[1:]))[:, 0] - inner[name][0]
        noise = (deviation**2).mean(0).sum((-1, -2))
        error = ((result - truth) ** 2).sum((-1, -2))
        assert (error <= LIMIT**2 * noise).all(), (name, np.sqrt(error / noise))


def cut(call: Call, begin: int, end: int, **changes: Any) -> Call:
    """The tokens begin .. end - 1 as a call of their own."""
    p = call.problem
    tokens = {name: getattr(p, name) for name in ("q", "k", "v", "g", "beta", "do")}
    parts = {name: None if x is None else x[:, begin:end] for name, x in tokens.items()}
    return replace(call, problem=replace(p, **{**parts, **changes}))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rule", ["kda", "delta"])
def test_loss_of_a_prefix_knows_no_later_token(dtype: str, rule: str) -> None:
    """Bit for bit: an anchor that moves with the tail or lies ahead of a row would show."""
    knobs: dict[str, Any] = {"lengths": (80,), "K": 64, "V": 24, "dtype": dtype, "rule": rule, "h0": "random"}
    call = make_call(Case(gate_magnitude=3.0, **knobs), backward=True)
    other = make_call(Case(gate_magnitude=1.0, seed=1, **knobs), backward=True)
    assert call.problem.do is not None
    for T in (1, 7, 8, 9, 16, 17, 31, 40, 47, 48, 63, 64, 65, 79):
        do = call.problem.do.copy()
        do[:, T:] = 0
        mixed = {name: getattr(call.problem, name) for name in ("q", "k", "v", "g", "beta")}
        later = {
            name: None if x is None else np.concatenate([x[:, :T], getattr(other.problem, name)[:, T:]], 1)
            for name, x in mixed.items()
        }
        full, _ = run_backward(HOST, replace(call, problem=replace(call.problem, do=do)))
        changed, _ = run_backward(HOST, replace(call, problem=replace(call.problem, do=do, **later)))
        alone, _ = run_backward(HOST, cut(replace(call, problem=replace(call.problem, do=do)), 0, T))
        for name in TOKENS if rule == "kda" else TOKENS[:3]:
            assert changed[name][:, :T].tobytes() == full[name][:, :T].tobytes(), (name, T)
            assert (alone[name] == full[name][:, :T]).all(), (name, T)
            assert name == "dq" or (full[name][:, T:] == 0).all(), (name, T)
        assert changed["dh0"].tobytes() == full["dh0"].tobytes()
        assert (alone["dh0"] == full["dh0"]).all()


def test_packed_is_separate() -> None:
    lengths = (63, 0, 64, 1, 17, 0)
    call, packed, _ = run(
        lengths=lengths, packed=True, tail_padding=9, K=33, V=20, dtype="bfloat16", groups=2, h0="random", dht=True
    )
    p, begin = call.problem, 0
    assert p.h0 is not None
    assert p.dht is not None
    for n, length in enumerate(lengths):
        end = begin + length
        if length == 0:
            assert (packed["dh0"][n] == p.dht[n]).all()
            continue
        alone = cut(call, begin, end, h0=p.h0[n : n + 1], dht=p.dht[n : n + 1], cu_seqlens=None)
        out, _ = run_backward(HOST, alone)
        for name in TOKENS:
            assert out[name].tobytes() == packed[name][:, begin:end].tobytes(), name
        assert out["dh0"][0].tobytes() == packed["dh0"][n].tobytes()
        begin = end
    for name in TOKENS:
        assert (packed[name][:, begin:] == 0).all(), name


def test_empty_batch_passes_the_gradient_of_the_state_through() -> None:
    call, out, _ = run(lengths=(0,), K=16, V=16, dtype="bfloat16", h0="random", packed=True, dht=True)
    assert (out["dh0"] == call.problem.dht).all()
    _, out, _ = run(lengths=(0,), K=16, V=16, dtype="bfloat16", h0="random", packed=True)
    assert (out["dh0"] == 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_split_at_a_chunk_with_carried_state_is_one_pass(dtype: str) -> None:
    call, full, _ = run(lengths=(150,), K=64, V=24, dtype=dtype, h0="random", dht=True)
    first, _ = run_backward(HOST, cut(call, 0, 64, dht=None))
    second, _ = run_backward(HOST, cut(call, 64, 150, h0=first["ht"]))
    first, _ = run_backward(HOST, cut(call, 0, 64, dht=second["dh0"]))
    for name in TOKENS:
        assert np.concatenate([first[name], second[name]], 1).tobytes() == full[name].tobytes(), name
    assert first["dh0"].tobytes() == full["dh0"].tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_order_of_threads_copies_and_poison_change_nothing(dtype: str) -> None:
    call = make_call(
        Case(lengths=(70, 20), packed=True, K=64, V=24, dtype=dtype, h0="random", qk_l2norm=True, dht=True),
        backward=True,
    )
    first, _ = run_backward(HOST, call, keep=INTERMEDIATES)
    for options in (
        {"order": "reverse"},
        {"order": "shuffled", "seed": 1, "late_copies": False},
        {"order": "shuffled", "seed": 2, "poison": 0x7F7F7F7F},
    ):
        other, _ = run_backward(load("host", **options), call, keep=INTERMEDIATES)
        assert {n for n in first if first[n].tobytes() != other[n].tobytes()} == set(), options


@pytest.mark.parametrize(("dtype", "offset"), [("bfloat16", 4), ("float32", 4)])
def test_misaligned_inputs_change_nothing(dtype: str, offset: int) -> None:
    call, aligned, _ = run(lengths=(70,), K=64, V=24, dtype=dtype, h0="random", dht=True)
    moved, _ = run_backward(HOST, call, offset=offset)
    assert {n for n in aligned if aligned[n].tobytes() != moved[n].tobytes()} == set()


def test_ring_size_and_width_of_slices_change_nothing() -> None:
    call, usual, _ = run(lengths=(150,), K=64, V=64, dtype="bfloat16", h0="random", dht=True)
    for limit, processors in ((60 * 1024, 132), (99 * 1024, 1)):
        out, _ = run_backward(HOST, call, shared_limit=limit, processors=processors)
        assert {n for n in usual if usual[n].tobytes() != out[n].tobytes()} == set(), (limit, processors)


@pytest.mark.parametrize("rule", ["kda", "delta"])
def test_what_the_forward_kept_is_what_is_computed_again(rule: str) -> None:
    call, again, _ = run(
        lengths=(70, 20), packed=True, K=64, V=24, dtype="bfloat16", rule=rule, qk_l2norm=True, beta_sigmoid=True,
        dht=True,
    )  # fmt: skip
    kept, _ = run_backward(HOST, call, recompute=False)
    assert {n for n in again if again[n].tobytes() != kept[n].tobytes()} == set()


def test_state_v_first_is_transposed() -> None:
    knobs: dict[str, Any] = {"lengths": (70,), "K": 64, "V": 24, "dtype": "bfloat16", "h0": "random", "dht": True}
    _, usual, _ = run(**knobs)
    _, transposed, _ = run(state_v_first=True, **knobs)
    assert {n for n in usual if usual[n].tobytes() != transposed[n].tobytes()} == set()


def test_gradients_scale_with_the_loss() -> None:
    call, usual, _ = run(lengths=(70,), K=64, V=24, dtype="bfloat16", h0="random", dht=True)
    p = call.problem
    assert p.do is not None
    assert p.dht is not None
    out, _ = run_backward(HOST, replace(call, problem=replace(p, do=-8.0 * p.do, dht=-8.0 * p.dht)))
    for name in (*TOKENS, "dh0"):
        assert (out[name] == -8.0 * usual[name]).all(), name


def test_grouped_heads_are_repeated_heads() -> None:
    """Per value head bit for bit; dq and dk are sums over the group."""
    call, grouped, _ = run(lengths=(70,), K=64, V=24, dtype="float32", groups=3, heads=2, dht=True)
    p = call.problem
    repeated = replace(p, q=np.repeat(p.q, 3, 2), k=np.repeat(p.k, 3, 2))
    out, _ = run_backward(HOST, replace(call, problem=repeated))
    for name in ("dv", "dg", "dbeta"):
        assert out[name].tobytes() == grouped[name].tobytes(), name
    for name in ("dq", "dk"):
        each = out[name].astype(np.float32).reshape(1, 70, 2, 3, 64)
        assert ((each[:, :, :, 0] + each[:, :, :, 1] + each[:, :, :, 2]) == grouped[name]).all(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_hard_reset_stops_every_gradient(dtype: str) -> None:
    call = make_call(Case(lengths=(70,), K=64, V=24, dtype=dtype, h0="random", gate_magnitude=1.0), backward=True)
    p = call.problem
    assert p.g is not None
    assert p.do is not None
    g, do = p.g.copy(), p.do.copy()
    g[0, (20, 33, 66)] = -np.inf
    g[0, 40, :, ::2] = -np.inf
    call = replace(call, problem=replace(p, g=g))
    out, dtypes = run_backward(HOST, call)
    assert (out["dg"][np.isneginf(g)] == 0).all()
    assert_floor(call, out, dtypes)
    # No loss before token 33, and nothing after it that knows of the tokens before.
    do[0, :33] = 0
    out, _ = run_backward(HOST, replace(call, problem=replace(p, g=g, do=do)))
    for name in ("dq", "dk", "dv", "dbeta"):
        assert (out[name][:, :33] == 0).all(), name
    assert (out["dh0"] == 0).all()
    # Rows and columns of a chunk's products cancel in dg up to their rounding, which is 2^-17 for 16-bit calls.
    assert np.abs(out["dg"][:, :33]).max() <= 2.0**-15 * np.abs(out["dg"]).max()


def test_small_gradients_of_late_tokens_beside_large_early_ones() -> None:
    """A suffix sum formed as total minus prefix would lose the late ones."""
    call = make_call(Case(lengths=(64,), K=16, V=16, dtype="float32", gate_magnitude=0.1), backward=True)
    p = call.problem
    assert p.do is not None
    do = p.do * np.where(np.arange(64) < 8, 2.0**40, 1.0)[None, :, None, None]
    call = replace(call, problem=replace(p, do=do))
    out, _ = run_backward(HOST, call)
    truth = forward_reverse(call.problem)
    for name in TOKENS:
        late, expected = out[name][:, 8:], truth[name][:, 8:]
        assert np.abs(late - expected).max() <= 1e-5 * np.abs(expected).max(), name


def test_every_smallest_tile_fits_every_architecture() -> None:
    from kernels_cuda.backward import backward_tiles, gradient_shared, local_shared

    for dtype in ("float16", "bfloat16", "float32"):
        for chunk in (16, 32, 64):
            for limit in SHARED_LIMIT.values():
                assert max(local_shared(dtype, chunk), gradient_shared(dtype, chunk)) <= limit
                for K in (64, 128, 256):
                    call = Forward(
                        dtype=dtype,
                        B=1,
                        T=64,
                        N=1,
                        H=1,
                        HV=1,
                        K=K,
                        V=256,
                        chunk=chunk,
                        scale=1.0,
                        q=0,
                        k=0,
                        v=0,
                        beta=0,
                    )
                    backward_tiles(call, limit, 132)


def test_unknown_name_to_keep_is_refused() -> None:
    call = Forward(dtype="bfloat16", B=1, T=1, N=1, H=1, HV=1, K=1, V=1, chunk=64, scale=1.0, q=0, k=0, v=0, beta=0)
    with pytest.raises(ValueError, match="keep names dQ; known: dU, dS"):
        backward(HOST, call, lambda *_: 0, do=0, keep=["dQ"])
