"""For each fault of the zoo, calls that show it."""

from __future__ import annotations

from typing import Any

import numpy as np
from zoo_calls import Array

from verikda.zoo.faults import Fault

Knobs = dict[str, Any]


def fill(name: str, value: float, where: Any = ...) -> Any:
    """An edit that sets part of one input."""

    def edit(a: dict[str, Array]) -> None:
        a[name][where] = value

    return edit


def repeated_keys(a: dict[str, Array]) -> None:
    a["k"][:] = a["k"][:, :1]


def early_and_late(a: dict[str, Array]) -> None:
    a["do"][:, :8] *= 1e4
    a["do"][:, 8:] *= 1e-4


SINGLE: Knobs = {"packed": False, "lengths": (37,), "tail": 0}
LONG: Knobs = {"packed": False, "lengths": (130,), "chunk": 64}
AT_BOUND: Knobs = LONG | {"edit": fill("g", -5.0)}
CORRELATED: Knobs = LONG | {"magnitude": 1e-3, "edit": repeated_keys}
SOFTPLUS: Knobs = {"gate": "softplus", "lengths": (90,)}
BOUNDED: Knobs = {"gate": "bounded", "lower_bound": -3.0}

SHOWS: dict[Fault, tuple[Knobs, ...]] = {
    Fault.DTYPE_CACHED: ({"dtype": "bfloat16", "g_dtype": "bfloat16"},),
    Fault.RULE_UNGATED_LINEAR: ({"gate": "none"},),
    Fault.MASK_AFTER_EXP: (AT_BOUND,),
    Fault.MASK_AFTER_EXP_BACKWARD: (AT_BOUND,),
    Fault.ANCHOR_CHUNK_START: (AT_BOUND,),
    Fault.ANCHOR_MID: (AT_BOUND,),
    Fault.ANCHOR_CLAMPED: (LONG | {"magnitude": 0.0, "edit": fill("g", -1.2)},),
    Fault.CUMSUM_PER_16: (LONG, {}),
    Fault.CUMSUM_TOTAL_MINUS_PREFIX: (LONG | {"edit": early_and_late}, LONG | {"lengths": (100,)}),
    Fault.TAIL_OF_17: (LONG | {"lengths": (81,)},),
    Fault.TAIL_OF_63_ROW_REMAP: (LONG | {"lengths": (63,)},),
    Fault.TAIL_OF_13_LAST_TOKEN: (LONG | {"lengths": (77,)},),
    Fault.TAIL_SHORT_SEQUENCE: ({"chunk": 64},),
    Fault.PACK_MANY_SEQUENCES: ({"lengths": (1, 2, 3) * 12},),
    Fault.STATE_WINDOW_RESTARTS: (LONG | {"lengths": (520,)},),
    Fault.STATE_V_FIRST_NOT_READ: ({"v_first": True}, {}),
    Fault.STATE_V_FIRST_NOT_WRITTEN: ({"v_first": True}, {}),
    Fault.STATE_DH0_NEEDS_DHT: ({"dht": False},),
    Fault.INVERSE_TRUNCATED: (CORRELATED,),
    Fault.INVERSE_FP16_NEUMANN: (CORRELATED,),
    Fault.INVERSE_BLOCKS_NOT_MERGED: (LONG,),
    Fault.INVERSE_LAST_MERGE_DROPPED: (LONG, LONG | {"chunk": 16}),
    Fault.INVERSE_TF32: (CORRELATED,),
    Fault.DA_LOG_OFF: (SOFTPLUS,),
    Fault.DDT_BIAS_OFF: (SOFTPLUS,),
    Fault.DK_CHUNK_64: (LONG, LONG | {"chunk": 16}),
    Fault.DG_DIAGONAL_KEPT: (AT_BOUND,),
    Fault.DBETA_BY_DIVISION: ({"edit": fill("beta", 0.0, np.s_[:, 5])},),
    Fault.DBETA_UNGATED_INCOMPLETE: ({"gate": "none"},),
    Fault.DA_LOG_FIRST_BLOCK: (SOFTPLUS,),
    Fault.DDT_BIAS_HEADS_MIXED: (SOFTPLUS,),
    Fault.SAVED_STATE_AFTER_CHUNK: ({"recompute": False}, {}),
    Fault.GROUP_MODULO: ({"H": 2},),
    Fault.BATCH_GATE_OF_ROW_0: ({"packed": False, "lengths": (20, 20)},),
    Fault.L2NORM_IGNORED: ({"l2norm": True},),
    Fault.L2NORM_EPS_OUTSIDE: ({"l2norm": True, "edit": fill("k", 1e-3, np.s_[:, 5])},),
    Fault.L2NORM_GRADIENT_MISSING: ({"l2norm": True},),
    Fault.L2NORM_ZERO_ROW: ({"l2norm": True, "edit": fill("k", 0.0, np.s_[:, 5])},),
    Fault.SIGMOID_TWICE: ({"sigmoid": True},),
    Fault.SIGMOID_TWICE_IN_DECODE: ({"sigmoid": True, "packed": False, "lengths": (1,)}, SINGLE | {"sigmoid": True}),
    Fault.NEG_EIGVAL_IGNORED: ({"sigmoid": True, "neg_eigval": True},),
    Fault.LOWER_BOUND_IGNORED: (BOUNDED,),
    Fault.BOUNDED_BY_CLAMP: (BOUNDED,),
    Fault.A_LOG_NOT_EXP: (SOFTPLUS,),
    Fault.DT_BIAS_PER_HEAD: (SOFTPLUS,),
    Fault.GATE_GRADIENT_MISSING: (SOFTPLUS,),
    Fault.SOFTPLUS_THRESHOLD: (SOFTPLUS | {"edit": fill("g", 4.0)},),
    Fault.SCALE_IGNORED: ({"scale": 0.7},),
    Fault.SAFE_GATE_CLAMPS: ({"safe_gate": True, "edit": fill("g", -7.0, np.s_[:, 5])},),
    Fault.STRIDES_IGNORED: ({"layout": "strided"},),
    Fault.READS_ROWS_BEHIND: ({"poison": np.nan},),
    Fault.READS_PAST_END: ({"poison": np.nan, "K": 5},),
    Fault.OUTPUT_TILE_UNWRITTEN: ({"lengths": (90,)},),
    Fault.VALUE_EPSILON: ({"h0": False, "edit": lambda a: np.multiply(a["v"], 1e-3, out=a["v"])},),
    Fault.VALUE_CLAMPED: ({"edit": lambda a: np.multiply(a["v"], 1e3, out=a["v"])},),
    Fault.SMALL_FLUSHED: ({"h0": False, "edit": lambda a: np.multiply(a["v"], 5e-5, out=a["v"])},),
    Fault.LATE_2048: ({"packed": False, "lengths": (2060,), "K": 4, "V": 3, "G": 1, "chunk": 64},),
    Fault.ANCHOR_FUTURE: ({}, SINGLE),
    Fault.ANCHOR_OF_HEAD_0: ({"H": 2},),
    Fault.HEADS_GATE_OF_HEAD_0: ({"H": 2},),
    Fault.HEADS_BETA_OF_HEAD_0: ({"H": 2},),
    Fault.STATE_H0_IGNORED: (SINGLE,),
    Fault.STATE_IN_BF16: (SINGLE,),
    Fault.CHUNK_STEP_64: ({}, LONG),
    Fault.RECOMPUTE_WITHOUT_H0: ({}, {"recompute": False}),
    Fault.LATE_BETA_ZERO: ({"edit": fill("beta", 0.0, np.s_[:, 5])},),
    Fault.LATE_BETA_ONE: ({"edit": fill("beta", 1.0, np.s_[:, 5])},),
    Fault.ZERO_GATE_DROPPED: ({"edit": fill("g", 0.0, np.s_[:, 4:6])},),
    Fault.HARD_RESET_NAN: ({"edit": fill("g", -np.inf, np.s_[:, 5])},),
}
"""Knobs of `make_call`; faults that are not listed show on its default call.

The results differ on the first call; each check that a fault names in `kills` fails on one of the calls.
"""
