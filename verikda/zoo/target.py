"""The zoo's chunked implementation, healthy or with one planted fault, as a target."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from functools import wraps
from typing import Any

import numpy as np
import numpy.typing as npt

from verikda.call import Call, Result
from verikda.dtypes import round_to
from verikda.targets.base import TargetError
from verikda.targets.numpy_function import NumpyFunction
from verikda.zoo.chunked import chunk_kda
from verikda.zoo.faults import Fault


class ZooTarget(NumpyFunction):
    """`chunk_kda` of the zoo with one fault.

    Parameters
    ----------
    fault : what is planted; Fault.NONE is the healthy implementation.
    storage16 : whether 16-bit inputs make it store its intermediates in that type, as GPU kernels do.
        False keeps them in float32.
    """

    def __init__(self, fault: Fault = Fault.NONE, *, storage16: bool = True) -> None:
        self.fault = fault

        @wraps(chunk_kda)
        def function(**arguments: Any) -> dict[str, npt.NDArray[Any]]:
            storage = arguments["q"].dtype.name if storage16 else None
            return chunk_kda(**arguments, storage=storage, fault=fault)

        # One (sequence, head, chunk) at a time, on arrays of its own: no sum there depends on another shape.
        # g may be None: the signature alone cannot tell.
        function.verikda_capabilities = {  # type: ignore[attr-defined]
            "shape_invariant": True, "beyond_safe_gate": True, "rules": ("kda", "delta"),
        }  # fmt: skip
        super().__init__(function, f"zoo:{fault.name}", contract="storage16" if storage16 else "float32")
        self._capabilities = replace(self._capabilities, autograd=True)

    def run(self, call: Call) -> Result:
        """Make the call, and what autograd would: no gradient of frozen inputs, the reverse as often as asked."""
        plain = replace(call, frozen=(), backwards=1)
        first = super().run(plain)
        outputs = {n: x for n, x in first.outputs.items() if n.removeprefix("d") not in call.frozen}
        if self.fault is Fault.FROZEN_HALF and "beta" in call.frozen and "dk" in outputs:
            outputs["dk"] = np.zeros_like(outputs["dk"])
        if self.fault is Fault.BACKWARD_ONCE and call.backwards > 1:
            saved = replace(plain, problem=replace(call.problem, v=round_to(outputs["dv"], call.dtypes["v"])))
            outputs |= {n: x for n, x in super().run(saved).outputs.items() if n not in ("o", "ht")}
        return replace(first, outputs=outputs)


def zoo_target(name: str) -> ZooTarget:
    """The target called "zoo:FAULT"; "zoo" is the healthy one.

    Raises
    ------
    TargetError
        When there is no fault of that name.
    """
    fault = name.removeprefix("zoo").removeprefix(":") or "NONE"
    if fault.upper() not in Fault.__members__:
        near = get_close_matches(fault.upper(), Fault.__members__, 3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise TargetError(f"the zoo has no fault {fault!r}{hint or '; `verikda zoo --list` lists all'}")
    return ZooTarget(Fault[fault.upper()])
