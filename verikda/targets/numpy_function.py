"""A function on NumPy arrays with the public chunk_kda parameters plus do and dht, as a target.

It answers forward and reverse at once, as a dictionary: o, final_state, and with do or dht given also dq, dk,
dv, dg, dbeta, dh0, dA_log, ddt_bias as far as their inputs are given. Arrays have the dtypes of the call
(bfloat16 is that of ml_dtypes) and really lie in memory as the call asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from oracles.problem import Array
from verikda.call import Call, Capabilities, Malformed, Result
from verikda.targets import signature as sig
from verikda.targets.answer import check_array, judged_as
from verikda.targets.base import TargetError, refuse_graph
from verikda.targets.contracts import Declared
from verikda.targets.function import FunctionTarget
from verikda.targets.loading import describe
from verikda.targets.memory import place_call

NumpyKda = Callable[..., Mapping[str, Any]]


class NumpyFunction(FunctionTarget):
    """A target that calls `function` with arrays.

    Parameters
    ----------
    function : takes q, k, v, (g,) beta, what else its signature names, and do and dht for the reverse.
    name : of the target.
    capabilities : None derives them from the signature, then applies the function's own `verikda_capabilities`.
    contract : None takes the function's own `verikda_contract`, else 16-bit storage for 16-bit inputs.

    Raises
    ------
    TargetError
        When the signature cannot be used.
    """

    def __init__(
        self,
        function: NumpyKda,
        name: str,
        *,
        capabilities: Capabilities | None = None,
        contract: Declared | None = None,
    ) -> None:
        super().__init__(function, name, sig.read(function, name, supplied=("do", "dht")), capabilities, contract)
        if (sig.attribute(function, "verikda_capabilities") or {}).get("autograd"):
            raise TargetError(f"{name}: verikda_capabilities has autograd = True, which only torch functions can have")
        self._capabilities = replace(self._capabilities, autograd=False)

    def run(self, call: Call) -> Result:
        """Make the call.

        Raises
        ------
        Refused, Crashed, Malformed
            See `Target.run`.
        ValueError
            When the call needs what the signature lacks, or its values are not representable in their dtypes.
        TargetError
            When an earlier call has ended the CUDA context, where the function computes on a GPU.
        """
        refuse_graph(call, self.name)
        self.check_context()
        keywords = self.signature.keywords(call)
        blocks = place_call(call, sig.argument_arrays(call))
        buffers = {name: block.copy() for name, block in blocks.items()}
        for name, block in blocks.items():
            argument = name if name in ("do", "dht") else self.signature.argument(name)
            keywords[argument] = block.view(buffers[name])
        found = _named(self.guarded(lambda: self.function(**keywords)))
        if "o" not in found:
            raise Malformed(f"returned {', '.join(found) or 'nothing'}; expected at least o")
        for name, value in found.items():
            check_array(name, value.shape, value.dtype.name, call)
        changed = [text for name, block in blocks.items() for text in block.changes(buffers[name])]
        return Result(
            outputs={n: sig.normal_form(n, _float64(a), call) for n, a in found.items()},
            dtypes={n: judged_as(a.dtype.name) for n, a in found.items()},
            changed=tuple(changed),
            ran=f"{describe(self.function)} on cpu",
            layouts={n: b.layout for n, b in blocks.items()},
        )


def _named(answer: Any) -> dict[str, Any]:
    """The arrays of an answer by the names of `oracles.problem`."""
    if not isinstance(answer, Mapping):
        raise Malformed(f"returned a {type(answer).__name__}; expected a dictionary with o, final_state, dq, ...")
    found: dict[str, Any] = {}
    for key, value in answer.items():
        if value is None:
            continue
        name = "ht" if key == "final_state" else str(key)
        if not isinstance(value, np.ndarray):
            raise Malformed(f"{key} is a {type(value).__name__}; expected an array")
        found[name] = value
    return found


def _float64(value: Any) -> Array:
    with np.errstate(invalid="ignore"):  # a signalling NaN, as garbage in memory may be one, becomes a plain NaN
        return np.array(value, dtype=np.float64)
