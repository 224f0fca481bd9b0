"""What a valid `Case` is: one rule, one sentence."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from verikda import regimes

if TYPE_CHECKING:
    from verikda.case import Case

DTYPES = ("float16", "bfloat16", "float32")
LAYOUTS = ("contiguous", "sliced", "strided", "expanded", "misaligned")
H0 = ("none", "zero", "random", "large")
TENSORS = ("q", "k", "v", "g", "beta", "h0", "A_log", "dt_bias", "do", "dht")
"""Arguments of a call that hold numbers, in the order of the public signature."""

MAX_OVERRIDES = 8
MAX_ELEMENTS = 1 << 28
MAX_HEADS = 4096

_CHOICES: dict[str, Collection[Any]] = {
    "dtype": DTYPES,
    "g_dtype": ("same", "float32"),
    "beta_dtype": ("same", "float32"),
    "offsets": ("int32", "int64"),
    "chunk_size": (16, 32, 64),
    "rule": ("kda", "delta"),
    "gate_regime": regimes.GATES,
    "key_regime": regimes.KEYS,
    "query_regime": regimes.QUERIES,
    "beta_regime": regimes.BETAS,
    "value_regime": regimes.VALUES,
    "do_regime": regimes.DOS,
    "h0": H0,
    "layout": LAYOUTS,
}

_RANGES: dict[str, tuple[int, int]] = {
    "tail_padding": (0, MAX_ELEMENTS),
    "heads": (1, MAX_HEADS),
    "groups": (1, MAX_HEADS),
    "K": (1, 256),
    "V": (1, 256),
    "q_exponent": (-64, 64),
    "v_exponent": (-64, 64),
    "do_exponent": (-64, 64),
    "seed": (0, 2**32 - 1),
}


def check(case: Case) -> None:
    """Raise ValueError with one sentence for the first fault of `case`."""
    _types(case)
    _geometry(case)
    _gate(case)
    _beta(case)
    _state(case)
    _overrides(case)


def _fail(name: str, value: object, allowed: str, advice: str) -> None:
    seen = repr(value)
    raise ValueError(f"{name} is {seen if len(seen) <= 100 else seen[:97] + '...'}, but {allowed}; {advice}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_finite(value: object) -> bool:
    """Whether `value` is a number that is a finite float64."""
    try:
        return _is_number(value) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:
        return False


def _types(case: Case) -> None:
    for f in fields(case):
        value = getattr(case, f.name)
        if isinstance(f.default, bool) and not isinstance(value, bool):
            _fail(f.name, value, "it is a switch", "use True or False")
    for name, choices in _CHOICES.items():
        value = getattr(case, name)
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value not in choices:
            _fail(name, value, f"it must be one of {', '.join(map(str, choices))}", "choose one of these")
    for name, (low, high) in _RANGES.items():
        value = getattr(case, name)
        if not _is_int(value) or not low <= value <= high:
            _fail(name, value, f"it must be an integer in [{low}, {high}]", "use a plain int in that range")
    for name in ("gate_magnitude", "scale", "lower_bound"):
        value = getattr(case, name)
        if value is None and name != "gate_magnitude":
            continue
        if not _is_finite(value):
            _fail(name, value, "it must be a finite number", "use a float")
        object.__setattr__(case, name, float(value))


def _geometry(case: Case) -> None:
    lengths = case.lengths
    if not isinstance(lengths, tuple) or not lengths or not all(_is_int(n) and n >= 0 for n in lengths):
        _fail("lengths", lengths, "it must be a non-empty tuple of integers >= 0", "use (12,) for one sequence of 12")
    if not case.packed:
        if len(set(lengths)) > 1:
            _fail("lengths", lengths, "sequences of a batch have equal lengths", "use packed=True for unequal ones")
        if lengths[0] == 0:
            _fail("lengths", lengths, "empty sequences exist only in a pack", "use packed=True")
        if case.tail_padding:
            _fail("tail_padding", case.tail_padding, "only a pack has rows after its last offset", "use 0")
    if case.HV > MAX_HEADS:
        _fail("heads * groups", case.HV, f"at most {MAX_HEADS} value heads are supported", "use fewer")
    rows, channels = case.B * case.T, max(case.K, case.V)
    largest = case.HV * max(rows * channels, case.N * case.K * case.V)
    if largest > MAX_ELEMENTS:
        _fail("the largest tensor", largest, f"one tensor may have at most {MAX_ELEMENTS} elements", "use fewer tokens")


def _gate(case: Case) -> None:
    if not 0 <= case.gate_magnitude <= 1000:
        _fail("gate_magnitude", case.gate_magnitude, "it must be in [0, 1000] nats per token", "use a size")
    if case.rule == "delta":
        for name in ("gate_in_kernel", "safe_gate"):
            if getattr(case, name):
                _fail(name, True, 'rule "delta" has no gate', 'use False, or rule "kda"')
    if not case.gate_in_kernel:
        for name in ("A_log", "dt_bias"):
            if getattr(case, name):
                _fail(name, True, "it is read only by a gate in the kernel", "use False, or gate_in_kernel=True")
        if case.lower_bound is not None:
            _fail("lower_bound", case.lower_bound, "it is read only by a gate in the kernel", "use None")
    elif case.lower_bound is None:
        if not case.A_log:
            _fail("A_log", False, "the softplus gate needs it", "use A_log=True, or a lower_bound")
    elif not -5 <= case.lower_bound < 0:
        _fail("lower_bound", case.lower_bound, "it must be in [-5, 0)", "use for example -5.0")
    if case.safe_gate and case.gate == "softplus":
        _fail("safe_gate", True, "it promises g >= -5, which the softplus gate does not", "use a lower_bound, or False")
    if case.rule == "kda":
        regime = case.gate_regime
        if regime == "positive" and case.gate_in_kernel:
            _fail("gate_regime", regime, "a gate in the kernel is never positive", "use gate_in_kernel=False")
        if regime == "reset" and (case.safe_gate or case.gate == "bounded"):
            _fail("gate_regime", regime, "g = -inf is below any bound", "use safe_gate=False and no lower_bound")


def _beta(case: Case) -> None:
    if case.allow_neg_eigval and not case.beta_sigmoid:
        _fail("allow_neg_eigval", True, "it doubles the sigmoid of beta", "use beta_sigmoid=True too, or False")
    if case.beta_regime == "up_to_two" and case.beta_sigmoid and not case.allow_neg_eigval:
        _fail("beta_regime", "up_to_two", "a sigmoid ends at 1", "use allow_neg_eigval=True or beta_sigmoid=False")


def _state(case: Case) -> None:
    if case.dht and not case.final_state:
        _fail(
            "dht", True, "it is the gradient of a final state that is not asked for", "use final_state=True, or False"
        )


def _overrides(case: Case) -> None:
    items = case.overrides
    if not isinstance(items, tuple) or len(items) > MAX_OVERRIDES:
        _fail("overrides", items, f"it must be a tuple of at most {MAX_OVERRIDES} entries", "use fewer")
    shapes, seen = case.shapes, set()
    for item in items:
        if not (isinstance(item, tuple) and len(item) == 3 and _is_int(item[1]) and _is_number(item[2])):
            _fail("an override", item, "it must be (tensor, flat index, value)", 'write for example ("k", 0, 1.0)')
        tensor, index, _ = item
        if tensor not in shapes:
            known = ", ".join(name for name in TENSORS if name in shapes)
            _fail("the tensor of an override", tensor, f"this case has only {known}", "name one of these")
        size = math.prod(shapes[tensor])
        if not 0 <= index < size:
            _fail(f"the index of an override of {tensor}", index, f"{tensor} has {size} elements", "count from 0")
        if not _is_finite(item[2]) and not (tensor == "g" and case.gate == "log" and item[2] == -math.inf):
            _fail(
                f"the value of an override of {tensor}", item[2], "only a log gate may be -inf", "use a finite number"
            )
        if (tensor, index) in seen:
            _fail("overrides", items, f"{tensor}[{index}] is written twice", "keep one of the two")
        seen.add((tensor, index))
