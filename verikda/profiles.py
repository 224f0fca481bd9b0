"""Hypothesis profiles of this package. Nothing happens at import; call `register`."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

NAMES = ("dev", "ci", "gpu", "nightly", "hunt")


def register(database: str | os.PathLike[str] | None = ".hypothesis/examples") -> None:
    """Register the profiles `NAMES`; load one with `hypothesis.settings.load_profile`.

    ========  =====  ===========================================================================
    profile   cases  for
    ========  =====  ===========================================================================
    dev          50  a developer's machine; failures are kept in `database` and run first
    ci          100  the same cases in every run, nothing stored: red means the change did it
    gpu         300  a machine with a GPU
    nightly   10000  new cases every night, failures kept
    hunt       2000  looking for the worst case: enough for `hypothesis.target` to climb
                     (below 1000 cases it gets a single pass)
    ========  =====  ===========================================================================

    No profile has a deadline: a first call compiles kernels, and shared machines stall.

    Parameters
    ----------
    database : folder of found failures, None to store nothing.
    """
    common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=False)
    # without a folder, settings need an explicit None: leaving it out means Hypothesis' own default folder
    stored = settings(common, database=None if database is None else DirectoryBasedExampleDatabase(Path(database)))
    settings.register_profile("dev", stored, max_examples=50)
    settings.register_profile("ci", common, max_examples=100, derandomize=True, database=None)
    settings.register_profile("gpu", stored, max_examples=300)
    settings.register_profile("nightly", stored, max_examples=10_000)
    settings.register_profile("hunt", stored, max_examples=2_000)
