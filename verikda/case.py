"""A test case: the knobs from which every input of one call is made.

A Case holds no arrays. `verikda.inputs.make_call` turns it into the arguments of one
call, bit-equal on every platform, so that a JSON file of a few lines reproduces a finding.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("float16", "bfloat16", "float32")
LAYOUTS = ("contiguous", "sliced", "strided", "expanded", "misaligned")
H0 = ("none", "zero", "random", "large")


@dataclass(frozen=True)
class Case:
    """Knobs of one call. Defaults are the simplest call, so that shrinking ends there.

    Attributes
    ----------
    lengths : tokens of each sequence; (12,) is one sequence. 0 is allowed in a pack.
    packed : True: B = 1 with cu_seqlens; False: B = len(lengths), all lengths equal.
    tail_padding : tokens after the last offset (packed only).
    heads, groups : H query/key heads; HV = heads * groups value heads.
    K, V : channels, 1..256.
    dtype : of q, k, v, o and their gradients.
    g_dtype, beta_dtype : "same" as `dtype`, or "float32".
    offsets : "int32" | "int64", dtype of cu_seqlens.
    chunk_size : asked for where the target takes it: 16, 32 or 64.
    rule : "kda" | "delta" (no gate).
    gate_regime, key_regime, beta_regime, value_regime : names in `verikda.regimes`.
    gate_magnitude : nats per token around which the gate regime draws (>= 0).
    q_exponent, v_exponent, do_exponent : inputs are scaled by 2**exponent.
    h0 : initial state.    dht : whether a gradient of the final state is given.
    scale : multiplies q; None is K**-0.5.
    gate_in_kernel : g is the raw gate; `lower_bound` None is the softplus gate.
    A_log, dt_bias : whether they are given (gate_in_kernel only).
    qk_l2norm, beta_sigmoid, allow_neg_eigval, safe_gate, state_v_first, recompute : flags of the call.
    layout : memory layout of the inputs.
    seed : 32-bit seed of every draw.
    overrides : up to 8 (tensor, flat index, value) written into the inputs last.
    """

    lengths: tuple[int, ...] = (1,)
    packed: bool = False
    tail_padding: int = 0
    heads: int = 1
    groups: int = 1
    K: int = 1
    V: int = 1
    dtype: str = "float32"
    g_dtype: str = "float32"
    beta_dtype: str = "float32"
    offsets: str = "int64"
    chunk_size: int = 64
    rule: str = "kda"
    gate_regime: str = "random"
    key_regime: str = "random"
    beta_regime: str = "random"
    value_regime: str = "random"
    gate_magnitude: float = 1.0
    q_exponent: int = 0
    v_exponent: int = 0
    do_exponent: int = 0
    h0: str = "none"
    dht: bool = False
    scale: float | None = None
    gate_in_kernel: bool = False
    lower_bound: float | None = None
    A_log: bool = False
    dt_bias: bool = False
    qk_l2norm: bool = False
    beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    state_v_first: bool = False
    recompute: bool = True
    layout: str = "contiguous"
    seed: int = 0
    overrides: tuple[tuple[str, int, float], ...] = ()
