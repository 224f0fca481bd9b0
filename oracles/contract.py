"""A rounding contract: where an implementation rounds, and to what.

The noise floor of an input is what the chunked algorithm, rounded at exactly these
sites, must lose on it. An implementation is judged under the contract it declares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Dtype = Literal["float16", "bfloat16", "float32"]

FORWARD_SITES = ("Aqk", "A", "U", "W", "Kg", "Qg", "Vnew", "S")
"""Stored intermediates of the forward, by their names in the equations; S is the copy used in products."""

BACKWARD_SITES = ("dU", "dS", "dW", "betaV", "betaK", "dA", "AtdA", "dAqk")
"""Stored operands of the backward: dS is the copy used in products, betaV = diag(beta) V,
betaK = diag(beta) exp(Gamma) K, AtdA = A^T dA."""

INPUT_SITES = ("qn", "kn")
"""q and k after the in-operator norm."""


@dataclass(frozen=True)
class Contract:
    """What is rounded to `storage`, and how wide everything else is.

    Attributes
    ----------
    name : shown in reports.
    chunk : rows per chunk, or None for the token recurrence.
    storage : dtype of every site named in `sites`.
    sites : subset of FORWARD_SITES + BACKWARD_SITES + INPUT_SITES. A site that is not named stays in `wide`.
    wide : dtype of everything else: running state, Gamma, accumulation, dg, dbeta.
    inverse : how A is found.
    """

    name: str
    chunk: int | None
    storage: Dtype
    sites: frozenset[str] = frozenset()
    wide: Dtype = "float32"
    inverse: Literal["substitution", "neumann"] = "substitution"

    def with_chunk(self, chunk: int) -> Contract:
        """The same sites with another chunk size."""
        return replace(self, chunk=chunk, name=self.name.replace(f"c{self.chunk}", f"c{chunk}"))


STORED = frozenset(FORWARD_SITES + BACKWARD_SITES + INPUT_SITES) - {"dAqk"}


def storage16(dtype: Dtype, chunk: int) -> Contract:
    """Intermediates stored in the 16-bit input dtype, float32 state and accumulation."""
    return Contract(f"storage-{dtype}-c{chunk}", chunk, dtype, STORED)


def chunked32(chunk: int) -> Contract:
    """The chunked algorithm with every intermediate in float32."""
    return Contract(f"float32-c{chunk}", chunk, "float32")


def recurrent32() -> Contract:
    """The token recurrence with state and arithmetic in float32."""
    return Contract("float32-recurrent", None, "float32")
