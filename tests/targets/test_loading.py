"""Names that cannot be used say why."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from verikda.targets import TargetError
from verikda.targets.loading import describe, load


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_module_of_the_current_folder(folder):
    (folder / "mykernels").mkdir()
    (folder / "mykernels" / "ops.py").write_text("class kda:\n    @staticmethod\n    def chunk(): return 5\n")
    path = list(sys.path)
    assert load("mykernels.ops:kda.chunk")() == 5
    assert sys.path == path


@pytest.mark.parametrize("spec", ["nocolon", ":f", "module:"])
def test_another_form(spec):
    with pytest.raises(TargetError, match=r"is not of the form package\.module:function"):
        load(spec)


@pytest.mark.parametrize("spec", ["ops.py/x:f", "./ops:f", "a b:f"])
def test_a_path_is_no_module(spec):
    with pytest.raises(TargetError, match=r"write package\.module:function, without \.py or slashes"):
        load(spec)


def test_no_such_module(folder):
    with pytest.raises(TargetError, match="no module named nowhere: install it, or run from the folder"):
        load("nowhere.ops:f")


def test_a_module_that_needs_another(folder):
    (folder / "mykernels1.py").write_text("import nowhere_else\n")
    with pytest.raises(TargetError, match="importing mykernels1 failed: it needs nowhere_else, which is not installed"):
        load("mykernels1:f")


def test_a_module_that_fails(folder):
    (folder / "mykernels2.py").write_text("def f(:\n")
    with pytest.raises(TargetError, match="importing mykernels2 failed: SyntaxError"):
        load("mykernels2:f")


@pytest.mark.parametrize("how", ["import sys; sys.exit(0)", "raise SystemExit"])
def test_a_module_that_ends_python(folder, how):
    """Status 0 of such a module must not become that of a check."""
    (folder / "mykernels4.py").write_text(how + "\n")
    with pytest.raises(TargetError, match="importing mykernels4 failed: SystemExit"):
        load("mykernels4:f")


def test_no_such_name(folder):
    (folder / "mykernels3.py").write_text("def kda(): pass\ndef _hidden(): pass\n")
    with pytest.raises(TargetError, match=r"module mykernels3 \(mykernels3.py\) has no 'f'; its callables are: kda$"):
        load("mykernels3:f")


def test_describe_shows_the_code_that_runs():
    def f():
        pass

    @functools.wraps(f)
    def wrapper():
        return f()

    line = f.__code__.co_firstlineno
    assert f"test_loading.py:{line})" in describe(f)
    assert f"test_loading.py:{line})" in describe(functools.partial(f))
    assert f"test_loading.py:{line})" not in describe(wrapper), "a wrapper is not what it wraps"
    assert describe(np.linalg.norm).endswith(f", numpy {np.__version__}")
    assert "SimpleNamespace" in describe(SimpleNamespace(a=1))
