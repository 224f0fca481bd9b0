"""The forward kernels on the host backend: against float64 under the noise floor, and in exact relations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from host_forward import run_forward

from kernels_cuda.forward import Forward, forward
from kernels_cuda.modules import Backend, load
from oracles.arithmetic import Exact, Stochastic
from oracles.chunked import emulate
from oracles.contract import Contract, chunked32, operands_tf32
from oracles.rounding import round_to, spacing
from verikda.call import Call
from verikda.case import Case
from verikda.floor import LIMIT, judge
from verikda.inputs import make_call

HOST = load("host")


def contract_of(case: Case) -> Contract:
    return chunked32(case.chunk_size) if case.dtype == "float32" else operands_tf32(case.dtype, case.chunk_size)


def run(backend: Backend = HOST, **knobs: Any) -> tuple[Call, dict[str, np.ndarray]]:
    call = make_call(Case(**knobs), backward=False)
    return call, run_forward(backend, call)


def judged(call: Call, out: dict[str, np.ndarray]) -> dict[str, float | None]:
    case_dtype = call.dtypes["q"]
    contract = chunked32(call.chunk_size) if case_dtype == "float32" else operands_tf32(case_dtype, call.chunk_size)
    judgement = judge(out, {"o": case_dtype, "ht": "float32"}, call.problem, contract, backward=False)
    assert judgement.verdict != "inconclusive", judgement.detail
    return {name: x.ratio for name, x in judgement.outputs.items()}


def assert_floor(call: Call, out: dict[str, np.ndarray]) -> None:
    ratios = judged(call, out)
    assert set(ratios) == {"o", "ht"}
    assert all(ratio is None or ratio <= LIMIT for ratio in ratios.values()), ratios


# Instances of the kernels worth running; the knobs around them vary so that every flag meets float64 somewhere.
CASES: list[dict[str, Any]] = [
    {"dtype": "bfloat16", "lengths": (150,), "K": 64, "V": 40, "h0": "random", "heads": 2},
    {"dtype": "bfloat16", "lengths": (129,), "K": 128, "V": 20, "gate_regime": "bound", "gate_magnitude": 5.0},
    {"dtype": "bfloat16", "lengths": (70,), "K": 256, "V": 17, "gate_regime": "one_slow"},
    {"dtype": "bfloat16", "lengths": (63, 0, 66, 1), "packed": True, "tail_padding": 5, "K": 33, "V": 1,
     "groups": 3, "h0": "random", "state_v_first": True, "offsets": "int32"},
    {"dtype": "bfloat16", "chunk_size": 32, "lengths": (49, 49), "K": 24, "V": 56, "groups": 2, "g_dtype": "same",
     "beta_dtype": "same", "gate_in_kernel": True, "A_log": True, "dt_bias": True, "qk_l2norm": True,
     "beta_sigmoid": True},
    {"dtype": "bfloat16", "chunk_size": 16, "lengths": (17, 31), "packed": True, "K": 7, "V": 9,
     "key_regime": "repeated", "beta_regime": "one", "gate_regime": "slow"},
    {"dtype": "float16", "lengths": (100,), "K": 48, "V": 24, "h0": "random", "gate_in_kernel": True,
     "lower_bound": -5.0, "A_log": True, "qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": True},
    {"dtype": "float16", "lengths": (130,), "K": 64, "V": 16, "rule": "delta", "heads": 2, "groups": 2,
     "key_regime": "collinear", "beta_regime": "near_one", "qk_l2norm": True},
    {"dtype": "bfloat16", "chunk_size": 32, "lengths": (97,), "K": 64, "V": 16, "rule": "delta", "scale": -0.75,
     "h0": "random"},
    {"dtype": "float32", "lengths": (90,), "K": 64, "V": 24, "h0": "random", "gate_regime": "mixed"},
    {"dtype": "float32", "chunk_size": 32, "lengths": (40, 0, 33), "packed": True, "K": 130, "V": 12,
     "gate_regime": "ragged"},
    {"dtype": "float32", "chunk_size": 16, "lengths": (35,), "K": 3, "V": 5, "rule": "delta",
     "beta_regime": "up_to_two"},
    {"dtype": "bfloat16", "lengths": (20,), "K": 256, "V": 256, "g_dtype": "same", "h0": "random"},
    {"dtype": "float32", "chunk_size": 16, "lengths": (18, 18), "K": 1, "V": 131, "gate_in_kernel": True, "A_log": True,
     "beta_sigmoid": True, "state_v_first": True, "h0": "random"},
    {"dtype": "float16", "chunk_size": 32, "lengths": (9, 40), "packed": True, "K": 17, "V": 2, "gate_in_kernel": True,
     "lower_bound": -1.0, "dt_bias": True, "g_dtype": "same", "beta_dtype": "same"},
    {"dtype": "float16", "chunk_size": 16, "lengths": (20, 3), "packed": True, "K": 6, "V": 70, "rule": "delta",
     "beta_dtype": "same", "state_v_first": True, "h0": "random"},
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
        ("model", "zero_rows", "zero_rows"),
    ],
)
def test_floor_over_regimes(dtype: str, gate: str, keys: str, beta: str) -> None:
    knobs: dict[str, Any] = {"lengths": (100,), "K": 64, "V": 24, "h0": "random", "gate_magnitude": 4.0, "seed": 5}
    assert_floor(*run(dtype=dtype, gate_regime=gate, key_regime=keys, beta_regime=beta, **knobs))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", ["kda", "delta"])
def test_intermediates(dtype: str, rule: str) -> None:
    """Each stored intermediate is within the noise of its contract, per sequence and head, and zero where masked."""
    case = Case(lengths=(100,), K=64, V=24, dtype=dtype, rule=rule, h0="random", heads=2)
    call = make_call(case, backward=False)
    names = ["Aqk", "A", "U", "W", "Kg", "Qg", "Vnew", "S", *(["Gamma"] if rule == "kda" else [])]
    found = run_forward(HOST, call, keep=names)
    inner = emulate(call.problem, contract_of(case), Exact(), backward=False, intermediates=True).intermediates
    noisy = emulate(
        call.problem, contract_of(case), Stochastic(np.random.default_rng(0), 8), backward=False, intermediates=True
    ).intermediates
    T, HV, C = 100, 2, 64
    for name in names:
        truth = inner[name][0]  # [HV, chunks, C, D]
        if name == "S":
            result = found[name].swapaxes(0, 1)
        else:
            rows = np.zeros((HV, 128, *found[name].shape[3:]))
            rows[:, :T] = found[name][0].swapaxes(0, 1)
            result = rows.reshape(HV, -1, C, *rows.shape[2:])
            if name in ("Aqk", "A"):
                assert (result == np.tril(result)).all(), f"{name} above the diagonal"
            padding = np.arange(128).reshape(-1, C) >= T
            truth = np.where(padding[None, :, :, None], 0.0, truth)
        if name == "Gamma":
            assert np.abs(result / np.log2(np.e) - truth).max() < 64 * 2.0**-23 * np.abs(truth).max()
            continue
        deviation = np.broadcast_to(noisy[name], (8, 1, *inner[name].shape[1:]))[:, 0] - inner[name][0]
        noise = (deviation**2).mean(0).sum((-1, -2, -3))
        error = ((result - truth) ** 2).sum((-1, -2, -3))
        assert (error <= LIMIT**2 * noise).all(), (name, np.sqrt(error / noise))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rule", ["kda", "delta"])
def test_prefix_is_unchanged_by_later_tokens(dtype: str, rule: str) -> None:
    """Bit for bit, at every length: an anchor that moves with the tail or lies ahead of a row would show."""
    call, full = run(lengths=(80,), K=64, V=24, dtype=dtype, rule=rule, gate_magnitude=3.0, h0="random")
    for T in (*range(1, 18), 31, 33, 40, 47, 48, 63, 64, 65, 79):
        p = call.problem
        cut = {name: getattr(p, name)[:, :T] for name in ("q", "k", "v", "beta")}
        shorter = replace(p, **cut, g=None if p.g is None else p.g[:, :T])
        out = run_forward(HOST, replace(call, problem=shorter))
        assert out["o"].tobytes() == full["o"][:, :T].tobytes(), f"T={T}"


def test_packed_is_separate() -> None:
    lengths = (63, 0, 64, 1, 17, 0)
    call, packed = run(
        lengths=lengths, packed=True, tail_padding=9, K=33, V=20, dtype="bfloat16", groups=2, h0="random"
    )
    p, begin = call.problem, 0
    assert p.h0 is not None
    assert p.g is not None
    for n, length in enumerate(lengths):
        end = begin + length
        if length == 0:
            assert (packed["ht"][n] == p.h0[n]).all()
            continue
        cut = {name: getattr(p, name)[:, begin:end] for name in ("q", "k", "v", "g", "beta")}
        out = run_forward(HOST, replace(call, problem=replace(p, **cut, h0=p.h0[n : n + 1], cu_seqlens=None)))
        assert out["o"].tobytes() == packed["o"][:, begin:end].tobytes()
        assert out["ht"][0].tobytes() == packed["ht"][n].tobytes()
        begin = end
    assert (packed["o"][:, begin:] == 0).all()


def test_empty_batch_passes_the_state_through() -> None:
    call, out = run(lengths=(0,), K=16, V=16, dtype="bfloat16", h0="random", packed=True)
    assert (out["ht"] == call.problem.h0).all()
    _, out = run(lengths=(0,), K=16, V=16, dtype="bfloat16", packed=True)
    assert (out["ht"] == 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_split_at_a_chunk_with_carried_state_is_one_pass(dtype: str) -> None:
    call, full = run(lengths=(150,), K=64, V=24, dtype=dtype, h0="random")
    p = call.problem
    assert p.g is not None
    halves = []
    h0 = p.h0
    for a, b in ((0, 64), (64, 150)):
        cut = {name: getattr(p, name)[:, a:b] for name in ("q", "k", "v", "g", "beta")}
        out = run_forward(HOST, replace(call, problem=replace(p, **cut, h0=h0)))
        h0 = out["ht"]
        halves.append(out["o"])
    assert np.concatenate(halves, 1).tobytes() == full["o"].tobytes()
    assert h0.tobytes() == full["ht"].tobytes()


ALL = ("Gamma", "Aqk", "A", "U", "W", "Kg", "Qg", "Vnew", "S", "qn", "kn", "beta")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_beta_multiplies_values_not_columns_of_A(dtype: str, gated: bool) -> None:
    """U = A (diag(beta) V) and W = A (diag(beta) exp Gamma * K) with the A that is returned, each factor rounded once.

    The backward takes A by itself. If the forward rounds A diag(beta) as one, U and W are products of another matrix
    than the one whose derivative is taken, by one error for a whole row.
    """
    kind = {"gate_in_kernel": True, "lower_bound": -1.0} if gated else {"rule": "delta"}
    case = Case(lengths=(64,), K=32, V=48, dtype=dtype, beta_sigmoid=True, key_regime="collinear", seed=4, **kind)
    call = make_call(case, backward=False)
    out = run_forward(HOST, call, keep=("A", "U", "W", "Gamma", "beta"))
    found = {name: x.astype(np.float64)[0, :, 0] for name, x in out.items() if name != "ht"}
    beta, k, v = found["beta"][:, None], call.problem.k[0, :, 0], call.problem.v[0, :, 0]
    decayed = k * np.exp2(found["Gamma"]) if gated else k
    for name, right in (("U", beta * v), ("W", beta * decayed)):
        exact, terms = found["A"] @ round_to(right, dtype), np.abs(found["A"]) @ np.abs(right)
        # 64 terms added in float, and 2^Gamma with |Gamma| up to 92, are within 1e-5 of their terms;
        # an operand within float's error of a tie may have gone the other way: one ulp of one term of the sum
        other = np.abs(found["A"]) @ np.where(_near_tie(right, dtype), spacing(right, dtype), 0.0)
        assert (np.abs(found[name] - exact) <= spacing(exact, dtype) / 2 + other + 1e-5 * terms).all()


def _near_tie(x: np.ndarray, dtype: str) -> np.ndarray:
    return round_to(x * (1 + 2e-6), dtype) != round_to(x * (1 - 2e-6), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_order_of_threads_copies_and_poison_change_nothing(dtype: str) -> None:
    call = make_call(
        Case(lengths=(70, 20), packed=True, K=64, V=24, dtype=dtype, h0="random", qk_l2norm=True), backward=False
    )
    first = run_forward(HOST, call, keep=ALL)
    for options in (
        {"order": "reverse"},
        {"order": "shuffled", "seed": 1, "late_copies": False},
        {"order": "shuffled", "seed": 2, "poison": 0x7F7F7F7F},
    ):
        other = run_forward(load("host", **options), call, keep=ALL)
        assert {n for n in first if first[n].tobytes() != other[n].tobytes()} == set(), options


@pytest.mark.parametrize(("dtype", "offset"), [("bfloat16", 2), ("bfloat16", 8), ("float32", 4)])
def test_misaligned_inputs_change_nothing(dtype: str, offset: int) -> None:
    call, aligned = run(lengths=(70,), K=64, V=24, dtype=dtype, h0="random", g_dtype="same", beta_dtype="same")
    types = {**call.dtypes, "h0": "float32"}
    moved = run_forward(HOST, replace(call, dtypes=types), offset=offset if dtype == "float32" else offset & ~3 or 4)
    assert moved["o"].tobytes() == aligned["o"].tobytes()


def test_ring_size_and_width_of_slices_change_nothing() -> None:
    call, usual = run(lengths=(150,), K=64, V=64, dtype="bfloat16", h0="random")
    seen = {usual["o"].tobytes() + usual["ht"].tobytes()}
    for limit, processors in ((70 * 1024, 132), (70 * 1024, 1), (99 * 1024, 2), (227 * 1024, 1)):
        out = run_forward(HOST, call, shared_limit=limit, processors=processors)
        seen.add(out["o"].tobytes() + out["ht"].tobytes())
    assert len(seen) == 1


def test_every_kept_intermediate_is_written() -> None:
    """Outputs start as NaN: none may be left, in rows after the last offset and chunks after the last one neither."""
    case = Case(lengths=(63, 0, 17), packed=True, tail_padding=9, K=20, V=12, dtype="float32", qk_l2norm=True)
    found = run_forward(HOST, make_call(case, backward=False), keep=ALL)
    assert set(found) == {*ALL, "o", "ht"}
    assert [name for name, x in found.items() if not np.isfinite(x).all()] == []
    assert all((found[name][:, 80:] == 0).all() for name in ALL if name != "S")


def test_hard_reset_forgets_everything_before() -> None:
    call, _ = run(lengths=(70,), K=64, V=24, dtype="bfloat16", h0="random", gate_magnitude=1.0)
    p = call.problem
    assert p.g is not None
    assert p.h0 is not None
    g = p.g.copy()
    g[:, 37] = -np.inf
    one = run_forward(HOST, replace(call, problem=replace(p, g=g)))
    v, h0 = p.v.copy(), p.h0 * -3
    v[:, :37] *= -2
    other = run_forward(HOST, replace(call, problem=replace(p, g=g, v=v, h0=h0)))
    assert np.isfinite(one["o"]).all()
    assert (one["o"][:, :37] != other["o"][:, :37]).any()
    assert one["o"][:, 37:].tobytes() == other["o"][:, 37:].tobytes()
    assert one["ht"].tobytes() == other["ht"].tobytes()


def test_bad_offsets_stay_inside_the_tensors() -> None:
    call = make_call(Case(lengths=(30, 20, 10), packed=True, K=16, V=16, dtype="bfloat16"), backward=False)
    for offsets in ([0, 50, 30, 60], [0, 30, 1000, 60], [-5, 30, 50, 60]):
        broken = replace(call.problem, cu_seqlens=np.array(offsets))
        run_forward(HOST, replace(call, problem=broken))  # the runner checks every byte around every buffer


def test_many_short_sequences() -> None:
    rng = np.random.default_rng(0)
    lengths = tuple(int(x) for x in rng.integers(0, 3, 600))
    assert_floor(*run(lengths=lengths, packed=True, K=4, V=4, dtype="bfloat16", chunk_size=16))


def test_refusals() -> None:
    """Before anything is allocated or launched."""

    def never(*_: Any) -> int:
        raise AssertionError("a buffer was asked for")

    call = Forward("float32", 1, 4, 1, 1, 1, 4, 4, 64, 1.0, q=1, k=1, v=1, beta=1)
    with pytest.raises(ValueError, match="keep names X; known"):
        forward(HOST, call, never, keep=("X",))
    with pytest.raises(ValueError, match="need 2147483648 blocks; at most"):
        forward(HOST, replace(call, T=2**31, HV=64), never)
    with pytest.raises(ValueError, match="needs more than 1024 bytes"):
        forward(HOST, call, never, shared_limit=1024)
