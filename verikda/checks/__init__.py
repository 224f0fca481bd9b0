"""The properties that a delta-rule implementation must have, each in one place.

`CHECKS` lists them in the order in which they run. Those in `FREE` cost no further call of the target and run on
every case; of the others a few on each, those first that have run least.
"""

from __future__ import annotations

from verikda.checks import adjoint, autograd, causal, memory, structure, values
from verikda.checks.base import CALL, Check, Context, Failure, Outcome, Verdict
from verikda.choose import choose

CHECKS: tuple[Check, ...] = (
    *values.CHECKS,
    *adjoint.CHECKS,
    *autograd.CHECKS,
    *causal.CHECKS,
    *structure.CHECKS,
    *memory.CHECKS,
)
BY_NAME = {check.name: check for check in CHECKS}
FREE = ("floor", "inputs_unchanged", "empty_passthrough", "padding_rows")

__all__ = ["BY_NAME", "CALL", "CHECKS", "FREE", "Check", "Context", "Failure", "Outcome", "Verdict", "named"]


def named(names: tuple[str, ...]) -> tuple[Check, ...]:
    """The checks of these names, in the order of `CHECKS`.

    Raises
    ------
    ValueError
        For a name that is not one of them.
    """
    return tuple(BY_NAME[name] for name in choose("check", BY_NAME, names))
