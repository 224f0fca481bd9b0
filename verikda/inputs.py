"""From a case to the arguments of its call, equal bit for bit on every platform.

Everything is drawn in float64, rounded once to the dtype it travels in, and only then shared:
the references, the emulator and the target all see the same numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from oracles.problem import Array, Gate, Problem
from verikda import counter, exact, regimes
from verikda.call import Call
from verikda.case import Case
from verikda.draw import Draw
from verikda.dtypes import format_of, round_to

SAFE_GATE = -5.0
"""What safe_gate promises: no log decay below it."""


def make_call(case: Case, *, backward: bool = True, poison: float | None = None) -> Call:
    """The call that `case` describes.

    Parameters
    ----------
    case : the knobs.
    backward : whether gradients are wanted; without, do and dht are None.
    poison : passed on, see `Call`.

    Returns
    -------
    Call
        q, k, v, do in `case.dtype`; g, beta in their own; h0, dht, A_log, dt_bias in float32. All values are
        float64 numbers of those dtypes.

    Raises
    ------
    ValueError
        If a finite value is too large for its dtype (an exponent, a magnitude or an override).
    """
    arrays = {name: _round(case, name, x) for name, x in _draw(case).items() if backward or name not in ("do", "dht")}
    for name, index, value in case.overrides:
        if name in arrays:
            arrays[name].reshape(-1)[index] = _round(case, name, np.asarray(float(value)))
    offsets = np.cumsum([0, *case.lengths], dtype=np.int64) if case.packed else None
    gate: dict[str, Gate] = {"none": "none", "log": "log", "softplus": "softplus", "bounded": "bounded"}
    problem = Problem(
        q=arrays["q"],
        k=arrays["k"],
        v=arrays["v"],
        g=arrays.get("g"),
        beta=arrays["beta"],
        scale=case.scale if case.scale is not None else float(1.0 / np.sqrt(np.float64(case.K))),
        h0=arrays.get("h0"),
        cu_seqlens=offsets,
        gate=gate[case.gate],
        lower_bound=case.lower_bound,
        A_log=arrays.get("A_log"),
        dt_bias=arrays.get("dt_bias"),
        qk_l2norm=case.qk_l2norm,
        beta_sigmoid=case.beta_sigmoid,
        allow_neg_eigval=case.allow_neg_eigval,
        do=arrays.get("do"),
        dht=arrays.get("dht"),
    )
    dtypes = {name: case.dtype_of(name) for name in arrays}
    if offsets is not None:
        dtypes["cu_seqlens"] = case.offsets
    return Call(
        problem,
        dtypes,
        backward=backward,
        chunk_size=case.chunk_size,
        safe_gate=case.safe_gate,
        state_v_first=case.state_v_first,
        recompute=case.recompute,
        final_state=case.final_state,
        layout=case.layout,
        poison=poison,
    )


def _round(case: Case, name: str, x: Array) -> Array:
    dtype = case.dtype_of(name)
    y = round_to(x, dtype)
    if not np.isfinite(y).all() and bool((np.isinf(y) & np.isfinite(x)).any()):
        knob = {"q": "q_exponent", "v": "v_exponent", "h0": "v_exponent", "do": "do_exponent", "dht": "do_exponent"}
        raise ValueError(
            f"{name} reaches {float(np.abs(x[np.isfinite(x)]).max()):.3g}, but {dtype} ends at "
            f"{format_of(dtype).largest:.5g}; lower {knob.get(name, 'gate_magnitude')} or its override"
        )
    return y


def _draw(case: Case) -> dict[str, Array]:
    """Every tensor of the case in float64, not yet rounded, shaped as in `Case.shapes`."""
    H, HV, K, V = case.heads, case.HV, case.K, case.V
    t, length = _rows(case)

    def draw(name: str, heads: int, channels: int, *, magnitude: float = 1.0, key: Array | None = None) -> Draw:
        return Draw(case.seed, name, (case.B * case.T, heads, channels), t, length, magnitude, key)

    x: dict[str, Array] = {}
    k = regimes.KEYS[case.key_regime].draw(draw("k", H, K))
    q = regimes.QUERIES[case.query_regime].draw(draw("q", H, K, key=k))
    if case.qk_l2norm:
        # lengths that the operator must divide out, 1/4 to 16
        x["k"] = k * _lengths(draw("k", H, 1))
        q = q * _lengths(draw("q", H, 1))
    elif case.key_regime in _EXACT:
        x["k"] = k
    else:
        # below 1 by more than rounding can add: |k|^2 <= 1, so that beta <= 2 is stable
        x["k"] = k * (1.0 - 2.0 * format_of(case.dtype).unit_roundoff)
    x["q"] = np.ldexp(q, case.q_exponent)
    value_key = np.repeat(k, case.groups, axis=1)
    x["v"] = np.ldexp(regimes.VALUES[case.value_regime].draw(draw("v", HV, V, key=value_key)), case.v_exponent)
    x["do"] = np.ldexp(regimes.DOS[case.do_regime].draw(draw("do", HV, V)), case.do_exponent)
    beta = regimes.BETAS[case.beta_regime].draw(draw("beta", HV, 1))
    x["beta"] = raw_beta(beta, 2.0 if case.allow_neg_eigval else 1.0) if case.beta_sigmoid else beta
    if case.rule == "kda":
        g = regimes.GATES[case.gate_regime].draw(draw("g", HV, K, magnitude=case.gate_magnitude))
        x["g"] = np.maximum(g, SAFE_GATE) if case.safe_gate else g
        if case.gate_in_kernel:
            x |= _gate_parameters(case)
            x["g"] = raw_gate(x["g"], case.lower_bound, x.get("A_log"), x.get("dt_bias"))
    if case.layout == "expanded":
        # what a caller expands is equal along an axis: here the heads
        for name in ("q", "k", "v", "g", "beta", "do"):
            if name in x:
                x[name] = np.broadcast_to(x[name][:, :1], x[name].shape)
    states = (case.N, HV, K, V)
    if case.h0 != "none":
        size = {"zero": 0.0, "random": 0.5, "large": 32.0}[case.h0]
        x["h0"] = np.ldexp(size * counter.normal(case.seed, "h0", states), case.v_exponent)
    if case.dht:
        x["dht"] = np.ldexp(0.5 * counter.normal(case.seed, "dht", states), case.do_exponent)
    return {name: x[name].reshape(shape) for name, shape in case.shapes.items()}


_EXACT = ("orthogonal", "sparse_int")
"""Key regimes whose rows have length exactly 1 (or 0) in every dtype."""


def _rows(case: Case) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Position in its sequence and that sequence's length, for every row; rows of the tail are one more sequence."""
    lengths = [*case.lengths, case.tail_padding]
    t = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
    return t.reshape(-1, 1, 1), np.repeat(np.array(lengths, dtype=np.int64), lengths).reshape(-1, 1, 1)


def _lengths(d: Draw) -> Array:
    return np.ldexp(1.0 + d.uniform("length"), d.integers("length exponent", -2, 3).astype(np.int32))


def _gate_parameters(case: Case) -> dict[str, Array]:
    """A_log and dt_bias in float32 numbers, since the raw gate is drawn for exactly these."""
    HV, K = case.HV, case.K
    model = case.gate_regime == "model"
    out = {}
    if case.A_log:
        plain = 2 * counter.uniform(case.seed, "A_log", (1, HV))[0] - 1  # multipliers 1/e to e
        out["A_log"] = round_to(regimes.model_A_log(case.seed, HV) if model else plain, "float32")
    if case.dt_bias:
        plain = counter.normal(case.seed, "dt_bias", (1, HV, K))[0]
        out["dt_bias"] = round_to(regimes.model_dt_bias(case.seed, HV, K) if model else plain, "float32")
    return out


def raw_gate(g: Array, lower_bound: float | None, A_log: Array | None, dt_bias: Array | None) -> Array:
    """Raw gate whose decay is about `g`; where g is outside what the gate reaches, one that saturates it.

    Parameters
    ----------
    g : [rows,HV,K], <= 0. 0 gives a decay of exactly 1 in float64; at or below the bound, exactly the bound;
        -inf (softplus gate) a decay of exactly 0.
    lower_bound : of the bounded gate, None for the softplus gate.
    A_log : [HV] or None.    dt_bias : [HV,K] or None.
    """
    multiplier = np.ones((1, 1, 1)) if A_log is None else exact.exp(A_log).reshape(1, -1, 1)
    if lower_bound is None:
        s = np.minimum(-g / multiplier, 60000.0)
        x = np.where(s > 0, exact.softplus_inverse(np.where(s > 0, s, 1.0)), -1000.0)
    else:
        x = exact.logit(g / lower_bound) / multiplier
    return x if dt_bias is None else x - dt_bias


def raw_beta(beta: Array, top: float) -> Array:
    """Raw beta with top * sigmoid(raw) about `beta`; exactly 0 at 0 and exactly `top` at `top`, in float64."""
    return exact.logit(beta / top)
