"""For each fault of the zoo, the calls that show it: what `verikda zoo TARGET` runs.

A recipe is a few knobs over `BASE`, a small ordinary call with everything in it. Where a target does not support the
base, whatever the recipe does not name gives way; a recipe that names what a target lacks is not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verikda.call import Capabilities
from verikda.case import Case
from verikda.permits import permits
from verikda.zoo.faults import Fault

Knobs = Mapping[str, Any]

BASE: Knobs = {
    "lengths": (37, 0, 21),
    "packed": True,
    "tail_padding": 3,
    "groups": 2,
    "K": 8,
    "V": 6,
    "chunk_size": 16,
    "gate_magnitude": 0.25,
    "h0": "random",
    "dht": True,
}

_SINGLE: Knobs = {"packed": False, "lengths": (37,), "tail_padding": 0}
_LONG: Knobs = {"packed": False, "lengths": (130,), "tail_padding": 0, "chunk_size": 64}
_BOUND: Knobs = {**_LONG, "gate_regime": "bound", "gate_magnitude": 5.0}
_CORRELATED: Knobs = {**_LONG, "gate_regime": "slow", "gate_magnitude": 0.0625, "key_regime": "repeated",
                      "beta_regime": "near_one"}  # fmt: skip
_RAW: Knobs = {"gate_in_kernel": True, "A_log": True, "dt_bias": True}
_BOUNDED: Knobs = {**_RAW, "lower_bound": -5.0, "gate_magnitude": 1.0}
_HEADS: Knobs = {"heads": 2, "gate_regime": "heads", "gate_magnitude": 1.0}

NAMED: dict[Fault, tuple[Knobs, ...]] = {
    Fault.RULE_UNGATED_LINEAR: ({"rule": "delta", "gate_magnitude": 1.0},),
    Fault.MASK_AFTER_EXP: (_BOUND,),
    Fault.MASK_AFTER_EXP_BACKWARD: (_BOUND,),
    Fault.ANCHOR_CHUNK_START: (_BOUND,),
    Fault.ANCHOR_MID: (_BOUND,),
    Fault.ANCHOR_CLAMPED: ({**_LONG, "gate_regime": "bound", "gate_magnitude": 1.25},),
    Fault.ANCHOR_FUTURE: ({"gate_magnitude": 1.0}, _SINGLE),
    Fault.ANCHOR_OF_HEAD_0: (_HEADS,),
    Fault.CUMSUM_PER_16: (_LONG, {}),
    Fault.CUMSUM_TOTAL_MINUS_PREFIX: ({**_LONG, "lengths": (100,)}, {**_LONG, "do_regime": "decades"}),
    Fault.TAIL_OF_17: ({**_LONG, "lengths": (81,)},),
    Fault.TAIL_OF_63_ROW_REMAP: ({**_LONG, "lengths": (63,)},),
    Fault.TAIL_OF_13_LAST_TOKEN: ({**_LONG, "lengths": (77,)},),
    Fault.TAIL_SHORT_SEQUENCE: ({"chunk_size": 64},),
    Fault.PACK_EMPTY_DH0: ({"packed": True, "lengths": (37, 0, 21), "dht": True},),
    Fault.PACK_MANY_SEQUENCES: ({"packed": True, "lengths": (1, 2, 3) * 12},),
    Fault.STATE_H0_IGNORED: (_SINGLE,),
    Fault.STATE_WINDOW_RESTARTS: ({**_LONG, "lengths": (520,), "gate_regime": "slow"},),
    Fault.STATE_IN_BF16: (_SINGLE,),
    Fault.STATE_V_FIRST_NOT_READ: ({"state_v_first": True}, {}),
    Fault.STATE_V_FIRST_NOT_WRITTEN: ({"state_v_first": True}, {}),
    Fault.STATE_DH0_NEEDS_DHT: ({"dht": False},),
    Fault.INVERSE_TRUNCATED: (_CORRELATED,),
    Fault.INVERSE_FP16_NEUMANN: (_CORRELATED,),
    Fault.INVERSE_BLOCKS_NOT_MERGED: (_LONG,),
    Fault.INVERSE_LAST_MERGE_DROPPED: (_LONG, {**_LONG, "chunk_size": 16}),
    Fault.INVERSE_TF32: (_CORRELATED,),
    Fault.DA_LOG_OFF: (_RAW,),
    Fault.DDT_BIAS_OFF: (_RAW,),
    Fault.DK_CHUNK_64: (_LONG, {**_LONG, "chunk_size": 16}),
    Fault.DG_DIAGONAL_KEPT: (_BOUND,),
    Fault.DBETA_BY_DIVISION: ({"beta_regime": "zero_rows"},),
    Fault.DBETA_UNGATED_INCOMPLETE: ({"rule": "delta", "gate_magnitude": 1.0},),
    Fault.DA_LOG_FIRST_BLOCK: ({**_RAW, "packed": False, "lengths": (90,), "tail_padding": 0},),
    Fault.DDT_BIAS_HEADS_MIXED: (_RAW,),
    Fault.RECOMPUTE_WITHOUT_H0: ({}, {"recompute": False}),
    Fault.SAVED_STATE_AFTER_CHUNK: ({"recompute": False}, {}),
    Fault.GROUP_MODULO: ({"heads": 2, "groups": 2},),
    Fault.GROUP_DQ_NOT_SUMMED: ({"groups": 2},),
    Fault.HEADS_GATE_OF_HEAD_0: (_HEADS,),
    Fault.HEADS_BETA_OF_HEAD_0: ({"heads": 2},),
    Fault.BATCH_GATE_OF_ROW_0: ({"packed": False, "lengths": (20, 20), "tail_padding": 0},),
    Fault.BATCH_STATE_OF_ROW_0: ({"packed": False, "lengths": (20, 20), "tail_padding": 0, "groups": 2},),
    Fault.L2NORM_IGNORED: ({"qk_l2norm": True},),
    Fault.L2NORM_EPS_OUTSIDE: ({"qk_l2norm": True, "key_regime": "small"},),
    Fault.L2NORM_GRADIENT_MISSING: ({"qk_l2norm": True},),
    Fault.L2NORM_ZERO_ROW: ({"qk_l2norm": True, "key_regime": "zero_rows"},),
    Fault.SIGMOID_TWICE: ({"beta_sigmoid": True},),
    Fault.SIGMOID_TWICE_IN_DECODE: (
        {"beta_sigmoid": True, "packed": False, "lengths": (1,), "tail_padding": 0},
        {**_SINGLE, "beta_sigmoid": True},
    ),
    Fault.NEG_EIGVAL_IGNORED: ({"beta_sigmoid": True, "allow_neg_eigval": True},),
    Fault.LOWER_BOUND_IGNORED: (_BOUNDED,),
    Fault.BOUNDED_BY_CLAMP: (_BOUNDED,),
    Fault.A_LOG_NOT_EXP: (_RAW,),
    Fault.DT_BIAS_PER_HEAD: (_RAW,),
    Fault.GATE_GRADIENT_MISSING: (_RAW,),
    Fault.SOFTPLUS_THRESHOLD: ({**_RAW, "gate_regime": "bound", "gate_magnitude": 4.99},),
    Fault.SCALE_IGNORED: ({"scale": 0.125},),
    Fault.SAFE_GATE_CLAMPS: ({"safe_gate": False, "gate_regime": "random", "gate_magnitude": 5.0},),
    Fault.FINAL_STATE_UNASKED: ({**_SINGLE, "final_state": False, "dht": False},),
    Fault.GRADIENT_UNASKED: (_SINGLE,),
    Fault.CHUNK_STEP_64: ({}, _LONG),
    Fault.STRIDES_IGNORED: ({"layout": "strided"},),
    Fault.READS_ROWS_BEHIND: ({"packed": True, "tail_padding": 3},),
    Fault.READS_PAST_END: ({"K": 5},),
    Fault.OUTPUT_TILE_UNWRITTEN: ({**_LONG, "lengths": (90,), "chunk_size": 16},),
    Fault.DTYPE_CACHED: ({"dtype": "bfloat16", "g_dtype": "same"},),
    Fault.VALUE_EPSILON: ({"h0": "none", "v_exponent": -10},),
    Fault.VALUE_CLAMPED: ({"v_exponent": 10},),
    Fault.SMALL_FLUSHED: ({"h0": "none", "v_exponent": -15},),
    Fault.LATE_2048: ({**_LONG, "lengths": (2060,), "groups": 1, "K": 4, "V": 3},),
    Fault.LATE_K_NOT_V: ({"K": 8, "V": 6},),
    Fault.LATE_BETA_ZERO: ({"beta_regime": "zero_rows"},),
    Fault.LATE_BETA_ONE: ({"beta_regime": "one"},),
    Fault.LATE_WIDE_CHANNELS: ({**_SINGLE, "lengths": (20,), "groups": 1, "K": 128},),
    Fault.LATE_STATE_BF16: ({**_LONG, "lengths": (2060,), "groups": 1, "K": 4, "V": 3, "gate_regime": "slow"},),
    Fault.ZERO_GATE_DROPPED: ({"gate_regime": "zero_rows"},),
    Fault.HARD_RESET_NAN: ({"gate_regime": "reset"},),
}
"""Knobs over `BASE`; faults that are not listed show on the base itself."""

RECIPES: dict[Fault, tuple[Knobs, ...]] = {fault: NAMED.get(fault, ({},)) for fault in Fault if fault is not Fault.NONE}


def case_of(knobs: Knobs) -> Case:
    """The case of a recipe on a complete implementation."""
    return Case(**{**BASE, **knobs})


def fitted(knobs: Knobs, c: Capabilities) -> Case | str:
    """The case of a recipe on a target, or why there is none.

    Parameters
    ----------
    knobs : what the recipe needs; everything else gives way where the target does not support it.
    c : of the target.
    """
    case = case_of(knobs)
    ways: list[dict[str, Any]] = [
        {"dtype": c.dtypes[0]} if case.dtype not in c.dtypes else {},
        {"g_dtype": c.g_dtypes[0]} if case.g_dtype not in c.g_dtypes and case.rule == "kda" else {},
        {"beta_dtype": c.beta_dtypes[0]} if case.beta_dtype not in c.beta_dtypes else {},
        {"chunk_size": max(c.chunk_sizes, default=case.chunk_size)} if case.chunk_size not in c.chunk_sizes else {},
        {"K": c.k_sizes[0]} if c.k_sizes else {},
        {"V": c.v_sizes[0]} if c.v_sizes else {},
        {} if c.grouped else {"groups": 1},
        {} if c.initial_state else {"h0": "none"},
        {} if c.dht and c.backward else {"dht": False},
        {} if c.tail_padding else {"tail_padding": 0},
        dict.fromkeys(c.required, True),
    ]
    if case.packed and not c.packed:
        ways.append({"packed": False, "lengths": (max(case.lengths),), "tail_padding": 0})
    elif 0 in case.lengths and not c.empty:
        ways.append({"lengths": tuple(n for n in case.lengths if n)})
    for way in ways:
        if not set(way) & set(knobs):
            case = replace(case, **way)
    reason = permits(c, case)
    return case if reason is None else f"the target does not support {reason}"
