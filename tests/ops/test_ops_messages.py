"""Every refusal: its type, and a sentence with the value seen, what is allowed and what to do."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from verikda.ops import chunk_delta_rule, chunk_kda, chunk_kda_bwd, chunk_kda_fwd, recurrent_kda
from verikda.ops.validate import check_call

B, T, H, HV, K, V = 1, 6, 2, 4, 3, 5


def z(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


def valid(**changes: Any) -> dict[str, Any]:
    given = {"q": z(B, T, H, K), "k": z(B, T, H, K), "v": z(B, T, HV, V), "g": z(B, T, HV, K), "beta": z(B, T, HV)}
    return given | changes


def offsets(*values: int, dtype: Any = np.int64) -> Any:
    return np.array(values, dtype)


BF16 = ml_dtypes.bfloat16
IN_KERNEL = {"use_gate_in_kernel": True, "A_log": z(HV)}

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    # what is an array, and where it lies
    ({"q": [1.0]}, TypeError, r"q is a list; pass a torch tensor, a NumPy array or a CuPy array"),
    ({"k": 3}, TypeError, r"k is a int; pass a torch tensor"),
    ({"g": None}, TypeError, r"g is None; pass the log decay \[B,T,HV,K\], or use chunk_delta_rule, which has none"),
    # dtypes
    ({"q": z(B, T, H, K, dtype=np.float64)}, TypeError, r"q is float64; use float16, bfloat16, float32"),
    ({"q": z(B, T, H, K, dtype=np.int32)}, TypeError, r"q is int32; use float16, bfloat16, float32"),
    ({"q": z(B, T, H, K, dtype=">f4")}, TypeError, r"q is >f4; use float16, bfloat16, float32"),
    ({"k": z(B, T, H, K, dtype=BF16)}, TypeError, r"k is bfloat16, but q is float32; q, k and v share one dtype: "),
    ({"v": z(B, T, HV, V, dtype=np.float16)}, TypeError, r"v is float16, but q is float32; .*: convert one of them"),
    ({"g": z(B, T, HV, K, dtype=np.float16)}, TypeError, r"g is float16; use float32 or float32, the dtype of q: conv"),
    ({"beta": z(B, T, HV, dtype=np.float64)}, TypeError, r"beta is float64; use float32 or float32, the dtype of q: "),
    ({"initial_state": z(1, HV, K, V, dtype=BF16)}, TypeError, r"initial_state is bfloat16; states are float32: conve"),
    ({"cu_seqlens": z(2)}, TypeError, r"cu_seqlens is float32; use int32 or int64"),
    ({"cu_seqlens": [0, 6]}, TypeError, r"cu_seqlens is a list; pass a torch tensor"),
    ({**IN_KERNEL, "A_log": z(HV, dtype=np.float64)}, TypeError, r"A_log is float64; use float32 \(or another of floa"),
    ({**IN_KERNEL, "dt_bias": z(HV * K, dtype=int)}, TypeError, r"dt_bias is int64; use float32 \(or another of float"),
    # shapes
    ({"q": z(T, H, K)}, ValueError, r"q has shape \[6, 2, 3\]; expected \[B,T,H,K\], four dimensions"),
    ({"v": z(B, T, HV, V, 1)}, ValueError, r"v has shape \[1, 6, 4, 5, 1\]; expected \[B,T,HV,V\], four dimensions"),
    ({"k": z(B, T, H, K + 1)}, ValueError, r"k has shape \[1, 6, 2, 4\], but q has \[1, 6, 2, 3\]; both are \[B,T,H,K"),
    ({"v": z(B, T + 1, HV, V)}, ValueError, r"v has shape \[1, 7, 4, 5\], but q has B=1, T=6; v is \[B,T,HV,V\]"),
    ({"v": z(B, T, 3, V)}, ValueError, r"v has 3 heads and q has 2; the heads of v must be a positive multiple of th"),
    ({"q": z(B, T, 0, K), "k": z(B, T, 0, K)}, ValueError, r"v has 4 heads and q has 0; the heads of v must be"),
    ({"q": z(B, T, H, 257), "k": z(B, T, H, 257)}, ValueError, r"q has 257 channels per head; use 1 to 256 \(padding"),
    ({"q": z(B, T, H, 0), "k": z(B, T, H, 0)}, ValueError, r"q has 0 channels per head; use 1 to 256 \(padding is"),
    ({"v": z(B, T, HV, 300)}, ValueError, r"v has 300 channels per head; use 1 to 256"),
    ({"beta": z(B, T, H)}, ValueError, r"beta has shape \[1, 6, 2\]; expected \[B,T,HV\] = \[1, 6, 4\]$"),
    ({"beta": z(B, T, HV, V)}, ValueError, r"beta has shape .*; one beta per value channel is not supported"),
    ({"g": z(B, T, H, K)}, ValueError, r"g has shape \[1, 6, 2, 3\]; expected \[B,T,HV,K\] = \[1, 6, 4, 3\]$"),
    ({"g": z(B, T, HV)}, ValueError, r"g has shape .*; for one decay per head expand it: g\[\.\.\., None\]\.expand"),
    ({"initial_state": z(2, HV, K, V)}, ValueError, r"initial_state has shape \[2, 4, 3, 5\]; expected \[N,HV,K,V\]"),
    ({"initial_state": z(1, HV, V, K)}, ValueError, r"initial_state has .*: set state_v_first to the order that it"),
    ({"initial_state": z(1, HV, K, V), "state_v_first": True}, ValueError, r"initial_state .*; expected \[N,HV,V,K\]"),
    ({**IN_KERNEL, "A_log": z(H)}, ValueError, r"A_log has shape \[2\]; expected \[HV\], 4 elements"),
    ({**IN_KERNEL, "dt_bias": z(HV)}, ValueError, r"dt_bias has shape \[4\]; expected \[HV\*K\], 12 elements"),
    # offsets
    ({"cu_seqlens": z(2, 2, dtype=int)}, ValueError, r"cu_seqlens has shape \[2, 2\]; expected \[N\+1\], the offsets"),
    ({"cu_seqlens": z(0, dtype=int)}, ValueError, r"cu_seqlens has shape \[0\]; expected \[N\+1\], the offsets of N"),
    ({"cu_seqlens": offsets(1, 6)}, ValueError, r"cu_seqlens starts at 1; the first sequence starts at 0"),
    ({"cu_seqlens": offsets(0, 4, 2, 6)}, ValueError, r"cu_seqlens\[2\] is 2, after 4; offsets never decrease"),
    ({"cu_seqlens": offsets(0, 7, dtype=np.int32)}, ValueError, r"cu_seqlens ends at 7, but q has T=6 tokens; the las"),
    ({"cu_seqlens": offsets(0, 6), "cu_seqlens_cpu": offsets(0, 3, 6)}, ValueError, r"cu_seqlens_cpu has 3 offsets, "),
    ({"cu_seqlens": offsets(0, 6), "cu_seqlens_cpu": offsets(0, 5)}, ValueError, r"cu_seqlens_cpu is \[0, 5\], but cu"),
    ({"cu_seqlens": offsets(0, 6), "cu_seqlens_cpu": offsets(0, 9)}, ValueError, r"cu_seqlens_cpu ends at 9, but q h"),
    ({"cu_seqlens": offsets(0, 6), "cu_seqlens_cpu": z(2)}, TypeError, r"cu_seqlens_cpu is float32; use int32 or int"),
    ({"cu_seqlens_cpu": offsets(0, 6)}, ValueError, r"cu_seqlens_cpu is given without cu_seqlens, of which it is a c"),
    # numbers and switches
    ({"scale": "1"}, TypeError, r"scale is '1'; use a float, or None for K \*\* -0\.5"),
    ({"scale": True}, TypeError, r"scale is True; use a float"),
    ({"scale": 10**400}, ValueError, "scale is 10{400}; use a finite number"),
    ({"scale": -1e300}, ValueError, r"scale is -1e\+300; use a finite number"),
    ({"scale": math.nan}, ValueError, r"scale is nan; use a finite number, or None for K \*\* -0\.5"),
    ({"scale": -math.inf}, ValueError, r"scale is -inf; use a finite number"),
    ({"chunk_size": 48}, ValueError, r"chunk_size is 48; use 16, 32 or 64"),
    ({"chunk_size": 16.5}, ValueError, r"chunk_size is 16\.5; use 16, 32 or 64"),
    ({"chunk_size": True}, ValueError, r"chunk_size is True; use 16, 32 or 64"),
    ({"chunk_size": [64]}, ValueError, r"chunk_size is \[64\]; use 16, 32 or 64"),
    ({"output_final_state": 1}, TypeError, r"output_final_state is 1; use True or False"),
    ({"use_qk_l2norm_in_kernel": None}, TypeError, r"use_qk_l2norm_in_kernel is None; use True or False"),
    ({"disable_recompute": "no"}, TypeError, r"disable_recompute is 'no'; use True or False"),
    ({"return_intermediate_states": 0}, TypeError, r"return_intermediate_states is 0; use True or False"),
    ({"transpose_state_layout": 1}, TypeError, r"transpose_state_layout is 1; use True or False"),
    ({"lower_bound": "-5"}, TypeError, r"lower_bound is '-5'; use a negative float such as -5\.0, or None"),
    # combinations
    ({"allow_neg_eigval": True}, ValueError, r"allow_neg_eigval=True doubles the sigmoid of beta, but use_beta_sigmo"),
    ({"state_v_first": True, "transpose_state_layout": True}, ValueError, r"state_v_first and transpose_state_layout"),
    ({"cp_context": object()}, ValueError, r"cp_context is given, but context parallelism is not supported: run whol"),
    ({"A_log": z(HV)}, ValueError, r"A_log is given, but use_gate_in_kernel is False and g is taken as the log decay"),
    ({"dt_bias": z(HV * K)}, ValueError, r"dt_bias is given, but use_gate_in_kernel is False .*, or leave dt_bias ou"),
    ({"lower_bound": -5}, ValueError, r"lower_bound is -5\.0, but use_gate_in_kernel is False .* leave lower_bound o"),
    ({"use_gate_in_kernel": True}, ValueError, r"A_log is None, but the gate .* needs it: pass A_log \[HV\], or a low"),
    ({**IN_KERNEL, "lower_bound": 0.0}, ValueError, r"lower_bound is 0\.0; use a finite number < 0, as decays are, "),
    ({**IN_KERNEL, "lower_bound": -math.inf}, ValueError, r"lower_bound is -inf; use a finite number < 0"),
    ({**IN_KERNEL, "safe_gate": True}, ValueError, r"safe_gate with a gate in the kernel needs lower_bound in \[-5, 0"),
    ({**IN_KERNEL, "safe_gate": True, "lower_bound": -6.0}, ValueError, r"safe_gate .*, but it is -6\.0: use -5\.0"),
    # keywords that do not exist
    ({"headfirst": True}, TypeError, r"chunk_kda\(\) got an unexpected keyword argument 'headfirst'"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_refused(changes, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        chunk_kda(**valid(**changes))


def test_a_pack_lies_in_one_row():
    given = {n: np.repeat(x, 2, 0) for n, x in valid().items()}
    with pytest.raises(ValueError, match=r"^cu_seqlens is given, but q has batch size 2; packed sequences lie in one"):
        chunk_kda(**given, cu_seqlens=offsets(0, 6))


def accepted(**changes: Any) -> Any:
    given = valid(**changes)
    return check_call(gated=True, **given)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"safe_gate": True, "lower_bound": -5},  # a promise about g, as public callers write it
        {"safe_gate": True},
        {"scale": 0},
        {"scale": np.float32(-0.5)},
        {"chunk_size": np.int64(32)},
        {"g": z(B, T, HV, K, dtype=np.float32)},
        {"initial_state": z(1, HV, V, K), "transpose_state_layout": True},
        {"initial_state": z(3, HV, K, V), "cu_seqlens": offsets(0, 0, 2, 4, dtype=np.int32)},
        {"cu_seqlens": offsets(0, 2, 6), "cu_seqlens_cpu": offsets(0, 2, 6, dtype=np.int32)},
        {"cu_seqlens": offsets(0)},
        {"use_gate_in_kernel": True, "lower_bound": -20.0},
        {**IN_KERNEL, "A_log": z(1, 1, HV, 1), "dt_bias": z(HV, K, dtype=np.float16)},
        {"use_beta_sigmoid_in_kernel": np.bool_(True), "allow_neg_eigval": True},
    ],
)
def test_accepted(changes):
    call = accepted(**changes)
    assert call.plan.T == T
    assert call.plan.scale == (K**-0.5 if "scale" not in changes else changes["scale"])


def test_what_the_check_understood():
    call = accepted(cu_seqlens=offsets(0, 1, 1, 5, dtype=np.int32), chunk_size=16, use_gate_in_kernel=True,
                    lower_bound=-4, state_v_first=True, A_log=z(HV))  # fmt: skip
    plan = call.plan
    assert (plan.B, plan.T, plan.N, plan.H, plan.HV, plan.K, plan.V, plan.chunk) == (1, 6, 3, 2, 4, 3, 5, 16)
    assert (plan.gate, plan.lower_bound, plan.offsets_int64, plan.state_v_first) == ("bounded", -4.0, False, True)
    assert call.chunks == 2
    assert accepted().chunks == 1


LOW = {"q": z(B, T, H, K), "k": z(B, T, H, K), "v": z(B, T, HV, V), "beta": z(B, T, HV), "g_org": z(B, T, HV, K),
       "Aqk": z(B, T, HV, 16), "Akk": z(B, T, HV, 16), "do": z(B, T, HV, V), "chunk_size": 16}  # fmt: skip
KEPT = {"g": z(B, T, HV, K), "w": z(B, T, HV, K), "qg": z(B, T, HV, K), "kg": z(B, T, HV, K), "v_new": z(B, T, HV, V),
        "h": z(B, 1, HV, K, V), "disable_recompute": True}  # fmt: skip

REFUSED_BACKWARD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"g_org": None}, TypeError, r"g_org is None, but the reverse reads the g that chunk_kda_fwd was given .*as g_or"),
    ({"do": None}, ValueError, r"do and dht are both None, so every gradient is 0; pass at least one"),
    ({"do": z(B, T, H, V)}, ValueError, r"do has shape \[1, 6, 2, 5\]; expected \[B,T,HV,V\] = \[1, 6, 4, 5\]"),
    ({"do": z(B, T, HV, V, dtype=BF16)}, TypeError, r"do is bfloat16; expected float32, as q: convert it first"),
    ({"dht": z(1, HV, V, K)}, ValueError, r"dht has shape .* expected \[N,HV,K,V\].*: set state_v_first to the order"),
    ({"dht": z(1, HV, K, V, dtype=BF16)}, TypeError, r"dht is bfloat16; states are float32: convert it first"),
    ({"Aqk": z(B, T, HV, 64)}, ValueError, r"Aqk has shape \[1, 6, 4, 64\]; expected \[B,T,HV,chunk_size\] = \[1, 6,"),
    ({"Akk": None}, TypeError, r"Akk is a NoneType; pass a torch tensor, a NumPy array or a CuPy array"),
    ({"w": z(B, T, HV, K), "h": z(B, 1, HV, K, V)}, ValueError, r"w, h given, but disable_recompute is False: set it"),
    ({"disable_recompute": True}, TypeError, r"g, w, qg, kg, v_new, h missing, but disable_recompute is True: pass "),
    ({**KEPT, "g": z(B, T, HV, K, dtype=BF16)}, TypeError, r"g is bfloat16; expected float32, always: convert it fir"),
    ({**KEPT, "h": z(B, 2, HV, K, V)}, ValueError, r"h has shape \[1, 2, 4, 3, 5\]; expected \[B,NT,HV,K,V\] = \[1, 1"),
    ({**KEPT, "v_new": z(B, T, HV, K)}, ValueError, r"v_new has shape \[1, 6, 4, 3\]; expected \[B,T,HV,V\]"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), REFUSED_BACKWARD, ids=[r[2][:40] for r in REFUSED_BACKWARD])
def test_refused_by_the_backward(changes, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        chunk_kda_bwd(**{**LOW, **changes})


def test_other_functions_check_alike():
    given = valid(q=z(B, T, H, K + 1))
    for function in (chunk_kda_fwd, recurrent_kda):
        with pytest.raises(ValueError, match=r"^k has shape \[1, 6, 2, 3\], but q has \[1, 6, 2, 4\]"):
            function(**given)
    given.pop("g")
    with pytest.raises(ValueError, match=r"^k has shape"):
        chunk_delta_rule(**given)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'g'"):
        chunk_delta_rule(**valid())


def test_torch_tensors():
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")
    tensors = {n: torch.from_numpy(x) for n, x in valid().items()}
    rows = [
        ({"k": z(B, T, H, K)}, TypeError, r"k is a numpy array, but q is a torch one; use one library"),
        ({"g": tensors["g"].to("meta")}, TypeError, r"g is on device meta; kernels run on cuda and cpu tensors: move"),
        ({"beta": tensors["beta"].to_sparse()}, TypeError, r"beta is a torch.sparse_coo tensor; only strided ones are"),
        ({"q": tensors["q"].double()}, TypeError, r"q is float64; use float16, bfloat16, float32"),
        ({"q": tensors["q"].to(torch.complex64)}, TypeError, r"q is complex64; use float16, bfloat16, float32"),
        ({"cu_seqlens": torch.tensor([0, 6.0])}, TypeError, r"cu_seqlens is float32; use int32 or int64"),
    ]
    for changes, kind, message in rows:
        with pytest.raises(kind, match=f"^{message}"):
            chunk_kda(**{**tensors, **changes})


def test_no_compiler(monkeypatch):
    from kernels_cuda import host_build
    from kernels_cuda.host_build import CompileError
    from verikda.ops import engine

    monkeypatch.setattr(engine, "backend", engine.backend.__wrapped__)
    monkeypatch.setenv("CXX", "no-such-compiler")
    host_build.compiler.cache_clear()
    try:
        with pytest.raises(
            CompileError, match=r"needs a C\+\+17 compiler, and CXX=no-such-compiler is not .*; install"
        ):
            chunk_kda(**valid())
    finally:
        host_build.compiler.cache_clear()
