"""What every test runs under, whatever the machine and the shell: one thread, plain output, the same drawn examples."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from verikda.threads import one_thread

one_thread()  # before a test imports a numeric library; processes that tests start inherit it

# A test that draws other examples each time, or is timed, can fail on a change that has nothing to do with it.
# `--hypothesis-profile=default` draws others.
settings.register_profile(
    "tests", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many CI systems ask for colours by a variable; tests compare text."""
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
