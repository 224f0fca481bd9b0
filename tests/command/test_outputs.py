"""What a command is to write is refused before it runs anything, wherever that cannot be written.

What could go wrong here: hours of work whose page, record or findings cannot be kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from verikda import bench, evidence, false_alarm
from verikda.cli import main
from verikda.record import Record, check_folders, check_outputs

FILES = {
    "check": ("--json", "--summary"),
    "probe": ("--json",),
    "report": ("--json", "--html", "--markdown"),
    "zoo --kill-matrix": ("--json", "--report"),
    "zoo --compare": ("--json", "--report"),
    "bench": ("--json", "--benchmark-json", "--summary"),
    "bench --cpu": ("--json",),
    "replay case zoo": ("--snippet",),
}
FOLDERS = {"check": ("--findings", "--worst"), "probe": ("--findings",), "zoo": ("--findings",)}
MODULES: dict[str, Callable[[list[str]], int]] = {"evidence": evidence.main, "false_alarm": false_alarm.main}


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("closed").mkdir()
    Path("closed/file").write_text("x")
    Path("case").write_text('{"schema": 1}')


def pairs(table: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    return ((command, option) for command, options in table.items() for option in options)


def said(words: str, option: str, path: str) -> str:
    """The one line that a command says, where it has run nothing."""
    result = CliRunner().invoke(main, [*words.split(), option, path])
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sorted(p.name for p in Path().iterdir()) == ["case", "closed", "file"], "nothing is made"
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize(("words", "option"), [*pairs(FILES), *pairs(FOLDERS)])
def test_a_place_below_a_file_is_refused_at_once(words: str, option: str) -> None:
    line = said(words, option, "file/x/y")
    assert line.startswith(f"verikda: {option} file/x/y cannot be written, because ")
    assert line.endswith("/file is a file; name a place in a folder")


@pytest.mark.parametrize(("words", "option"), [*pairs(FILES), *pairs(FOLDERS)])
def test_what_may_not_be_changed_is_refused_at_once(words: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is closed to the superuser, as whom this may run, so the answer of the system is given."""
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK and "closed" in Path(path).parts))
    path = "closed/file" if (words, option) in pairs(FILES) else "closed"
    assert said(words, option, path).endswith(f"because {path} may not be changed here; name another place")
    assert said(words, option, "closed/new").endswith("/closed may not be changed here; name another place")


@pytest.mark.parametrize("name", MODULES)
def test_the_modules_refuse_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "cuda_torch", Mock())  # a GPU, as far as is asked before anything is run
    for path, says in (("file/x", "is a file; name a place in a folder"), ("file", "no JSON Lines of verikda")):
        try:
            status = MODULES[name](["--json", path, *(["--target", "zoo"] if name == "false_alarm" else [])])
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        streams = capsys.readouterr()
        assert (status, streams.out) == (2, "")
        assert says in streams.err


def test_a_folder_closed_to_the_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing is closed to the superuser")
    (tmp_path / "closed").chmod(0o000)
    for check in (check_outputs, check_folders):
        with pytest.raises(ValueError, match="closed may not be changed here"):
            check(json=tmp_path / "closed/a/b")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
@pytest.mark.parametrize("path", [Path("/proc/nowhere/f"), Path("/proc/nowhere")])
def test_a_place_where_nothing_can_be_made_is_refused(path: Path) -> None:
    for check in (check_outputs, check_folders):
        with pytest.raises(ValueError, match=r"nothing can be made in /proc|/proc may not be changed"):
            check(json=path)


def test_what_can_be_made_is_accepted_and_not_made_yet() -> None:
    check_outputs(json=Path("new/a/run.jsonl"), html=Path("file"), summary=Path(os.devnull), markdown=Path(os.devnull))
    check_folders(findings=Path("new/b"), worst=Path())
    assert not Path("new").exists()
    Record(Path("new/a/run.jsonl")).close()
    assert Path("new/a/run.jsonl").is_file()
