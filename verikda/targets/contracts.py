"""Rounding contracts by name, for targets that declare none."""

from __future__ import annotations

from typing import cast

from oracles.contract import Contract, Dtype, chunked32, recurrent32, storage16
from verikda.targets.base import TargetError

NAMES = ("storage16", "float32", "recurrent32")
"""storage16: intermediates in the 16-bit input dtype (float32 where inputs are); float32: chunked, all of it
in float32; recurrent32: token by token in float32."""


def contract_by_name(name: str, dtype: str, chunk: int) -> Contract:
    """The contract called `name` for inputs of `dtype` and a chunk size.

    Raises
    ------
    TargetError
        When the name is not one of `NAMES`.
    """
    if name == "storage16":
        return chunked32(chunk) if dtype == "float32" else storage16(cast(Dtype, dtype), chunk)
    if name == "float32":
        return chunked32(chunk)
    if name == "recurrent32":
        return recurrent32()
    raise TargetError(f"contract {name!r} is not known: use one of {', '.join(NAMES)}")
