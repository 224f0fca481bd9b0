"""Budgets by name, for `verikda check` and for the pytest plugin."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """A budget.

    Attributes
    ----------
    cases : how many in all.
    stratified : how many of them are the fixed start in which every regime, dtype, flag and length class appears.
    long : whether a few cases have thousands of tokens.
    wide : how many cases more have the channels of real models.
    coherent : how many cases more the fixed start has in which one rounding is the whole error.
    brink : how many more in float16 whose largest number is just below 65504.
    turns : checks per case beside those that cost no further call.
    """

    cases: int
    stratified: int
    long: bool
    wide: int
    coherent: int
    brink: int
    turns: int


PROFILES = {
    "dev": Profile(60, 40, False, 2, 0, 0, 2),
    # the same cases in every run: red means that the change did it
    "ci": Profile(250, 100, True, 8, 40, 8, 2),
    "gpu": Profile(1000, 200, True, 16, 80, 16, 3),
    "nightly": Profile(10_000, 400, True, 32, 160, 32, 3),
    # the worst case: enough for Hypothesis to climb (below 1000 it has one pass)
    "hunt": Profile(2_000, 200, True, 16, 80, 16, 1),
}
