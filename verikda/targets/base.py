"""The protocol every target follows."""

from __future__ import annotations

from typing import Protocol

from oracles.contract import Contract
from verikda.call import Call, Capabilities, Result


class Target(Protocol):
    """Something that computes KDA or DeltaNet."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def contract(self, call: Call) -> Contract:
        """The rounding contract under which this call is judged."""
        ...

    def run(self, call: Call) -> Result:
        """Make the call.

        Raises
        ------
        Refused
            When the target declines the call with an exception.
        Crashed
            When the call ends in any other error; ContextLost where no later call can be made in this process.
        Malformed
            When what comes back is not a result.
        """
        ...


class TargetError(Exception):
    """A target that cannot be used as named; one sentence says why and what to do."""


def refuse_graph(call: Call, name: str) -> None:
    """What a target without `Capabilities.autograd` does first of all.

    Raises
    ------
    ValueError
        When the call asks what only a graph of autograd can do.
    """
    if call.frozen or call.backwards != 1:
        what = f"{', '.join(call.frozen)} without gradient" if call.frozen else f"{call.backwards} backwards"
        raise ValueError(f"target {name} has no graph of autograd, so no call with {what} can be made")


def told(error: BaseException) -> str:
    """Type and text of an exception; the code that is checked may have one whose text cannot be made, or written.

    Bytes of a file name that are no UTF-8 are such text: half of a surrogate pair each.
    """
    name = type(error).__name__
    try:
        return f"{name}: {error}".encode("utf-8", "backslashreplace").decode("utf-8")
    except Exception as other:
        return f"{name}, whose text cannot be shown: making it raises {type(other).__name__}"
