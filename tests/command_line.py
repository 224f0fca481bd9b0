"""The `verikda` command, as tests run it in their own process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from verikda.cli import main


def verikda(*words: object) -> Result:
    """What the command printed and its exit status; any other exception than that of its end is a failure."""
    result = CliRunner().invoke(main, [str(w) for w in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result
