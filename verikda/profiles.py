"""Budgets by name, for `verikda check`, for the pytest plugin and as Hypothesis profiles for users' own tests.

Nothing happens at import; `register` hands the profiles to Hypothesis.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase


@dataclass(frozen=True)
class Profile:
    """A budget.

    Attributes
    ----------
    cases : how many in all.
    stratified : how many of them are the fixed start in which every regime, dtype, flag and length class appears.
    long : whether a few cases have thousands of tokens.
    coherent : how many cases more the fixed start has in which one rounding is the whole error.
    brink : how many more in float16 whose largest number is just below 65504.
    turns : checks per case beside those that cost no further call.
    stored : whether Hypothesis keeps failures of users' own tests in its database.
    purpose : one line.
    """

    cases: int
    stratified: int
    long: bool
    coherent: int
    brink: int
    turns: int
    stored: bool
    purpose: str


PROFILES = {
    "dev": Profile(60, 40, False, 0, 0, 2, True, "a look while developing"),
    "ci": Profile(250, 100, True, 40, 8, 2, False, "the same cases in every run: red means that the change did it"),
    "gpu": Profile(1000, 200, True, 80, 16, 3, True, "a machine with a GPU"),
    "nightly": Profile(10_000, 400, True, 160, 32, 3, True, "many new cases"),
    "hunt": Profile(
        2_000, 200, True, 80, 16, 1, True, "the worst case: enough for Hypothesis to climb (below 1000 it has one pass)"
    ),
}


def register(database: str | os.PathLike[str] | None = ".hypothesis/examples") -> None:
    """Register `PROFILES` with Hypothesis; load one with `hypothesis.settings.load_profile`.

    No profile has a deadline: a first call compiles kernels, and shared machines stall.

    Parameters
    ----------
    database : folder of found failures, None to store nothing.
    """
    common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=False, database=None)
    # without a folder, settings need an explicit None: leaving it out means Hypothesis' own default folder
    kept = None if database is None else DirectoryBasedExampleDatabase(Path(database))
    for name, profile in PROFILES.items():
        settings.register_profile(
            name,
            common,
            max_examples=profile.cases,
            derandomize=not profile.stored,
            database=kept if profile.stored else None,
        )
