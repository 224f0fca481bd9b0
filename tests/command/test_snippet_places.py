"""A standalone script finds the function that was checked, whatever name the target was given by."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from verikda import targets
from verikda.case import Case
from verikda.inputs import make_call
from verikda.snippet import write_snippet

pytest.importorskip("torch", reason="a script calls a torch function: pip install 'verikda[torch]'")

TOY = Path(__file__).parent.parent / "targets"
CODE = """
import functools
from toy_kda import chunk_kda
from verikda.targets.torch_function import TorchFunction
part = functools.partial(chunk_kda, scale=None)
class Kernel:
    def __call__(self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
        return chunk_kda(q, k, v, g, beta, scale, initial_state, output_final_state)
    method = __call__
instance = Kernel()
def plain(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    return chunk_kda(q, k, v, g, beta, scale, initial_state, output_final_state)
undecorated = TorchFunction(plain, "undecorated", device="cpu")
@functools.wraps(plain)
def plain(*args, **kwargs):
    raise AssertionError("what a decorator puts in its place was not checked")
ready = TorchFunction(chunk_kda, "ready", device="cpu")
hidden = TorchFunction(functools.partial(chunk_kda), "hidden", device="cpu")
"""
REGISTERED = {
    "of a partial": "places_kda:part", "of:an instance": "places_kda:instance", "with:colon": "places_kda:chunk_kda",
    "ready": "places_kda:ready",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "places_kda.py").write_text(CODE)
    monkeypatch.syspath_prepend(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "places_kda", raising=False)
    points = [EntryPoint(name, value, targets.GROUP) for name, value in REGISTERED.items()]
    monkeypatch.setattr(targets, "_entry_points", lambda: points)


def write(name: str, path: Path) -> None:
    target = targets.resolve(name)
    write_snippet(path, target, make_call(Case(lengths=(3,))), name)


@pytest.mark.parametrize(
    "name", [*REGISTERED, "places_kda:instance.method", "places_kda:part", "places_kda:ready", "places_kda:undecorated"]
)
def test_a_script_imports_what_was_checked(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "script.py")
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(TOY)!r}); exec(open('script.py').read())"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout.splitlines()[-1:]) == (0, ["PASS"]), run.stderr


def test_a_function_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(targets.TargetError, match="cannot import the function of places_kda:hidden; replay the file"):
        write("places_kda:hidden", tmp_path / "script.py")
