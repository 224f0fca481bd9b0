"""The zoo's chunked implementation, healthy or with one planted fault, as a target."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from oracles.contract import Contract, Dtype, chunked32, storage16
from verikda.call import Call, Capabilities, Crashed, Refused, Result
from verikda.targets import signature as sig
from verikda.targets.base import TargetError
from verikda.targets.memory import place_call
from verikda.zoo.chunked import chunk_kda
from verikda.zoo.faults import Fault

SIGNATURE = sig.read(chunk_kda, "verikda.zoo.chunked:chunk_kda")


class ZooTarget:
    """`chunk_kda` of the zoo with one fault.

    Parameters
    ----------
    fault : what is planted; Fault.NONE is the healthy implementation.
    storage16 : whether 16-bit inputs make it store its intermediates in that type, as GPU kernels do.
        False keeps them in float32.
    """

    def __init__(self, fault: Fault = Fault.NONE, *, storage16: bool = True) -> None:
        self.fault = fault
        self._storage16 = storage16

    @property
    def name(self) -> str:
        """The fault, as "zoo:FAULT"."""
        return f"zoo:{self.fault.name}"

    @property
    def capabilities(self) -> Capabilities:
        """Everything a Call can ask."""
        return Capabilities()

    def contract(self, call: Call) -> Contract:
        """Storage in the 16-bit input dtype, else float32 throughout."""
        storage = self._storage(call)
        return chunked32(call.chunk_size) if storage is None else storage16(storage, call.chunk_size)

    def run(self, call: Call) -> Result:
        """Make the call on arrays laid out as it asks.

        Raises
        ------
        Refused
            When the arguments are declined.
        Crashed
            When the call ends in any other error.
        """
        blocks = place_call(call, sig.argument_arrays(call))
        buffers = {name: block.copy() for name, block in blocks.items()}
        arguments = SIGNATURE.keywords(call)
        for name, block in blocks.items():
            arguments[sig.TENSORS.get(name, name)] = block.view(buffers[name])
        try:
            answer = chunk_kda(**arguments, storage=self._storage(call), fault=self.fault)
        except ValueError as error:
            raise Refused(f"ValueError: {error}") from error
        except Exception as error:
            raise Crashed(f"{type(error).__name__}: {error}") from error
        found: dict[str, npt.NDArray[Any]] = {"ht" if n == "final_state" else n: a for n, a in answer.items()}
        changed: list[str] = []
        for name, block in blocks.items():
            changed += block.changes(buffers[name])
        return Result(
            outputs={n: sig.normal_form(n, a.astype(np.float64), call) for n, a in found.items()},
            dtypes={n: a.dtype.name for n, a in found.items()},
            changed=tuple(changed),
            ran=f"{SIGNATURE.label} with {self.fault.name}",
            layouts={n: b.layout for n, b in blocks.items()},
        )

    def _storage(self, call: Call) -> Dtype | None:
        dtype = call.dtypes["q"]
        return None if dtype == "float32" or not self._storage16 else cast(Dtype, dtype)


def zoo_target(name: str) -> ZooTarget:
    """The target called "zoo:FAULT" ("zoo" alone is the healthy one).

    Raises
    ------
    TargetError
        When there is no fault of that name.
    """
    fault = name.removeprefix("zoo").removeprefix(":") or "NONE"
    if fault.upper() not in Fault.__members__:
        import difflib

        near = difflib.get_close_matches(fault.upper(), Fault.__members__, 3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise TargetError(f"the zoo has no fault {fault!r}{hint} `verikda zoo` lists all.")
    return ZooTarget(Fault[fault.upper()])
