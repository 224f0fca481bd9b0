"""What the public functions accept: one rule, one sentence with the value seen, what is allowed and what to do.

No value of an array on a GPU is read, so checking never waits for one. Offsets there are cut to [0, T] and made
non-decreasing on the device, so that wrong ones give wrong results and not a memory fault; where `cu_seqlens` or
`cu_seqlens_cpu` lies on the CPU its values are checked here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from kernels_cuda.forward import Forward
from verikda.dtypes import FORMATS
from verikda.ops.arrays import Arrays, arrays_of

FLOATS = ("float16", "bfloat16", "float32")
CHUNK_SIZES = (16, 32, 64)
MAX_CHANNELS = 256
LARGEST = FORMATS["float32"].largest


@dataclass(frozen=True)
class Checked:
    """One valid call.

    Attributes
    ----------
    arrays : library and device of every tensor.
    plan : the call as the launch plan takes it, without addresses.
    given : the tensors by their names in `Forward`; those left out are absent.
    chunks : how many chunks there are, None where only the GPU knows.
    """

    arrays: Arrays
    plan: Forward
    given: Mapping[str, Any]
    chunks: int | None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor argument or result called `name` ("do", "dht", "Aqk", "S", ...)."""
        rows = {"do": "o", "dht": "ht", "h0": "ht"}.get(name, name)
        return self.plan.rows(rows)


def check_call(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    gated: bool,
    scale: Any = None,
    initial_state: Any = None,
    use_qk_l2norm_in_kernel: Any = False,
    use_gate_in_kernel: Any = False,
    use_beta_sigmoid_in_kernel: Any = False,
    allow_neg_eigval: Any = False,
    safe_gate: Any = False,
    lower_bound: Any = None,
    state_v_first: Any = False,
    transpose_state_layout: Any = None,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    cp_context: Any = None,
    A_log: Any = None,
    dt_bias: Any = None,
    chunk_size: Any = 64,
    **switches: Any,
) -> Checked:
    """Check one call of a public function, under the names of its parameters.

    Parameters
    ----------
    gated : whether the rule has a decay; False ignores `g`.
    switches : further parameters that must be True or False.

    Raises
    ------
    TypeError
        For arguments of a wrong type, library, device or dtype.
    ValueError
        For shapes, values and combinations.
    """
    if cp_context is not None:
        raise ValueError(
            "cp_context is given, but context parallelism is not supported: run whole sequences on one device"
        )
    state_v_first = _order(state_v_first, transpose_state_layout)
    flags = {
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "allow_neg_eigval": allow_neg_eigval,
        "safe_gate": safe_gate, "state_v_first": state_v_first, **switches,
    }  # fmt: skip
    for name, value in flags.items():
        _switch(name, value)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval=True doubles the sigmoid of beta, but use_beta_sigmoid_in_kernel is False: set it too, "
            "or give beta in [0, 2] and leave allow_neg_eigval out"
        )
    if isinstance(chunk_size, bool) or chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size is {chunk_size!r}; use 16, 32 or 64")

    if gated and g is None:
        raise TypeError("g is None; pass the log decay [B,T,HV,K], or use chunk_delta_rule, which has none")
    arrays = arrays_of(q, "q")
    B, T, H, HV, K, V = _sizes(arrays, q, k, v, g if gated else None, beta)
    gate, bound = _gate(gated, use_gate_in_kernel, safe_gate, lower_bound, A_log, dt_bias)
    offsets, chunks = _offsets(arrays, cu_seqlens, cu_seqlens_cpu, B, T, int(chunk_size))
    plan = Forward(
        dtype=arrays.dtype(q), B=B, T=T, N=B if cu_seqlens is None else cu_seqlens.shape[0] - 1, H=H, HV=HV, K=K, V=V,
        chunk=int(chunk_size), scale=_scale(scale, K), q=0, k=0, v=0, beta=0,
        g_float32=not gated or arrays.dtype(g) == "float32", beta_float32=arrays.dtype(beta) == "float32",
        offsets_int64=offsets == "int64", gate=gate, lower_bound=bound, qk_l2norm=bool(use_qk_l2norm_in_kernel),
        beta_sigmoid=bool(use_beta_sigmoid_in_kernel), allow_neg_eigval=bool(allow_neg_eigval),
        state_v_first=bool(state_v_first),
    )  # fmt: skip
    given = {"q": q, "k": k, "v": v, "g": g if gated else None, "beta": beta, "A_log": A_log, "dt_bias": dt_bias,
             "h0": initial_state, "cu_seqlens": cu_seqlens}  # fmt: skip
    call = Checked(arrays, plan, {name: x for name, x in given.items() if x is not None}, chunks)
    for name, size in (("A_log", HV), ("dt_bias", HV * K)):
        if name in call.given:
            _parameter(arrays, name, call.given[name], size, "[HV]" if name == "A_log" else "[HV*K]")
    if initial_state is not None:
        check_state(call, "initial_state", initial_state)
    return call


def check_like(call: Checked, name: str, x: Any, shape: Sequence[int], layout: str, dtype: str | None = None) -> None:
    """Check a further tensor of a call, such as do or a saved intermediate.

    Parameters
    ----------
    layout : how messages write the shape, for example "[B,T,HV,V]".
    dtype : by default that of q.
    """
    wanted = call.plan.dtype if dtype is None else dtype
    _same_place(call.arrays, name, x)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {_show(x.shape)}; expected {layout} = {_show(shape)}")
    if call.arrays.dtype(x) != wanted:
        of = "as q" if dtype is None else "always"
        raise TypeError(f"{name} is {call.arrays.dtype(x)}; expected {wanted}, {of}: convert it first")


def check_state(call: Checked, name: str, x: Any) -> None:
    """Check initial_state or a gradient of final_state."""
    shape, order = call.shape("h0"), "V,K" if call.plan.state_v_first else "K,V"
    _same_place(call.arrays, name, x)
    seen = tuple(x.shape)
    if seen != shape:
        turned = len(seen) == 4 and (*seen[:2], seen[3], seen[2]) == shape
        advice = ": set state_v_first to the order that it has" if turned else ""
        raise ValueError(f"{name} has shape {_show(seen)}; expected [N,HV,{order}] = {_show(shape)}{advice}")
    if call.arrays.dtype(x) != "float32":
        raise TypeError(f"{name} is {call.arrays.dtype(x)}; states are float32: convert it first")


def _show(shape: Sequence[int]) -> str:
    return str([int(n) for n in shape])


def _order(state_v_first: Any, transpose_state_layout: Any) -> Any:
    if transpose_state_layout is None:
        return state_v_first
    _switch("transpose_state_layout", transpose_state_layout)
    if state_v_first:
        raise ValueError(
            "state_v_first and transpose_state_layout are both given, and the second is the older name of the first: "
            "keep state_v_first"
        )
    return transpose_state_layout


def _switch(name: str, value: Any) -> None:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}; use True or False")


def _same_place(arrays: Arrays, name: str, x: Any) -> None:
    own = arrays_of(x, name)
    if own.library != arrays.library:
        raise TypeError(f"{name} is a {own.library} array, but q is a {arrays.library} one; use one library")
    if own.place != arrays.place:
        raise TypeError(f"{name} is on {own.place}, but q is on {arrays.place}; move it there")


def _sizes(arrays: Arrays, q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[int, int, int, int, int, int]:
    """(B, T, H, HV, K, V) of tensors that agree in place, dtype and shape."""
    tensors = {"q": q, "k": k, "v": v, "beta": beta} | ({} if g is None else {"g": g})
    for name, x in tensors.items():
        _same_place(arrays, name, x)
    dtype = arrays.dtype(q)
    if dtype not in FLOATS:
        raise TypeError(f"q is {dtype}; use {', '.join(FLOATS)}")
    for name in ("k", "v"):
        if (seen := arrays.dtype(tensors[name])) != dtype:
            raise TypeError(f"{name} is {seen}, but q is {dtype}; q, k and v share one dtype: convert one of them")
    for name in ("beta", "g"):
        if name in tensors and (seen := arrays.dtype(tensors[name])) not in (dtype, "float32"):
            raise TypeError(f"{name} is {seen}; use float32 or {dtype}, the dtype of q: convert it first")
    for name, layout in (("q", "[B,T,H,K]"), ("v", "[B,T,HV,V]")):
        if len(tensors[name].shape) != 4:
            raise ValueError(f"{name} has shape {_show(tensors[name].shape)}; expected {layout}, four dimensions")
    B, T, H, K = (int(n) for n in q.shape)
    HV, V = int(v.shape[2]), int(v.shape[3])
    if tuple(k.shape) != tuple(q.shape):
        raise ValueError(f"k has shape {_show(k.shape)}, but q has {_show(q.shape)}; both are [B,T,H,K]")
    if tuple(v.shape[:2]) != (B, T):
        raise ValueError(f"v has shape {_show(v.shape)}, but q has B={B}, T={T}; v is [B,T,HV,V]")
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(
            f"v has {HV} heads and q has {H}; the heads of v must be a positive multiple of those of q, so that value "
            "head i reads key head i // (HV / H)"
        )
    for name, channels in (("q", K), ("v", V)):
        if not 1 <= channels <= MAX_CHANNELS:
            raise ValueError(
                f"{name} has {channels} channels per head; use 1 to {MAX_CHANNELS} (padding is done inside)"
            )
    if tuple(beta.shape) != (B, T, HV):
        advice = "; one beta per value channel is not supported" if len(beta.shape) == 4 else ""
        raise ValueError(f"beta has shape {_show(beta.shape)}; expected [B,T,HV] = {_show((B, T, HV))}{advice}")
    if g is not None and tuple(g.shape) != (B, T, HV, K):
        advice = ""
        if tuple(g.shape) == (B, T, HV):
            advice = "; for one decay per head expand it: g[..., None].expand(-1, -1, -1, K)"
        raise ValueError(f"g has shape {_show(g.shape)}; expected [B,T,HV,K] = {_show((B, T, HV, K))}{advice}")
    return B, T, H, HV, K, V


def _scale(scale: Any, K: int) -> float:
    if scale is None:
        return float(K**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"scale is {scale!r}; use a float, or None for K ** -0.5")
    if not -LARGEST <= scale <= LARGEST:  # type: ignore[operator]  # kernels take it in float32
        raise ValueError(f"scale is {scale}; use a finite number, or None for K ** -0.5")
    return float(scale)


def _gate(gated: bool, in_kernel: bool, safe: bool, lower_bound: Any, A_log: Any, dt_bias: Any) -> tuple[str, float]:
    """Form of the gate, and its bound (0 where there is none)."""
    bound = None
    if lower_bound is not None:
        if isinstance(lower_bound, bool) or not isinstance(lower_bound, Real):
            raise TypeError(f"lower_bound is {lower_bound!r}; use a negative float such as -5.0, or None")
        bound = float(lower_bound)
    if not gated:
        return "none", 0.0
    if not in_kernel:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise ValueError(
                    f"{name} is given, but use_gate_in_kernel is False and g is taken as the log decay: set "
                    f"use_gate_in_kernel=True, or leave {name} out"
                )
        if bound is not None and not safe:
            raise ValueError(
                f"lower_bound is {bound}, but use_gate_in_kernel is False and g is taken as it is: set "
                "use_gate_in_kernel=True, or leave lower_bound out"
            )
        return "log", 0.0
    if safe and (bound is None or not -5 <= bound < 0):
        raise ValueError(
            f"safe_gate with a gate in the kernel needs lower_bound in [-5, 0), but it is {bound}: use -5.0"
        )
    if bound is None:
        if A_log is None:
            raise ValueError(
                "A_log is None, but the gate -exp(A_log) softplus(g + dt_bias) needs it: pass A_log [HV], or a "
                "lower_bound for the bounded gate"
            )
        return "softplus", 0.0
    if not -math.inf < bound < 0:
        raise ValueError(f"lower_bound is {bound}; use a finite number < 0, as decays are, such as -5.0")
    return "bounded", bound


def _parameter(arrays: Arrays, name: str, x: Any, size: int, layout: str) -> None:
    _same_place(arrays, name, x)
    if math.prod(x.shape) != size:
        raise ValueError(f"{name} has shape {_show(x.shape)}; expected {layout}, {size} elements")
    if (seen := arrays.dtype(x)) not in FLOATS:
        raise TypeError(f"{name} is {seen}; use float32 (or another of {', '.join(FLOATS)})")


def _offsets(
    arrays: Arrays, cu_seqlens: Any, cu_seqlens_cpu: Any, B: int, T: int, chunk: int
) -> tuple[str, int | None]:
    """Dtype of the offsets, and the number of chunks where it can be known here."""
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ValueError("cu_seqlens_cpu is given without cu_seqlens, of which it is a copy: pass both or neither")
        return "", B * -(-T // chunk)
    _same_place(arrays, "cu_seqlens", cu_seqlens)
    dtype = _integers(arrays, "cu_seqlens", cu_seqlens)
    if B != 1:
        raise ValueError(f"cu_seqlens is given, but q has batch size {B}; packed sequences lie in one row, B = 1")
    host = _values("cu_seqlens", cu_seqlens, T) if arrays.backend == "host" else None
    if cu_seqlens_cpu is not None:
        own = arrays_of(cu_seqlens_cpu, "cu_seqlens_cpu")
        if own.backend != "host":
            raise TypeError(f"cu_seqlens_cpu is on {own.place}; it is the copy on the CPU: move it, or leave it out")
        _integers(own, "cu_seqlens_cpu", cu_seqlens_cpu)
        if tuple(cu_seqlens_cpu.shape) != tuple(cu_seqlens.shape):
            n, m = int(cu_seqlens_cpu.shape[0]), int(cu_seqlens.shape[0])
            raise ValueError(f"cu_seqlens_cpu has {n} offsets, but cu_seqlens has {m}; both hold the same ones")
        copy = _values("cu_seqlens_cpu", cu_seqlens_cpu, T)
        if host is not None and copy != host:
            raise ValueError(f"cu_seqlens_cpu is {_few(copy)}, but cu_seqlens is {_few(host)}; both hold the same ones")
        host = copy
    chunks = None if host is None else sum(-(-(b - a) // chunk) for a, b in pairwise(host))
    return dtype, chunks


def _integers(arrays: Arrays, name: str, x: Any) -> str:
    if (dtype := arrays.dtype(x)) not in ("int32", "int64"):
        raise TypeError(f"{name} is {dtype}; use int32 or int64")
    if len(x.shape) != 1 or x.shape[0] < 1:
        raise ValueError(f"{name} has shape {_show(x.shape)}; expected [N+1], the offsets of N sequences, from 0")
    return dtype


def _values(name: str, x: Any, T: int) -> list[int]:
    """The offsets, checked."""
    offsets: list[int] = x.tolist()
    if offsets[0] != 0:
        raise ValueError(f"{name} starts at {offsets[0]}; the first sequence starts at 0")
    for i, (a, b) in enumerate(pairwise(offsets)):
        if b < a:
            raise ValueError(f"{name}[{i + 1}] is {b}, after {a}; offsets never decrease")
    if offsets[-1] > T:
        raise ValueError(f"{name} ends at {offsets[-1]}, but q has T={T} tokens; the last offset is at most T")
    return offsets


def _few(offsets: list[int]) -> str:
    return str(offsets) if len(offsets) <= 8 else f"[{', '.join(map(str, offsets[:6]))}, ..., {offsets[-1]}]"
