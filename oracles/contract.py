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
betaK = diag(beta) exp(Gamma) K, AtdA = A^T dA. betaV and betaK are operands of U and W in the forward too."""

INPUT_SITES = ("qn", "kn")
"""q and k after the in-operator norm."""

OPERAND_SITES = ("QK",)
"""Decayed rows of Q and K as operands of Aqk and L, see `oracles.anchored`. With no gate there is nothing to round."""

SITES = frozenset(FORWARD_SITES + BACKWARD_SITES + INPUT_SITES + OPERAND_SITES)


@dataclass(frozen=True)
class Contract:
    """What is rounded to `storage`, and how wide everything else is.

    Attributes
    ----------
    name : shown in reports.
    chunk : rows per chunk, or None for the token recurrence.
    storage : dtype of every site named in `sites`.
    sites : subset of SITES. A site that is not named stays in `wide`. The token recurrence has one, "S", its state.
    wide : dtype of everything else: running state, Gamma, accumulation, dg, dbeta. Only float32 is emulated.
    operands : of the sites in OPERAND_SITES, where that is not `storage`: "tf32", the 11 significant bits that tensor
        cores read of a float32.
    inverse : how A is found, see `oracles.chunked_forward.inverse`.

    Raises
    ------
    ValueError
        For a chunk, dtype, site or method that does not exist.
    """

    name: str
    chunk: int | None
    storage: Dtype
    sites: frozenset[str] = frozenset()
    wide: Dtype = "float32"
    inverse: Literal["substitution", "neumann"] = "substitution"
    operands: Literal["tf32"] | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"contract {self.name}: chunk is {self.chunk}; it must be at least 1, or None for tokens.")
        if self.storage not in ("float16", "bfloat16", "float32"):
            raise ValueError(f"contract {self.name}: storage is {self.storage!r}; use float16, bfloat16 or float32.")
        if self.wide != "float32":
            raise ValueError(f"contract {self.name}: wide is {self.wide!r}; only float32 is emulated.")
        if self.inverse not in ("substitution", "neumann"):
            raise ValueError(f"contract {self.name}: inverse is {self.inverse!r}; use substitution or neumann.")
        if self.operands not in (None, "tf32"):
            raise ValueError(f"contract {self.name}: operands is {self.operands!r}; use tf32, or None for storage.")
        unknown = sorted(self.sites - (SITES if self.chunk is not None else {"S", *INPUT_SITES}))
        if unknown:
            allowed = "S, qn, kn (token recurrence)" if self.chunk is None else ", ".join(sorted(SITES))
            raise ValueError(f"contract {self.name}: {unknown[0]!r} is no site; use {allowed}.")

    def dtype_of(self, site: str) -> str:
        """What a site is rounded to."""
        if site not in self.sites:
            return self.wide
        return self.operands if self.operands is not None and site in OPERAND_SITES else self.storage

    @property
    def family(self) -> str:
        """Its name without the chunk size."""
        return self.name.removesuffix(f"-c{self.chunk}")

    def with_chunk(self, chunk: int) -> Contract:
        """The same sites with another chunk size."""
        if self.chunk is None:
            return self
        return replace(self, chunk=chunk, name=self.name.replace(f"c{self.chunk}", f"c{chunk}"))


STORED = SITES - {"dAqk", "QK"}
"""What kernels store in 16 bits; dAqk goes from one product to the next in float32."""


def storage16(dtype: Dtype, chunk: int) -> Contract:
    """Intermediates stored in the 16-bit input dtype, float32 state and accumulation."""
    return Contract(f"storage-{dtype}-c{chunk}", chunk, dtype, STORED)


def operands16(dtype: Dtype, chunk: int) -> Contract:
    """As `storage16`, with Aqk and L formed on 16-bit tensor cores too."""
    return Contract(f"operands-{dtype}-c{chunk}", chunk, dtype, STORED | {"QK"})


def operands_tf32(dtype: Dtype, chunk: int) -> Contract:
    """As `storage16`, with Aqk and L formed on TF32 tensor cores."""
    return Contract(f"tf32-{dtype}-c{chunk}", chunk, dtype, STORED | {"QK"}, operands="tf32")


def chunked32(chunk: int) -> Contract:
    """The chunked algorithm with every intermediate in float32."""
    return Contract(f"float32-c{chunk}", chunk, "float32")


def recurrent32() -> Contract:
    """The token recurrence with state and arithmetic in float32."""
    return Contract("float32-recurrent", None, "float32")
