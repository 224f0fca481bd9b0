"""What a target is asked to do, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oracles.problem import Array, Problem


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a target: values, dtypes, flags and memory conditions.

    Attributes
    ----------
    problem : values (float64, each representable in its dtype) and the meaning of the call.
    dtypes : dtype name of each tensor argument: q, k, v, g, beta, h0, A_log, dt_bias, do, dht, cu_seqlens.
    backward : whether gradients are wanted.
    chunk_size, safe_gate, state_v_first, recompute : flags passed on where the target has them.
    final_state : whether the final state is asked for, where the target can be told; if not, it is not judged.
    frozen : inputs that need no gradient, of q, k, v, g, beta, h0, A_log, dt_bias; only for targets with
        `Capabilities.autograd`, others raise ValueError.
    backwards : how often the reverse is made through one forward, from 1 on, for those too; the gradients are of the
        last.
    layout : one of `verikda.case.LAYOUTS`; how each input lies in memory.
    poison : value that fills everything around the inputs (guard zones, skipped elements, rows at or after
        cu_seqlens[-1], those of `do` too). None fills with zeros and leaves such rows as they are in `problem`.
        NaN or 1e30 must change nothing; beyond the range of a dtype it is the largest finite value.
    """

    problem: Problem
    dtypes: Mapping[str, str]
    backward: bool = True
    chunk_size: int = 64
    safe_gate: bool = False
    state_v_first: bool = False
    recompute: bool = True
    final_state: bool = True
    frozen: tuple[str, ...] = ()
    backwards: int = 1
    layout: str = "contiguous"
    poison: float | None = None

    def output_dtypes(self) -> dict[str, str]:
        """What dtype each output should have: o that of q, states float32, gradients those of their inputs."""
        gradients = {f"d{n}": d for n, d in self.dtypes.items() if n not in ("do", "dht", "cu_seqlens")}
        return {"o": self.dtypes["q"], "ht": "float32", **gradients}


@dataclass(frozen=True, eq=False)
class Result:
    """What came back.

    Attributes
    ----------
    outputs : float64 copies keyed by oracles.problem.OUTPUTS and GRADIENTS, states in [K,V] order.
        An output that the target does not have is absent.
    dtypes : dtype name that each output really had.
    changed : inputs ("q"), or memory around them ("memory around q"), that the call modified.
    ran : what really ran (kernel, file, device), where the target can tell.
    layouts : memory layout that each input really got, where the target lays them out.
    """

    outputs: Mapping[str, Array]
    dtypes: Mapping[str, str]
    changed: tuple[str, ...] = ()
    ran: str = ""
    layouts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Capabilities:
    """What a target says it supports; a call outside is never made.

    `shape_invariant` promises that shapes and strides without meaning (batch, packing, length, memory layout) change
    no bit. Functions made of library products and sums cannot promise it, because the order of summation there
    follows the shape: False has those relations judged under the noise floor.
    `k_sizes`, `v_sizes` are the only K and V that it takes, where it takes a few only. `required` names flags that
    every call must have ("qk_l2norm", "beta_sigmoid"), `beta_above_one` says whether beta may lie in (1, 2],
    `beyond_safe_gate` promises that `safe_gate` changes no result, also where its own promise (no log gate below -5) is
    broken.
    Defaults describe a complete implementation; of a function both promises are False until it declares them.
    `autograd` says that gradients come by torch's graph: an input may need none, and the reverse can be made again
    through the same forward.
    `notes` says of some limits why they are there, by field.
    """

    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
    chunk_sizes: tuple[int, ...] = (16, 32, 64)
    rules: tuple[str, ...] = ("kda", "delta")
    gates: tuple[str, ...] = ("log", "softplus", "bounded")
    layouts: tuple[str, ...] = ("contiguous", "sliced", "strided", "expanded", "misaligned")
    max_k: int = 256
    max_v: int = 256
    k_sizes: tuple[int, ...] = ()
    v_sizes: tuple[int, ...] = ()
    grouped: bool = True
    packed: bool = True
    empty: bool = True
    tail_padding: bool = True
    initial_state: bool = True
    backward: bool = True
    dht: bool = True
    scale: bool = True
    qk_l2norm: bool = True
    beta_sigmoid: bool = True
    allow_neg_eigval: bool = True
    safe_gate: bool = True
    beyond_safe_gate: bool = True
    state_v_first: bool = True
    recompute: bool = True
    hard_reset: bool = True
    beta_above_one: bool = True
    required: tuple[str, ...] = ()
    shape_invariant: bool = True
    g_dtypes: tuple[str, ...] = ("same", "float32")
    beta_dtypes: tuple[str, ...] = ("same", "float32")
    autograd: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)


class Refused(Exception):  # noqa: N818 - an outcome of a call, not an error of this package
    """The target declined the call with an exception of its own; carries its text."""


class Crashed(Exception):  # noqa: N818 - an outcome of a call, not an error of this package
    """The call ended in an error that is no refusal; carries its type and text. Always a failure."""


class ContextLost(Crashed):
    """The call ended the CUDA context of its process too, in which no later call can be made."""


class Malformed(Exception):  # noqa: N818 - an outcome of a call, not an error of this package
    """The target answered with something that is not a result: wrong shape, dtype or type. Always a failure."""
