"""Which values each knob of a `Case` may take, given the knobs chosen before it.

One table serves the random search and the stratified start: both fill in the knobs in the order of
`OPTIONS`, so that every case is valid by construction and nothing has to be drawn and thrown away.
Options stand simplest first, because that is where shrinking goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from verikda import regimes
from verikda.call import Capabilities
from verikda.case import H0, LAYOUTS, Case

Options = tuple[Any, ...]


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

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_channels", "max_heads", "max_state"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but it must be at least 1; allow a little more")


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


def _layouts(x: SimpleNamespace, c: Capabilities) -> Options:
    """Expanded inputs are equal along the heads, so there must be several, unless the target takes nothing else."""
    some = tuple(name for name in _first(LAYOUTS, c.layouts) if name != "expanded" or x.heads * x.groups > 1)
    return some or _first(LAYOUTS, c.layouts)


def _informative(names: Iterable[str], silent: str, heard: bool) -> Options:
    """Without `silent`, a regime after which nothing would be left to compare, unless something else is `heard`."""
    return tuple(name for name in names if heard or name != silent)


def _flag(name: str, c: Capabilities) -> Options:
    """A flag of the operator; True alone where every call must have it."""
    return (True,) if name in c.required else _if(getattr(c, name), False, True)


def _final_state(x: SimpleNamespace, c: Capabilities) -> Options:
    """Asked for where its gradient is given.

    As many options there as elsewhere: to Hypothesis a case is simpler if less had to be drawn for it.
    """
    return _if(c.initial_state or c.dht, True, x.dht)


def _channels(sizes: Options, limit: int, room: int) -> Options:
    """The few sizes that the target takes, whatever the limits; otherwise those that fit."""
    return sizes or tuple(n for n in _CHANNELS if n <= min(limit, max(room, 1)))


def length_classes(x: SimpleNamespace, c: Capabilities, m: Limits) -> dict[str, tuple[int, ...]]:
    """Named lengths around the borders of chunks and of 16-row blocks, within the budget of tokens."""
    C = x.chunk_size
    near = {"C-1": C - 1, "C": C, "C+1": C + 1, "2C-1": 2 * C - 1, "2C": 2 * C, "2C+1": 2 * C + 1, "2C+3": 2 * C + 3}
    if not x.packed:
        single: dict[str, int] = {str(n): n for n in (1, 2, 3, 15, 16, 17, 31, 40, 100)} | near
        classes: dict[str, tuple[int, ...]] = {name: (n,) for name, n in single.items()}
        classes |= {f"2 x {name}": (n, n) for name, n in single.items() if name in ("1", "17", "C-1", "C", "C+1")}
        classes |= {f"3 x {name}": (n, n, n) for name, n in single.items() if name in ("16", "40")}
    else:
        classes = {
            "pack 1": (1,),
            "pack two": (1, 3),
            "pack C+1": (C + 1,),
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
        }
    return {name: n for name, n in classes.items() if sum(n) <= m.max_tokens and (c.empty or 0 not in n)}


OPTIONS: dict[str, Callable[[Any, Capabilities, Limits], Options]] = {
    "rule": lambda x, c, m: tuple(
        r for r in ("kda", "kda", "kda", "delta") if r in c.rules and (r == "delta" or c.gates)
    ),
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
    "qk_l2norm": lambda x, c, m: _flag("qk_l2norm", c),
    "beta_sigmoid": lambda x, c, m: _flag("beta_sigmoid", c),
    "allow_neg_eigval": lambda x, c, m: _if(c.allow_neg_eigval and x.beta_sigmoid, False, True),
    "heads": lambda x, c, m: tuple(n for n in (1, 2, 3, 4) if n <= m.max_heads),
    "groups": lambda x, c, m: _if(c.grouped, *(n for n in (1, 2, 3) if x.heads * n <= m.max_heads or n == 1)),
    "K": lambda x, c, m: _channels(c.k_sizes, min(c.max_k, m.max_channels), m.max_state // (x.heads * x.groups)),
    "V": lambda x, c, m: _channels(c.v_sizes, min(c.max_v, m.max_channels), m.max_state // (x.heads * x.groups * x.K)),
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
        if name != "up_to_two" or (c.beta_above_one and (x.allow_neg_eigval or not x.beta_sigmoid))
    ),
    "value_regime": lambda x, c, m: _informative(regimes.VALUES, "zero", x.h0 in ("random", "large")),
    "do_regime": lambda x, c, m: _informative(regimes.DOS, "zero", x.dht) if c.backward else ("random",),
    "scale": lambda x, c, m: _if(c.scale, None, 1.0, 0.125),
    "final_state": lambda x, c, m: _final_state(x, c),
    "q_exponent": lambda x, c, m: (0, -4) if x.dtype == "float16" else (0, -4, 6),
    "v_exponent": lambda x, c, m: (0, -6, 4) if x.dtype == "float16" else (0, -6, 10),
    "do_exponent": lambda x, c, m: (0, -6, 3) if x.dtype == "float16" else (0, -10, 6),
    "state_v_first": lambda x, c, m: _if(c.state_v_first, False, True),
    "recompute": lambda x, c, m: _if(c.recompute, True, False),
    "layout": lambda x, c, m: _layouts(x, c),
    "seed": lambda x, c, m: tuple(range(1 << 16)),
    "overrides": lambda x, c, m: ((),),
}
"""Options of each knob, in the order in which knobs are chosen: (knobs so far, capabilities, limits) -> options.

Options that stand more than once are drawn more often.
"""

READS: dict[str, tuple[str, ...]] = {
    "g_dtype": ("rule",),
    "gate_in_kernel": ("rule",),
    "lower_bound": ("gate_in_kernel",),
    "A_log": ("gate_in_kernel", "lower_bound"),
    "dt_bias": ("gate_in_kernel",),
    "safe_gate": ("rule", "gate_in_kernel", "lower_bound"),
    "gate_regime": ("rule", "gate_in_kernel", "lower_bound", "safe_gate"),
    "gate_magnitude": ("rule", "gate_regime", "safe_gate", "lower_bound"),
    "allow_neg_eigval": ("beta_sigmoid",),
    "groups": ("heads",),
    "K": ("heads", "groups"),
    "V": ("heads", "groups", "K"),
    "lengths": ("chunk_size", "packed"),
    "tail_padding": ("packed",),
    "offsets": ("packed",),
    "key_regime": ("qk_l2norm",),
    "query_regime": ("dht",),
    "beta_regime": ("h0", "beta_sigmoid", "allow_neg_eigval"),
    "value_regime": ("h0",),
    "do_regime": ("dht",),
    "q_exponent": ("dtype",),
    "v_exponent": ("dtype",),
    "do_exponent": ("dtype",),
    "final_state": ("dht",),
    "layout": ("heads", "groups"),
}
"""Earlier knobs on which the options of a knob depend."""

_OPEN: dict[str, Callable[[Any, Any, Capabilities], bool]] = {
    "heads": lambda value, x, c: True,
    "groups": lambda value, x, c: value == 1 or c.grouped,
    "K": lambda value, x, c: value in c.k_sizes if c.k_sizes else value <= c.max_k,
    "V": lambda value, x, c: value in c.v_sizes if c.v_sizes else value <= c.max_v,
    "lengths": lambda value, x, c: (c.empty and x.packed) if 0 in value else (x.packed or len(set(value)) == 1),
    "tail_padding": lambda value, x, c: value == 0 or (x.packed and c.tail_padding),
    "gate_magnitude": lambda value, x, c: x.rule == "kda" or value == 1.0,
    "lower_bound": lambda value, x, c: (
        "softplus" in c.gates or not x.gate_in_kernel if value is None else x.gate_in_kernel and "bounded" in c.gates
    ),
    "scale": lambda value, x, c: value is None or c.scale,
    "q_exponent": lambda value, x, c: True,
    "v_exponent": lambda value, x, c: True,
    "do_exponent": lambda value, x, c: True,
    "seed": lambda value, x, c: True,
    "overrides": lambda value, x, c: True,
}
"""Knobs that may be fixed to values outside their options, and when such a value is valid."""


class Space:
    """All cases that capabilities, limits and fixed knobs leave, one knob after the other.

    Parameters
    ----------
    capabilities : of the target.
    limits : of sizes.
    fixed : field of `Case` -> one value, or a list of allowed values. Tuples are values (lengths, overrides).

    Raises
    ------
    ValueError
        If a fixed name is no knob, or nothing is left.
    """

    def __init__(self, capabilities: Capabilities, limits: Limits, fixed: Mapping[str, Any]) -> None:
        unknown = sorted(set(fixed) - set(OPTIONS))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no knob of a case; the knobs are {', '.join(OPTIONS)}")
        self.capabilities, self.limits = capabilities, limits
        self.fixed = {name: tuple(value) if isinstance(value, list) else (value,) for name, value in fixed.items()}
        read = set(self.fixed)
        for name in reversed(OPTIONS):
            if name in read:
                read.update(READS.get(name, ()))
        self._linked = tuple(name for name in OPTIONS if name in read)
        self._known_ends: dict[tuple[Any, ...], bool] = {}
        if not self._leads_on({}):
            wishes = " and ".join(f"{name}={list(values)}" for name, values in self.fixed.items())
            raise ValueError(f"no case with these capabilities has {wishes}; fix fewer knobs or other values")
        known: dict[str, Any] = {}
        for name in OPTIONS:
            known[name] = self.options(name, known)[0]

    def options(self, name: str, known: Mapping[str, Any]) -> Options:
        """What knob `name` may be after the knobs in `known`, such that every fixed knob can still be met.

        Raises
        ------
        ValueError
            If nothing is left, because the capabilities name nothing for this knob.
        """
        legal = self._legal(name, known)
        if name in self._linked:
            legal = tuple(value for value in legal if self._leads_on({**known, name: value}))
        if not legal:
            raise ValueError(f"no case has any {name} with these capabilities; let them name at least one")
        return legal

    def _legal(self, name: str, known: Mapping[str, Any]) -> Options:
        x = SimpleNamespace(**known)
        if name not in self.fixed:
            return OPTIONS[name](x, self.capabilities, self.limits)
        if name in _OPEN:
            return tuple(value for value in self.fixed[name] if _OPEN[name](value, x, self.capabilities))
        legal = OPTIONS[name](x, self.capabilities, self.limits)
        return tuple(value for value in self.fixed[name] if value in legal)

    def _leads_on(self, known: Mapping[str, Any]) -> bool:
        """Whether the knobs that fixed knobs depend on can be completed: depth first, each end remembered."""
        name = next((name for name in self._linked if name not in known), None)
        if name is None:
            return True
        key = tuple((n, known[n]) for n in self._linked if n in known)
        if key not in self._known_ends:
            self._known_ends[key] = any(
                self._leads_on({**known, name: value}) for value in dict.fromkeys(self._legal(name, known))
            )
        return self._known_ends[key]


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
