"""A test case: the knobs from which every input of one call is made.

A Case holds no arrays. `verikda.inputs.make_call` turns it into the arguments of one
call, bit-equal on every platform, so that a JSON file of a few lines reproduces a finding.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any

from verikda import case_rules
from verikda.case_rules import DTYPES, H0, LAYOUTS, TENSORS

__all__ = ["DTYPES", "H0", "LAYOUTS", "SCHEMA", "TENSORS", "Case", "parse_json"]

SCHEMA = 1
"""Version of the JSON form; raised when a field changes its meaning or its default."""

MAX_JSON = 1 << 20


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
    rule : "kda" | "delta" (no gate: every gate knob is left at its default).
    gate_regime, key_regime, query_regime, beta_regime, value_regime, do_regime : names in `verikda.regimes`.
    gate_magnitude : nats per token around which the gate regime draws, 0..1000.
    q_exponent, v_exponent, do_exponent : q; v and h0; do and dht are scaled by 2**exponent, -64..64.
    h0 : initial state.    dht : whether a gradient of the final state is given.
    final_state : whether the final state is asked for; a gradient of it needs it.
    scale : multiplies q; None is K**-0.5.
    gate_in_kernel : g is the raw gate; `lower_bound` None is the softplus gate, which needs A_log.
    lower_bound : of the bounded gate, in [-5, 0).
    A_log, dt_bias : whether they are given (gate_in_kernel only).
    qk_l2norm, beta_sigmoid, allow_neg_eigval, safe_gate, state_v_first, recompute : flags of the call.
        allow_neg_eigval doubles the sigmoid, so it needs beta_sigmoid. safe_gate promises g >= -5: with it the
        gate regimes draw nothing below -5, and a gate in the kernel must be the bounded one.
    layout : memory layout of the inputs.
    seed : 32-bit seed of every draw.
    overrides : up to 8 (tensor, flat index, value) written into the inputs last, then rounded to their dtype.

    Raises
    ------
    ValueError
        On construction, for the first fault found by `validate`.
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
    query_regime: str = "random"
    beta_regime: str = "random"
    value_regime: str = "random"
    do_regime: str = "random"
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
    final_state: bool = True
    layout: str = "contiguous"
    seed: int = 0
    overrides: tuple[tuple[str, int, float], ...] = ()

    def __post_init__(self) -> None:
        self.validate()

    @property
    def N(self) -> int:
        """Sequences, hence states."""
        return len(self.lengths)

    @property
    def B(self) -> int:
        """Batch rows: 1 for a pack."""
        return 1 if self.packed else len(self.lengths)

    @property
    def T(self) -> int:
        """Tokens of a batch row, tail padding included."""
        return sum(self.lengths) + self.tail_padding if self.packed else self.lengths[0]

    @property
    def HV(self) -> int:
        """Value heads."""
        return self.heads * self.groups

    @property
    def gate(self) -> str:
        """Form of the gate, as in `oracles.problem.Problem`: "none", "log", "softplus" or "bounded"."""
        if self.rule == "delta":
            return "none"
        if not self.gate_in_kernel:
            return "log"
        return "softplus" if self.lower_bound is None else "bounded"

    def dtype_of(self, tensor: str) -> str:
        """Dtype name of one of `TENSORS`."""
        if tensor in ("q", "k", "v", "do"):
            return self.dtype
        if tensor in ("g", "beta"):
            own = self.g_dtype if tensor == "g" else self.beta_dtype
            return self.dtype if own == "same" else own
        return "float32"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor argument that this case has, in the layout of `Problem`."""
        B, T, H, HV, K, V, N = self.B, self.T, self.heads, self.HV, self.K, self.V, self.N
        shapes: dict[str, tuple[int, ...]] = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V)}
        if self.rule == "kda":
            shapes["g"] = (B, T, HV, K)
        shapes["beta"] = (B, T, HV)
        if self.h0 != "none":
            shapes["h0"] = (N, HV, K, V)
        if self.A_log:
            shapes["A_log"] = (HV,)
        if self.dt_bias:
            shapes["dt_bias"] = (HV, K)
        shapes["do"] = (B, T, HV, V)
        if self.dht:
            shapes["dht"] = (N, HV, K, V)
        return shapes

    def validate(self) -> None:
        """Check every field and every combination.

        Raises
        ------
        ValueError
            One sentence: the field, the value seen, what is allowed, what to do.
        """
        case_rules.check(self)

    def to_dict(self) -> dict[str, Any]:
        """Strict-JSON form: "schema" and the fields that differ from their defaults; non-finite numbers are strings."""
        out: dict[str, Any] = {"schema": SCHEMA}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                out[f.name] = _plain(value)
        return out

    def to_json(self) -> str:
        """One line of strict JSON (RFC 8259); `from_json` gives an equal case back."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_dict(cls, data: object) -> Case:
        """Case from parsed JSON: only plain values are read, nothing is executed.

        Raises
        ------
        ValueError
            For another schema, unknown keys, or anything `validate` refuses.
        """
        if not isinstance(data, dict):
            raise ValueError(
                f"a case is a JSON object, not a {type(data).__name__}; write {{...}} with schema {SCHEMA}"
            )
        if data.get("schema") != SCHEMA or isinstance(data.get("schema"), bool):
            raise ValueError(
                f"schema is {data.get('schema')!r}, only {SCHEMA} is read here; use the verikda that wrote it"
            )
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known - {"schema"}, key=str)
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}; a case has only: {', '.join(sorted(known))}")
        return cls(**{name: _field(name, value) for name, value in data.items() if name != "schema"})

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Case from the text written by `to_json`.

        Raises
        ------
        ValueError
            For text over 1 MiB, text that is not strict JSON (NaN and Infinity literals and repeated keys
            included), and everything `from_dict` refuses.
        """
        return cls.from_dict(parse_json(text))


def parse_json(text: str) -> object:
    """Strict JSON of at most 1 MiB.

    Raises
    ------
    ValueError
        One sentence for size, syntax, NaN and Infinity literals, repeated keys and too deep nesting.
    """
    if len(text) > MAX_JSON:
        raise ValueError(f"the text has {len(text)} characters, at most {MAX_JSON} are read; is this a case file?")
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_int=_whole, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}; a case file holds one JSON object") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply; a case is one object with short lists") from None


def _refuse_constant(literal: str) -> float:
    raise ValueError(f"{literal} is not JSON; write non-finite numbers as the strings 'inf', '-inf' or 'nan'")


def _whole(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"a whole number has {len(digits)} digits; none in a case needs more than 20")
    return int(digits)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out: dict[str, object] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"key {key!r} is given twice; keep one of the two")
        out[key] = value
    return out


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _field(name: str, value: Any) -> Any:
    """Tuples and floats back from their JSON form; anything else is left for `validate` to judge."""
    if name == "lengths" and isinstance(value, list):
        return tuple(value)
    if name == "overrides" and isinstance(value, list):
        return tuple(tuple(_number(x) for x in item) if isinstance(item, list) else item for item in value)
    return value


def _number(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value
