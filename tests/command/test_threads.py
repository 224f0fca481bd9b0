"""Numeric libraries run on one thread while a target is checked, however it is started, unless the user says otherwise.

What could go wrong here: variables that are set after the libraries are imported, in processes of a search alone, over
the user's own, or for the user's own programs. (With one core there is one thread in any case, and less is seen.)
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
COUNTS = """
import torch

def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    with open("threads", "a") as file:
        file.write(f"{torch.get_num_threads()}\\n")
    raise NotImplementedError("counts threads, that is all")
"""
CASE = "from verikda.case import Case\nCASE = Case(lengths=(5,), K=3, V=2)\n"
FIXTURE = (
    CASE
    + """
import pytest, torch

def test_mine(verikda_check):
    before = torch.get_num_threads()
    with pytest.raises(pytest.fail.Exception, match="counts threads"):
        verikda_check("counts:chunk_kda", CASE, ("floor",))
    assert torch.get_num_threads() == before
"""
)
PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "-p", "verikda.pytest_plugin")
COMMANDS = {
    "check": ("verikda", "check", "counts:chunk_kda", "--cases", "2"),
    "check in processes": ("verikda", "check", "counts:chunk_kda", "--cases", "2", "--jobs", "2"),
    "probe": ("verikda", "probe", "counts:chunk_kda", "--only", "pool"),
    "pytest": (*PYTEST, "--verikda-target=counts:chunk_kda", "--verikda-cases=2"),
    "fixture": PYTEST,
}


def run(folder: Path, *words: str, **own: str) -> subprocess.CompletedProcess[str]:
    """Without any of these variables but the user's own."""
    plain = {n: v for n, v in os.environ.items() if not n.endswith("_NUM_THREADS")}
    env = plain | {"PYTHONPATH": f"{ROOT}:{folder}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | own
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, timeout=300, check=False)


def threads_of_a_target(name: str, folder: Path, **own: str) -> set[str]:
    (folder / "counts.py").write_text(COUNTS)
    if name == "fixture":
        (folder / "test_mine.py").write_text(FIXTURE)
    done = run(folder, "-m", *COMMANDS[name], **own)
    if name == "fixture":
        assert done.returncode == 0, done.stdout
    assert (folder / "threads").exists(), done.stdout + done.stderr
    return set((folder / "threads").read_text().split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_target_runs_on_one_thread(name: str, tmp_path: Path) -> None:
    assert threads_of_a_target(name, tmp_path) == {"1"}


@pytest.mark.parametrize(("name", "variable"), [("check", "OMP_NUM_THREADS"), ("fixture", "MKL_NUM_THREADS")])
def test_a_target_runs_on_as_many_threads_as_the_user_says(name: str, variable: str, tmp_path: Path) -> None:
    own = {variable: "2"}
    alone = run(tmp_path, "-c", "import torch; print(torch.get_num_threads())", **own).stdout.strip()
    assert threads_of_a_target(name, tmp_path, **own) == {alone}


def test_the_command_line_imports_no_numeric_library_before_it_says_so(tmp_path: Path) -> None:
    ask = "import sys, verikda.cli, verikda.threads; print({'numpy', 'torch'} & set(sys.modules))"
    assert run(tmp_path, "-c", ask).stdout == "set()\n"


def test_a_script_that_is_captured_has_the_threads_that_it_has_alone(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch; print('threads', torch.get_num_threads())")
    alone = run(tmp_path, "script.py")
    captured = run(tmp_path, "-m", "verikda", "capture", "kept", "script.py")
    assert alone.stdout.startswith("threads ")
    assert alone.stdout in captured.stdout
