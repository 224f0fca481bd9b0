"""Every option of every command and module says what it does."""

from __future__ import annotations

import argparse
import importlib
import sys

import click
import pytest

from verikda.cli import main


@pytest.mark.parametrize(
    "module",
    ["verikda.capture_example", "verikda.evidence", "verikda.false_alarm", "oracles.certify", "kernels_cuda.audit"],
)
def test_every_option_of_a_module_is_described(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(Exception):  # noqa: N818
        pass

    def look(parser: argparse.ArgumentParser, *given: object) -> None:
        raise Seen(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", look)
    monkeypatch.setattr(sys, "argv", [module])
    with pytest.raises(Seen) as seen:
        importlib.import_module(module).main()
    (parser,) = seen.value.args
    assert len(parser.description) > 40
    assert [action.dest for action in parser._actions if not action.help] == []


def test_every_option_of_a_command_is_described() -> None:
    for name, command in main.commands.items():
        assert command.help
        options = [p for p in command.params if isinstance(p, click.Option)]
        assert [f"{name} {p.name}" for p in options if not p.help] == []
