"""Named regimes: what inputs look like, and which public fault each of them is for.

Nearly every public fault of these kernels hid behind independent normal keys and mild gates. A regime
is a way of drawing one tensor; a `Case` names one per tensor. Faults are cited as in their trackers:
fla = fla-org/flash-linear-attention, cudnn = NVIDIA/cudnn-frontend, others by their repository's name.

Draws use only `verikda.counter` and `verikda.exact`, so they are equal bit for bit everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oracles.problem import Array
from verikda import counter, exact
from verikda.draw import Draw


@dataclass(frozen=True)
class Regime:
    """One way of drawing one tensor.

    Attributes
    ----------
    name : as in a `Case`.
    text : what it draws.
    draw : the values, float64 [rows,heads,channels].
    faults : public reports that inputs of this kind would have shown.
    stable : whether it stays in the stable domain: g <= 0 and beta |k|^2 <= 2 (with any beta regime).
    """

    name: str
    text: str
    draw: Callable[[Draw], Array]
    faults: tuple[str, ...] = ()
    stable: bool = True


GATES: dict[str, Regime] = {}
KEYS: dict[str, Regime] = {}
QUERIES: dict[str, Regime] = {}
BETAS: dict[str, Regime] = {}
VALUES: dict[str, Regime] = {}
DOS: dict[str, Regime] = {}

KINDS = {
    "gate_regime": GATES,
    "key_regime": KEYS,
    "query_regime": QUERIES,
    "beta_regime": BETAS,
    "value_regime": VALUES,
    "do_regime": DOS,
}
"""Table of each regime field of a `Case`."""


def _add(
    table: dict[str, Regime], name: str, *faults: str, stable: bool = True
) -> Callable[[Callable[[Draw], Array]], Callable[[Draw], Array]]:
    def register(draw: Callable[[Draw], Array]) -> Callable[[Draw], Array]:
        table[name] = Regime(name, " ".join((draw.__doc__ or "").split()), draw, faults, stable)
        return draw

    return register


def unit(x: Array) -> Array:
    """Rows of Euclidean length 1; a zero row becomes the first basis vector."""
    norm = np.sqrt(exact.tree_sum(x * x))
    first = np.zeros(x.shape[-1])
    first[0] = 1.0
    return np.where(norm > 0, x / np.where(norm > 0, norm, 1.0), first)


# ------------------------------------------------------------------ gates: log decay g, m = magnitude


def _slow(d: Draw) -> Array:
    return -d.magnitude * (0.001 + 0.019 * d.uniform("slow"))


def _fast(d: Draw) -> Array:
    return -d.magnitude * (0.5 + d.uniform("fast"))


@_add(GATES, "random", "tt-metal #54839")
def _gate_random(d: Draw) -> Array:
    """Independent, exponentially distributed around -m: many near 0, some several m."""
    return d.magnitude * exact.ln(d.uniform("g"))


@_add(GATES, "zero", "fla #104", "fla #389", "fla #862")
def _gate_zero(d: Draw) -> Array:
    """Exactly 0 everywhere: KDA is DeltaNet."""
    return d.full(0.0)


@_add(GATES, "bound", "cudnn #1017", "flash-linear-attention-npu #448", "TIRx-kernels #214", "attention-gym #394")
def _gate_bound(d: Draw) -> Array:
    """Exactly -m everywhere: the whole chunk pinned at the bound."""
    return d.full(-d.magnitude)


@_add(GATES, "slow", "FlashKDA #34", "cudnn #1051")
def _gate_slow(d: Draw) -> Array:
    """Between -0.001 m and -0.02 m: the state is kept for hundreds of tokens."""
    return _slow(d)


@_add(GATES, "one_slow", "cudnn #1017")
def _gate_one_slow(d: Draw) -> Array:
    """One slow channel in each head among fast ones: no row anchor suits both."""
    slow = d.channel == np.floor(d.uniform("which", "h") * d.shape[2])
    return np.where(slow, _slow(d), _fast(d))


@_add(GATES, "mixed", "cudnn #1017", "fla #1069")
def _gate_mixed(d: Draw) -> Array:
    """Even channels fast (0.5 m to 1.5 m), odd channels slow."""
    return np.where(d.channel % 2 == 0, _fast(d), _slow(d))


@_add(GATES, "spike", "fla #792", "tt-metal #54839", "executorch #21417")
def _gate_spike(d: Draw) -> Array:
    """Slow, but one row of every sequence at -30 m."""
    return np.where(d.one_row("where"), -30.0 * d.magnitude, _slow(d))


@_add(GATES, "reset", "executorch #21439", "fla #792")
def _gate_reset(d: Draw) -> Array:
    """One row of every sequence and one in 16 of the other elements at -inf, a hard reset; slow elsewhere."""
    return np.where(d.one_row("where") | (d.uniform("where else") < 1 / 16), -np.inf, _slow(d))


@_add(GATES, "ragged", "tt-metal #54839", "flashinfer #4311")
def _gate_ragged(d: Draw) -> Array:
    """Each row of a size of its own, 8 m down to m / 512."""
    exponent = d.integers("size", -9, 3, "r").astype(np.int32)
    return _fast(d) * np.ldexp(1.0, exponent)


@_add(GATES, "model", "attention-gym #370", "FlashKDA #3")
def _gate_model(d: Draw) -> Array:
    """As trained models start: -m A softplus(x + dt_bias), A in 1..16, softplus(dt_bias) in 0.001..0.1, x normal."""
    A = exact.exp(model_A_log(d.seed, d.shape[1]))[None, :, None]
    x = d.normal("x") + model_dt_bias(d.seed, d.shape[1], d.shape[2])
    return -d.magnitude * A * exact.softplus(x)


@_add(GATES, "heads", "fla #1115", "fla #1085", "fla #781")
def _gate_heads(d: Draw) -> Array:
    """Heads of very different decay: 4 m, m / 8, m / 256, repeating."""
    return _fast(d) * np.ldexp(4.0, -5 * (d.head % 3).astype(np.int32))


@_add(GATES, "last_row_strong", "fla #792", "cuLA #38", "flashinfer #4311")
def _gate_last_row_strong(d: Draw) -> Array:
    """Slow, but the last row of every sequence, hence of its tail chunk, at -16 m."""
    return np.where(d.last, -16.0 * d.magnitude, _slow(d))


@_add(GATES, "tiny_steps", "FlashKDA #34")
def _gate_tiny_steps(d: Draw) -> Array:
    """Exactly -m / 1024 everywhere: the smallest steps a cumulative sum must not lose."""
    return d.full(-d.magnitude / 1024)


@_add(GATES, "zero_rows", "fla #463", "fla #104")
def _gate_zero_rows(d: Draw) -> Array:
    """Half of the rows exactly 0, the others around -m."""
    return np.where(d.uniform("which", "r") < 0.5, 0.0, _fast(d))


@_add(GATES, "positive", "cuLA #89", stable=False)
def _gate_positive(d: Draw) -> Array:
    """Growth: between 0 and m. Outside the stable domain."""
    return d.magnitude * d.uniform("g")


# ------------------------------------------------------------------ keys (and queries), before rounding


@_add(KEYS, "random")
def _key_random(d: Draw) -> Array:
    """Normal, of length 1."""
    return unit(d.normal("x"))


@_add(KEYS, "collinear", "cudnn #1051", "tt-metal #54813", "vllm-project/FlashKDA #10")
def _key_collinear(d: Draw) -> Array:
    """One direction for each head, 1/32 off it."""
    return unit(unit(d.normal("base", "hc")) + d.normal("x") / 32)


@_add(KEYS, "repeated", "FlashKDA #34", "vllm-project/FlashKDA #10")
def _key_repeated(d: Draw) -> Array:
    """The same key in every row of a head: (I + L)^-1 has its largest entries."""
    return d.full(unit(d.normal("base", "hc")))


@_add(KEYS, "alternating", "tt-metal #54813")
def _key_alternating(d: Draw) -> Array:
    """One direction with the sign changing from row to row, 1/32 off it."""
    return unit(unit(d.normal("base", "hc")) + d.normal("x") / 32) * np.where(d.t % 2 == 0, 1.0, -1.0)


@_add(KEYS, "orthogonal")
def _key_orthogonal(d: Draw) -> Array:
    """Basis vectors in turn, exact: the state has a closed form."""
    return d.full(d.channel == (d.t + d.head) % d.shape[2])


@_add(KEYS, "sparse_int")
def _key_sparse_int(d: Draw) -> Array:
    """One entry of 1 or -1 in each row, at a random channel: with integer values all products are exact."""
    sign = 1.0 - 2.0 * d.integers("sign", 0, 1, "rh")
    return d.full((d.channel == np.floor(d.uniform("which", "rh") * d.shape[2])) * sign)


@_add(KEYS, "zero_rows", "maxtext #5295")
def _key_zero_rows(d: Draw) -> Array:
    """Normal, of length 1, but one row of every sequence and a quarter of the others exactly 0."""
    return np.where(d.some_rows("where"), 0.0, _key_random(d))


@_add(KEYS, "small", "flashinfer #5255")
def _key_small(d: Draw) -> Array:
    """Normal, of length 2^-10: its square is about the eps of the norm inside the operator."""
    return unit(d.normal("x")) / 1024


@_add(KEYS, "unnormalised", "fla #736", "flashinfer #5255", stable=False)
def _key_unnormalised(d: Draw) -> Array:
    """Normal, variance 1 in each channel: beta |k|^2 is about K / 2, stable only under the norm in the operator."""
    return d.normal("x")


@_add(QUERIES, "random")
def _query_random(d: Draw) -> Array:
    """Normal, of length 1."""
    return unit(d.normal("x"))


@_add(QUERIES, "keys")
def _query_keys(d: Draw) -> Array:
    """In the direction of the keys: o reads back what was just written."""
    assert d.key is not None
    return d.key.copy()


@_add(QUERIES, "zero")
def _query_zero(d: Draw) -> Array:
    """Exactly 0: o and every gradient that passes through it vanish."""
    return d.full(0.0)


@_add(QUERIES, "zero_rows", "maxtext #5295")
def _query_zero_rows(d: Draw) -> Array:
    """Normal, of length 1, but a quarter of the rows exactly 0."""
    return np.where(d.uniform("which", "r") < 0.25, 0.0, _query_random(d))


@_add(QUERIES, "ints")
def _query_ints(d: Draw) -> Array:
    """Integers from -2 to 2."""
    return d.integers("x", -2, 2).astype(np.float64)


@_add(QUERIES, "one_large_row", "tt-metal #54839")
def _query_one_large_row(d: Draw) -> Array:
    """Normal, of length 1, but one row of every sequence 64 times as long."""
    return np.where(d.one_row("where"), 64.0, 1.0) * _query_random(d)


# ------------------------------------------------------------------ beta, as the recurrence uses it


@_add(BETAS, "random")
def _beta_random(d: Draw) -> Array:
    """Uniform on (0, 1)."""
    return d.uniform("x")


@_add(BETAS, "one", "FlashKDA #34", "cudnn #1051")
def _beta_one(d: Draw) -> Array:
    """Exactly 1: the old value is replaced in full. A raw beta saturates its sigmoid."""
    return d.full(1.0)


@_add(BETAS, "zero", "fla #862")
def _beta_zero(d: Draw) -> Array:
    """Exactly 0: nothing is written; dbeta must not be formed by dividing by beta."""
    return d.full(0.0)


@_add(BETAS, "near_one", "FlashKDA #34")
def _beta_near_one(d: Draw) -> Array:
    """Between 1 - 1/64 and 1."""
    return 1.0 - d.uniform("x") / 64


@_add(BETAS, "tiny")
def _beta_tiny(d: Draw) -> Array:
    """Between 0 and 1/1024."""
    return d.uniform("x") / 1024


@_add(BETAS, "zero_rows", "transformers #46190")
def _beta_zero_rows(d: Draw) -> Array:
    """Uniform on (0, 1), but one row of every sequence and a quarter of the others exactly 0."""
    return np.where(d.some_rows("where"), 0.0, d.uniform("x"))


@_add(BETAS, "binary")
def _beta_binary(d: Draw) -> Array:
    """0 or 1: with integer keys and values all products are exact."""
    return d.integers("x", 0, 1).astype(np.float64)


@_add(BETAS, "up_to_two")
def _beta_up_to_two(d: Draw) -> Array:
    """Uniform on (0, 2): negative eigenvalues of the transition."""
    return 2.0 * d.uniform("x")


# ------------------------------------------------------------------ values


@_add(VALUES, "random")
def _value_random(d: Draw) -> Array:
    """Normal, variance 1."""
    return d.normal("x")


@_add(VALUES, "zero")
def _value_zero(d: Draw) -> Array:
    """Exactly 0: without an initial state every output is exactly 0."""
    return d.full(0.0)


@_add(VALUES, "ints")
def _value_ints(d: Draw) -> Array:
    """Integers from -4 to 4."""
    return d.integers("x", -4, 4).astype(np.float64)


@_add(VALUES, "constant")
def _value_constant(d: Draw) -> Array:
    """One row repeated: with repeated keys the residual v - S^T k cancels to nothing."""
    return d.full(d.normal("base", "hc"))


@_add(VALUES, "one_large_row", "tt-metal #54839")
def _value_one_large_row(d: Draw) -> Array:
    """Normal, but one row of every sequence 64 times as large."""
    return np.where(d.one_row("where"), 64.0, 1.0) * d.normal("x")


@_add(VALUES, "converged", "flash-linear-attention-npu #569")
def _value_converged(d: Draw) -> Array:
    """A fixed linear map of the key: the state learns it, and the residual v - S^T k cancels."""
    assert d.key is not None
    return d.key[:, :, d.channel[0, 0] % d.key.shape[2]] * d.normal("map", "hc")


# ------------------------------------------------------------------ do, the gradient of o


@_add(DOS, "random")
def _do_random(d: Draw) -> Array:
    """Normal, variance 1."""
    return d.normal("x")


@_add(DOS, "zero")
def _do_zero(d: Draw) -> Array:
    """Exactly 0: gradients come from the final state alone."""
    return d.full(0.0)


@_add(DOS, "ints")
def _do_ints(d: Draw) -> Array:
    """Integers from -2 to 2."""
    return d.integers("x", -2, 2).astype(np.float64)


@_add(DOS, "last_token_only", "huggingface/transformers #48455")
def _do_last(d: Draw) -> Array:
    """0 but for the last token of every sequence: gradients travel the whole way back."""
    return np.where(d.last, d.normal("x"), 0.0)


@_add(DOS, "first_token_only", "fla #1240")
def _do_first(d: Draw) -> Array:
    """0 but for the first token of every sequence: later tokens must get exactly 0."""
    return np.where(d.t == 0, d.normal("x"), 0.0)


@_add(DOS, "decades", "flash-linear-attention-npu #569")
def _do_decades(d: Draw) -> Array:
    """Falling along the sequence from 1 to 2^-20: a suffix sum formed as total minus prefix loses the end."""
    return d.normal("x") * np.ldexp(1.0, -((20 * d.t) // np.maximum(d.length, 1)).astype(np.int32))


# ------------------------------------------------------------------ what trained models start from


def model_A_log(seed: int, heads: int) -> Array:
    """Logarithms of A uniform on (1, 16), [heads]."""
    return exact.ln(1.0 + 15.0 * counter.uniform(seed, "A_log.model", (1, heads))[0])


def model_dt_bias(seed: int, heads: int, channels: int) -> Array:
    """The x with softplus(x) log-uniform on (0.001, 0.1), [heads,channels]."""
    u = counter.uniform(seed, "dt_bias.model", (1, heads, channels))[0]
    return exact.softplus_inverse(
        exact.exp(np.asarray(-6.907755278982137 + 4.605170185988092 * u))
    )  # ln 0.001 + u ln 100
