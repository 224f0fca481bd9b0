"""Which values each knob of a `Case` may take, given the knobs chosen before it.

One table serves the random search and the stratified start: both fill in the knobs in the order of
`OPTIONS`, so that every case is valid by construction and nothing has to be drawn and thrown away.
Options stand simplest first, because that is where shrinking goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

from verikda import regimes
from verikda.call import Capabilities
from verikda.case import H0, LAYOUTS, Case

Options = tuple[Any, ...]
Fixed = Mapping[str, Options]


@dataclass(frozen=True)
class Limits:
    """How large and how wild cases may be.

    Attributes
    ----------
    max_tokens : tokens of all sequences together.
    max_channels : of K and of V, besides what the target supports.
    max_heads : value heads.
    max_state : HV * K * V, which is what a token costs.
    unstable : also draw regimes outside the stable domain.
    """

    max_tokens: int = 160
    max_channels: int = 64
    max_heads: int = 4
    max_state: int = 8192
    unstable: bool = False


_CHANNELS = (1, 2, 3, 8, 15, 16, 17, 24, 32, 33, 64, 100, 128, 192, 256)


def _first(wanted: Iterable[Any], supported: Iterable[Any]) -> Options:
    have = tuple(supported)
    return tuple(x for x in wanted if x in have)


def _if(condition: object, *options: Any) -> Options:
    """First option always; the others only under `condition`."""
    return options if condition else options[:1]


def _gate_forms(x: SimpleNamespace, c: Capabilities) -> Options:
    inside = x.rule == "kda" and ("softplus" in c.gates or "bounded" in c.gates)
    outside = x.rule == "delta" or "log" in c.gates
    return (False,) * outside + (True,) * inside


def _lower_bounds(x: SimpleNamespace, c: Capabilities) -> Options:
    if not x.gate_in_kernel:
        return (None,)
    return (None,) * ("softplus" in c.gates) + (-5.0, -1.0, -0.25) * ("bounded" in c.gates)


def _scale_of_gate(x: SimpleNamespace) -> Options:
    if x.gate_in_kernel and x.lower_bound is None:
        return (True,)
    return _if(x.gate_in_kernel, False, True)


def _gate_regimes(x: SimpleNamespace, c: Capabilities, m: Limits) -> Options:
    if x.rule == "delta":
        return ("random",)
    names = [name for name, r in regimes.GATES.items() if r.stable or (m.unstable and not x.gate_in_kernel)]
    if not c.hard_reset or x.safe_gate or x.lower_bound is not None:
        names.remove("reset")
    return tuple(names)


def _magnitudes(x: SimpleNamespace) -> Options:
    """Around every threshold reported: 5 (the bound), 5.545 and 5.914 (16-row anchors), 11.09 (8-row anchors), 50."""
    if x.rule == "delta" or x.gate_regime == "zero":
        return (1.0,)
    if x.safe_gate or x.lower_bound is not None:
        return (1.0, 0.0625, 4.99, 5.0)
    return (1.0, 0.0625, 0.25, 4.99, 5.0, 6.0, 12.0, 50.0)


def _informative(names: Iterable[str], silent: str, heard: bool) -> Options:
    """Without `silent`, a regime after which nothing would be left to compare, unless something else is `heard`."""
    return tuple(name for name in names if heard or name != silent)


def _channels(limit: int, room: int) -> Options:
    return tuple(n for n in _CHANNELS if n <= min(limit, max(room, 1)))


def length_classes(x: SimpleNamespace, c: Capabilities, m: Limits) -> dict[str, tuple[int, ...]]:
    """Named lengths around the borders of chunks and of 16-row blocks, within the budget of tokens."""
    C = x.chunk_size
    near = {"C-1": C - 1, "C": C, "C+1": C + 1, "2C-1": 2 * C - 1, "2C": 2 * C, "2C+1": 2 * C + 1, "2C+3": 2 * C + 3}
    if not x.packed:
        single: dict[str, int] = {str(n): n for n in (1, 2, 3, 15, 16, 17, 31, 40, 100)} | near
        classes: dict[str, tuple[int, ...]] = {name: (n,) for name, n in single.items()}
        classes |= {f"2 x {name}": (n, n) for name, n in single.items() if name in ("1", "17", "C", "C+1")}
    else:
        classes = {
            "pack of one": (C + 1,),
            "pack around 16": (15, 16, 17),
            "pack around C": (C - 1, C, C + 1),
            "pack C then 1": (C, 1),
            "pack 1 then 2C+1": (1, 2 * C + 1),
            "pack empty first": (0, C + 1),
            "pack empty last": (17, 0),
            "pack inner empties": (5, 0, 0, C),
            "pack only empties": (0, 0),
            "pack many tiny": (1, 2, 1, 3, 1, 1, 2, 3) * 4,
            "pack tiny with empties": (1, 0, 2, 0, 0, 3, 1, 0) * 4,
            "pack 1": (1,),
        }
    return {name: n for name, n in classes.items() if sum(n) <= m.max_tokens and (c.empty or 0 not in n)}


OPTIONS: dict[str, Callable[[Any, Capabilities, Limits], Options]] = {
    "rule": lambda x, c, m: _first(("kda", "kda", "kda", "delta"), c.rules),
    "dtype": lambda x, c, m: _first(("float32", "bfloat16", "float16"), c.dtypes),
    "g_dtype": lambda x, c, m: _first(("float32", "same"), c.g_dtypes) if x.rule == "kda" else ("float32",),
    "beta_dtype": lambda x, c, m: _first(("float32", "same"), c.beta_dtypes),
    "chunk_size": lambda x, c, m: _first((64, 32, 16), c.chunk_sizes),
    "gate_in_kernel": lambda x, c, m: _gate_forms(x, c),
    "lower_bound": lambda x, c, m: _lower_bounds(x, c),
    "A_log": lambda x, c, m: _scale_of_gate(x),
    "dt_bias": lambda x, c, m: _if(x.gate_in_kernel, False, True),
    "safe_gate": lambda x, c, m: _if(
        c.safe_gate and x.rule == "kda" and (not x.gate_in_kernel or x.lower_bound is not None), False, True
    ),
    "gate_regime": _gate_regimes,
    "gate_magnitude": lambda x, c, m: _magnitudes(x),
    "qk_l2norm": lambda x, c, m: _if(c.qk_l2norm, False, True),
    "beta_sigmoid": lambda x, c, m: _if(c.beta_sigmoid, False, True),
    "allow_neg_eigval": lambda x, c, m: _if(c.allow_neg_eigval and x.beta_sigmoid, False, True),
    "heads": lambda x, c, m: tuple(n for n in (1, 2, 3, 4) if n <= m.max_heads),
    "groups": lambda x, c, m: _if(c.grouped, *(n for n in (1, 2, 3) if x.heads * n <= m.max_heads or n == 1)),
    "K": lambda x, c, m: _channels(min(c.max_k, m.max_channels), m.max_state // (x.heads * x.groups)),
    "V": lambda x, c, m: _channels(min(c.max_v, m.max_channels), m.max_state // (x.heads * x.groups * x.K)),
    "packed": lambda x, c, m: _if(c.packed, False, True),
    "lengths": lambda x, c, m: tuple(length_classes(x, c, m).values()),
    "tail_padding": lambda x, c, m: _if(x.packed and c.tail_padding, 0, 1, 19),
    "offsets": lambda x, c, m: _if(x.packed, "int64", "int32"),
    "h0": lambda x, c, m: _if(c.initial_state, *H0),
    "dht": lambda x, c, m: _if(c.dht and c.backward, False, True),
    "key_regime": lambda x, c, m: tuple(
        name for name, r in regimes.KEYS.items() if r.stable or x.qk_l2norm or m.unstable
    ),
    "query_regime": lambda x, c, m: _informative(regimes.QUERIES, "zero", x.dht),
    "beta_regime": lambda x, c, m: tuple(
        name
        for name in _informative(regimes.BETAS, "zero", x.h0 in ("random", "large"))
        if name != "up_to_two" or x.allow_neg_eigval or not x.beta_sigmoid
    ),
    "value_regime": lambda x, c, m: _informative(regimes.VALUES, "zero", x.h0 in ("random", "large")),
    "do_regime": lambda x, c, m: _informative(regimes.DOS, "zero", x.dht) if c.backward else ("random",),
    "scale": lambda x, c, m: _if(c.scale, None, 1.0, 0.125),
    "q_exponent": lambda x, c, m: (0, -4) if x.dtype == "float16" else (0, -4, 6),
    "v_exponent": lambda x, c, m: (0, -6, 4) if x.dtype == "float16" else (0, -6, 10),
    "do_exponent": lambda x, c, m: (0, -6, 3) if x.dtype == "float16" else (0, -10, 6),
    "state_v_first": lambda x, c, m: _if(c.state_v_first, False, True),
    "recompute": lambda x, c, m: _if(c.recompute, True, False),
    "layout": lambda x, c, m: tuple(
        name for name in _first(LAYOUTS, c.layouts) if name != "expanded" or x.heads * x.groups > 1
    ),
    "seed": lambda x, c, m: tuple(range(1 << 16)),
    "overrides": lambda x, c, m: ((),),
}
"""Options of each knob, in the order in which knobs are chosen: (knobs so far, capabilities, limits) -> options.

Options that stand more than once are drawn more often.
"""

OPEN = (
    *("heads", "groups", "K", "V", "lengths", "tail_padding", "gate_magnitude", "lower_bound", "scale"),
    *("q_exponent", "v_exponent", "do_exponent", "seed", "overrides"),
)
"""Knobs that may be fixed to values which are not among their options."""


def options(name: str, known: Mapping[str, Any], c: Capabilities, m: Limits, fixed: Fixed) -> Options:
    """What knob `name` may be after the knobs in `known`.

    Raises
    ------
    ValueError
        If nothing is left.
    """
    legal = OPTIONS[name](SimpleNamespace(**known), c, m)
    if name in fixed:
        wanted = fixed[name]
        legal = wanted if name in OPEN else tuple(x for x in wanted if x in legal)
    if not legal:
        wanted_text = f"{name}={list(fixed[name])}" if name in fixed else f"any {name}"
        raise ValueError(
            f"no case has {wanted_text} with these capabilities and {dict(known)!r}; fix fewer knobs or other values"
        )
    return legal


def fix(knobs: Mapping[str, Any]) -> Fixed:
    """Allowed values of each fixed knob, with what these need: safe_gate=True needs rule "kda", and so on.

    Parameters
    ----------
    knobs : field of `Case` -> one value, or a list of values. Tuples are values (lengths, overrides).

    Raises
    ------
    ValueError
        For names that are no knobs.
    """
    unknown = sorted(set(knobs) - set(OPTIONS))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no knob of a case; the knobs are {', '.join(OPTIONS)}")
    fixed = {name: tuple(value) if isinstance(value, list) else (value,) for name, value in knobs.items()}
    for name, values in list(fixed.items()):
        needs = [_needs(name, value) for value in values]
        for other in needs[0] if needs else ():
            if all(other in n for n in needs):
                fixed.setdefault(other, tuple(dict.fromkeys(n[other] for n in needs)))
    return fixed


_DEFAULTS = {f.name: f.default for f in fields(Case)}


def _needs(name: str, value: Any) -> dict[str, Any]:
    """Other knobs that must have one certain value when knob `name` has `value`."""
    if name == "lengths":
        return {"packed": True} if len(set(value)) > 1 or 0 in value else {}
    if value == _DEFAULTS[name]:
        return {}
    if name == "gate_regime" and value == "reset":
        return {"rule": "kda", "safe_gate": False, "lower_bound": None}
    if name == "gate_regime" and value == "positive":
        return {"rule": "kda", "gate_in_kernel": False}
    if name in ("gate_regime", "gate_magnitude", "g_dtype", "safe_gate", "gate_in_kernel"):
        return {"rule": "kda"}
    if name in ("A_log", "dt_bias", "lower_bound"):
        return {"rule": "kda", "gate_in_kernel": True}
    if name == "allow_neg_eigval":
        return {"beta_sigmoid": True}
    if name in ("tail_padding", "offsets"):
        return {"packed": True}
    return {}


def override_values(case: Case, tensor: str) -> tuple[float, ...]:
    """Numbers worth writing into one element of `tensor` that leave a stable case stable."""
    if tensor == "k" and not case.qk_l2norm:
        return (0.0,)
    if tensor == "beta":
        return (0.0, 30.0, -30.0) if case.beta_sigmoid else (0.0, 1.0, 0.5, 2.0**-20)
    if tensor == "g" and case.gate == "log":
        reset = () if case.safe_gate or case.gate_regime != "reset" else (-math.inf,)
        return (0.0, -1.0, -5.0, -(2.0**-16), *((-30.0,) if not case.safe_gate else ()), *reset)
    if tensor == "g":
        return (0.0, 30.0, -30.0)
    if tensor in ("A_log", "dt_bias"):
        return (0.0, 1.0, -3.0, 2.5)
    return (0.0, 1.0, -1.0, 64.0, 2.0**-14)
