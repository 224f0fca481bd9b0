"""Rounding contracts by name, for targets that declare none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from oracles.contract import Contract, Dtype, chunked32, operands16, operands_tf32, recurrent32, storage16
from verikda.call import Call
from verikda.targets.base import TargetError

Declared = str | Contract | Callable[[Call], Contract]
"""How a target declares its contract: by a name in `NAMES`, as it is, or depending on the call."""

NAMES = ("storage16", "operands16", "operands_tf32", "float32", "recurrent32")
"""storage16: intermediates in the 16-bit input dtype (float32 where inputs are); operands16: the decayed rows that are
multiplied to Aqk and L too; operands_tf32: those in TF32; float32: chunked, all of it in float32; recurrent32: token by
token in float32.

A kernel that forms Aqk and L by products on tensor cores rounds the decayed rows of Q and K to what those take: 16
bits (`operands16`), or the 11 significant ones of TF32 (`operands_tf32`). In bfloat16 rows in TF32 are finer than
anything else that is rounded, and `storage16` says nearly the same; where few terms cancel it does not."""


DEFAULT = "storage16"
"""What a function that declares nothing is judged under."""


def contract_by_name(name: str, dtype: str, chunk: int) -> Contract:
    """The contract called `name` for inputs of `dtype` and a chunk size.

    Raises
    ------
    TargetError
        When the name is not one of `NAMES`.
    """
    if name == "storage16":
        return chunked32(chunk) if dtype == "float32" else storage16(cast(Dtype, dtype), chunk)
    if name == "operands16":
        return chunked32(chunk) if dtype == "float32" else operands16(cast(Dtype, dtype), chunk)
    if name == "operands_tf32":
        return chunked32(chunk) if dtype == "float32" else operands_tf32(cast(Dtype, dtype), chunk)
    if name == "float32":
        return chunked32(chunk)
    if name == "recurrent32":
        return recurrent32()
    raise TargetError(f"contract {name!r} is not known: use one of {', '.join(NAMES)}")


def check_declared(declared: Any, label: str) -> Declared:
    """`declared`, if it can be used.

    Raises
    ------
    TargetError
        When it is a name that is not known, or neither a name, a Contract nor a function.
    """
    if isinstance(declared, str):
        contract_by_name(declared, "float32", 64)
        return declared
    if isinstance(declared, Contract):
        return declared
    if callable(declared):
        function: Callable[[Call], Contract] = declared
        return function
    raise TargetError(
        f"{label}: its contract is a {type(declared).__name__}; give one of {', '.join(NAMES)}, "
        "an oracles.contract.Contract, or a function from Call to Contract"
    )


def contract_of(declared: Declared, call: Call) -> Contract:
    """The contract that a declaration means for one call."""
    contract = declared if isinstance(declared, (str, Contract)) else declared(call)
    if isinstance(contract, str):
        return contract_by_name(contract, call.dtypes["q"], call.chunk_size)
    if not isinstance(contract, Contract):
        raise TargetError(
            f"the declared contract answered {contract!r:.60} for a call; it must answer an oracles.contract.Contract "
            f"or one of {', '.join(NAMES)}"
        )
    return contract
