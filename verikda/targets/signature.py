"""The public signatures of the field, and how a Call is said in them.

Two conventions are known: q, k, v, g, beta (flash-linear-attention) and query, key, value, g, beta
(transformers). A function is asked only for what its signature names. `**kwargs` names nothing: functions
swallow keywords there and ignore them, which would turn a flag into a silent no-op.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy.typing as npt

from verikda.call import Call, Capabilities
from verikda.targets.base import TargetError

TENSORS = {"h0": "initial_state"}
"""Names of tensor arguments that differ from those of `Problem`."""

ALIASES = {
    "q": ("q", "query"),
    "k": ("k", "key"),
    "v": ("v", "value"),
    "state_v_first": ("state_v_first", "transpose_state_layout"),
}
"""Names under which one parameter is found; the first match is used."""

KNOWN = (
    *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "cu_seqlens"),
    *("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "A_log", "dt_bias", "lower_bound"),
    *("use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "disable_recompute"),
    *("state_v_first", "chunk_size"),
)
"""Parameters that a Call can set."""


@dataclass(frozen=True)
class Signature:
    """Which of `KNOWN` a function takes, and under which name."""

    label: str
    names: Mapping[str, str]
    defaults: Mapping[str, Any]

    def has(self, *parameters: str) -> bool:
        """Whether every parameter is taken."""
        return all(p in self.names for p in parameters)

    def capabilities(self) -> Capabilities:
        """What the signature allows; dtypes and sizes are left at their widest."""
        gates: tuple[str, ...] = ("log",)
        if self.has("use_gate_in_kernel", "A_log", "dt_bias"):
            gates += ("softplus", "bounded") if self.has("lower_bound") else ("softplus",)
        packed = self.has("cu_seqlens")
        return Capabilities(
            # Promises, not features of a signature: bit equality across shapes, gates that safe_gate rules out.
            shape_invariant=False,
            beyond_safe_gate=False,
            chunk_sizes=(16, 32, 64) if self.has("chunk_size") else (64,),
            rules=("kda",) if self.has("g") else ("delta",),
            gates=gates,
            grouped=self.has("g"),
            packed=packed,
            empty=packed,
            tail_padding=packed,
            initial_state=self.has("initial_state"),
            dht=self.has("output_final_state"),
            scale=self.has("scale"),
            qk_l2norm=self.has("use_qk_l2norm_in_kernel"),
            beta_sigmoid=self.has("use_beta_sigmoid_in_kernel"),
            allow_neg_eigval=self.has("allow_neg_eigval"),
            safe_gate=self.has("safe_gate"),
            state_v_first=self.has("state_v_first"),
            recompute=self.has("disable_recompute"),
            autograd=True,
        )

    def keywords(self, call: Call) -> dict[str, Any]:
        """The arguments that are no tensors, under the function's names.

        Every parameter that the function has is given, its default or not: defaults differ between functions.

        Raises
        ------
        ValueError
            When the call needs a parameter that the function does not have.
        """
        p = call.problem
        # 1 / sqrt(K) and K ** -0.5 differ in the last bit for some K; both mean the default.
        plain = math.isclose(p.scale, p.q.shape[-1] ** -0.5, rel_tol=2.0**-51)
        wanted: dict[str, tuple[Any, bool]] = {  # value, and whether a function without the parameter does the same
            # The default scale is what callers leave out, so that path is the one to take for it.
            "scale": (
                None if plain and self.defaults.get("scale", 0) is None else p.scale,
                plain,
            ),
            "output_final_state": (call.final_state, p.dht is None),
            "use_qk_l2norm_in_kernel": (p.qk_l2norm, not p.qk_l2norm),
            "use_gate_in_kernel": (p.gate in ("softplus", "bounded"), p.gate in ("none", "log")),
            "lower_bound": (p.lower_bound, p.lower_bound is None),
            "use_beta_sigmoid_in_kernel": (p.beta_sigmoid, not p.beta_sigmoid),
            "allow_neg_eigval": (p.allow_neg_eigval, not p.allow_neg_eigval),
            "safe_gate": (call.safe_gate, not call.safe_gate),
            "disable_recompute": (not call.recompute, True),
            "state_v_first": (call.state_v_first, not call.state_v_first),
            "chunk_size": (call.chunk_size, True),
        }
        tensors = {TENSORS.get(n, n) for n in argument_arrays(call) if n not in ("do", "dht")}
        lacking = [n for n, (_, same) in wanted.items() if not same and not self.has(n)]
        lacking += sorted(n for n in tensors if not self.has(n))
        if lacking:
            raise ValueError(f"{self.label} has no parameter {', '.join(lacking)}, which this call needs")
        given = {self.names[n]: value for n, (value, _) in wanted.items() if self.has(n)}
        for name in ("g", "initial_state", "cu_seqlens", "A_log", "dt_bias"):
            if self.has(name) and name not in tensors:
                given[self.names[name]] = None
        return given

    def argument(self, name: str) -> str:
        """The function's name of the tensor that `Problem` calls `name`."""
        return self.names[TENSORS.get(name, name)]


def read(
    function: Callable[..., Any], label: str, swallowed: tuple[str, ...] = (), supplied: tuple[str, ...] = ()
) -> Signature:
    """The signature of `function`, as far as a Call can use it.

    Parameters
    ----------
    function : anything `inspect.signature` understands.
    label : how messages call it.
    swallowed : parameters that the function is known to read from `**kwargs`; a function may list its own in an
        attribute `verikda_parameters`.
    supplied : required parameters that the adapter gives by itself.

    Raises
    ------
    TargetError
        When it cannot be called by keyword with q, k, v and beta, or requires parameters that are not known.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise TargetError(f"{label}: its signature cannot be read ({error}); wrap it in a Python function") from error
    usable = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    extra = (*swallowed, *getattr(function, "verikda_parameters", ())) if takes_any else ()
    names: dict[str, str] = {}
    for known in KNOWN:
        for alias in ALIASES.get(known, (known,)):
            if alias in usable or alias in extra:
                names[known] = alias
                break
    missing = [n for n in ("q", "k", "v", "beta") if n not in names]
    if missing:
        raise TargetError(
            f"{label} has parameters ({', '.join(parameters)}) but no {', '.join(missing)} by keyword: expected "
            "(q, k, v, g, beta, ...) or (query, key, value, g, beta, ...), without g for the plain delta rule"
        )
    unknown = [n for n, p in usable.items() if p.default is p.empty and n not in (*names.values(), *supplied)]
    if unknown:
        raise TargetError(
            f"{label} requires {', '.join(unknown)}, which a call cannot supply (known: {', '.join(KNOWN)}); "
            "give it a default or wrap the function"
        )
    defaults = {
        k: usable[n].default for k, n in names.items() if n in usable and usable[n].default is not inspect._empty
    }
    return Signature(label, names, defaults)


def attribute(function: Callable[..., Any], name: str, default: Any = None) -> Any:
    """What a function declares under a name; a `functools.partial` declares what its function does."""
    while not hasattr(function, name) and isinstance(function, functools.partial):
        function = function.func
    return getattr(function, name, default)


def declared_capabilities(function: Callable[..., Any], signature: Signature) -> Capabilities:
    """What the signature allows, changed by the mapping of fields in the attribute `verikda_capabilities`.

    Raises
    ------
    TargetError
        When that is no mapping, names a field that `Capabilities` does not have, or gives it a value of another type.
    """
    changes = attribute(function, "verikda_capabilities", {})
    if not isinstance(changes, Mapping):
        raise TargetError(
            f"{signature.label}: verikda_capabilities is {changes!r:.60}; it maps fields of Capabilities to values, "
            'such as {"backward": False}'
        )
    known = {f.name for f in fields(Capabilities)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise TargetError(
            f"{signature.label}: verikda_capabilities has no field {', '.join(unknown)}; "
            f"fields are {', '.join(sorted(known))}"
        )
    whole = Capabilities()
    given: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in changes.items()}
    for name, value in given.items():
        default = getattr(whole, name)
        if isinstance(default, tuple):
            fine = isinstance(value, tuple) and all(isinstance(x, (str, int)) for x in value)
        else:
            fine = isinstance(value, Mapping) if isinstance(default, Mapping) else type(value) is type(default)
        if not fine:
            raise TargetError(
                f"{signature.label}: verikda_capabilities has {name} = {value!r:.60}; it must be of the type of "
                f"{default!r:.60}"
            )
        _check_elements(signature.label, name, value, default)
    return replace(signature.capabilities(), **given)


def _check_elements(label: str, name: str, value: Any, default: Any) -> None:
    """Check what a capability that is a tuple holds."""
    if not isinstance(default, tuple):
        return
    channels = range(1, Capabilities.max_k + 1)
    known: dict[str, Sequence[Any]] = {
        "k_sizes": channels, "v_sizes": channels, "required": ("qk_l2norm", "beta_sigmoid"),
    }  # fmt: skip
    allowed = known.get(name, default)
    wrong = [x for x in value if x not in allowed]
    if wrong:
        says = f"1 to {channels[-1]}" if allowed is channels else ", ".join(map(str, allowed))
        raise TargetError(f"{label}: verikda_capabilities has {wrong[0]!r} among its {name}; allowed: {says}")


def argument_arrays(call: Call) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a call in the shapes of the public signature, keyed by names of `Problem`.

    dt_bias is flattened to [HV*K]; with `state_v_first` h0 and dht are [N,HV,V,K].
    """
    p = call.problem
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name in ("q", "k", "v", "g", "beta", "h0", "cu_seqlens", "A_log", "dt_bias", "do", "dht"):
        value = getattr(p, name)
        if value is None or (name in ("do", "dht") and not call.backward):
            continue
        arrays[name] = value.reshape(-1) if name == "dt_bias" else from_kv(value, call) if name in STATES else value
    return arrays


STATES = ("h0", "dht", "ht", "dh0")


def from_kv(state: npt.NDArray[Any], call: Call) -> npt.NDArray[Any]:
    """A state between [K,V] order and the order of the call; its own inverse."""
    return state.swapaxes(-1, -2) if call.state_v_first else state


def result_shapes(call: Call) -> dict[str, tuple[int, ...]]:
    """Shape of every output and gradient as the public signature returns it."""
    p = call.problem
    state = (len(p.spans), p.v.shape[2], p.q.shape[3], p.v.shape[3])
    if call.state_v_first:
        state = (*state[:2], state[3], state[2])
    shapes = {"o": p.v.shape, "ht": state}
    arrays = argument_arrays(call)
    return shapes | {f"d{n}": arrays[n].shape for n in DIFFERENTIABLE if n in arrays}


DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "h0", "A_log", "dt_bias")


def normal_form(name: str, value: npt.NDArray[Any], call: Call) -> npt.NDArray[Any]:
    """A returned array in the shape of `Problem`: states in [K,V] order, ddt_bias as [HV,K]."""
    if name in STATES:
        return from_kv(value, call)
    if name == "ddt_bias" and call.problem.dt_bias is not None:
        return value.reshape(call.problem.dt_bias.shape)
    return value
