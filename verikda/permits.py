"""Whether a target supports a case, and if not, why: used where a case does not come from the strategies."""

from __future__ import annotations

from verikda.call import Capabilities
from verikda.case import Case


def permits(c: Capabilities, case: Case) -> str | None:
    """None where every knob of `case` is within the capabilities, otherwise the first limit it breaks and its note."""
    limits: tuple[tuple[bool, str, str], ...] = (
        (case.dtype in c.dtypes, "dtypes", f"dtype {case.dtype}"),
        (case.rule in c.rules, "rules", f"rule {case.rule}"),
        (case.rule == "delta" or case.gate in c.gates, "gates", f"gate {case.gate}"),
        (case.chunk_size in c.chunk_sizes, "chunk_sizes", f"chunk_size {case.chunk_size}"),
        (case.layout in c.layouts, "layouts", f"layout {case.layout}"),
        (case.K in c.k_sizes if c.k_sizes else c.max_k >= case.K, "k_sizes", f"K = {case.K}"),
        (case.V in c.v_sizes if c.v_sizes else c.max_v >= case.V, "v_sizes", f"V = {case.V}"),
        (case.groups == 1 or c.grouped, "grouped", "grouped value heads"),
        (not case.packed or c.packed, "packed", "packed sequences"),
        (0 not in case.lengths or c.empty, "empty", "empty sequences"),
        (case.tail_padding == 0 or c.tail_padding, "tail_padding", "rows after the last offset"),
        (case.h0 == "none" or c.initial_state, "initial_state", "an initial state"),
        (not case.dht or c.dht, "dht", "a gradient of the final state"),
        (case.scale is None or c.scale, "scale", "scale"),
        (not case.qk_l2norm or c.qk_l2norm, "qk_l2norm", "q/k norm in the operator"),
        (not case.beta_sigmoid or c.beta_sigmoid, "beta_sigmoid", "beta sigmoid in the operator"),
        (not case.allow_neg_eigval or c.allow_neg_eigval, "allow_neg_eigval", "allow_neg_eigval"),
        (not case.safe_gate or c.safe_gate, "safe_gate", "safe_gate"),
        (not case.state_v_first or c.state_v_first, "state_v_first", "state_v_first"),
        (case.recompute or c.recompute, "recompute", "disable_recompute"),
        (case.gate_regime != "reset" or c.hard_reset, "hard_reset", "hard resets"),
        (case.rule == "delta" or case.g_dtype in c.g_dtypes, "g_dtypes", f"g in {case.g_dtype}"),
        (case.beta_dtype in c.beta_dtypes, "beta_dtypes", f"beta in {case.beta_dtype}"),
        (case.beta_regime != "up_to_two" or c.beta_above_one, "beta_above_one", "beta above 1"),
        *((getattr(case, flag), flag, f"{flag} = False") for flag in c.required),
    )
    for allowed, field, text in limits:
        if not allowed:
            return f"{text}: {c.notes[field]}" if field in c.notes else text
    return None
