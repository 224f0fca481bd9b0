"""The properties that a delta-rule implementation must have, each in one place.

`CHECKS` lists them in the order in which they run. Those in `FREE` cost no further call of the target and run on
every case; of the others a few take turns on each case.
"""

from __future__ import annotations

from verikda.checks import adjoint, causal, memory, structure, values
from verikda.checks.base import Check, Context, Failure, Outcome, Verdict

CHECKS: tuple[Check, ...] = (
    *values.CHECKS,
    *adjoint.CHECKS,
    *causal.CHECKS,
    *structure.CHECKS,
    *memory.CHECKS,
)
BY_NAME = {check.name: check for check in CHECKS}
FREE = ("floor", "inputs_unchanged", "empty_passthrough", "padding_rows")

__all__ = ["BY_NAME", "CHECKS", "FREE", "Check", "Context", "Failure", "Outcome", "Verdict", "named"]


def named(names: tuple[str, ...]) -> tuple[Check, ...]:
    """The checks of these names, in the order of `CHECKS`.

    Raises
    ------
    ValueError
        For a name that is not one of them.
    """
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ValueError(f"there is no check {unknown[0]!r}; the checks are {', '.join(BY_NAME)}")
    return tuple(check for check in CHECKS if check.name in names)
