"""What every test runs under, whatever the machine and the shell: one thread, plain output, the same drawn examples."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from verikda.threads import one_thread

# With a driver NVRTC hands out what it has compiled before, without what tests read of its log.
os.environ["CUDA_CACHE_DISABLE"] = "1"
one_thread()  # before a test imports a numeric library; processes that tests start inherit it

# A test that draws other examples each time, or is timed, can fail on a change that has nothing to do with it.
# `--hypothesis-profile=default` draws others.
settings.register_profile(
    "tests", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests compare text: colours that many CI systems ask for, and options of this pytest, are no part of it."""
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
