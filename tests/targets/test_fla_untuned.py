"""Config files for fla's kernels, from stand-ins with the attributes of Triton's decorators."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from verikda.targets import fla_untuned
from verikda.targets.fla_untuned import SHOWN, main, tuned_kernels, write_configs


class Config:
    def __init__(self, kwargs, num_warps=4, num_stages=3, num_ctas=1, maxnreg=None):
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages
        self.num_ctas, self.maxnreg, self.pre_hook, self.ir_override = num_ctas, maxnreg, None, None


class Decorator:
    """`triton.heuristics`."""

    def __init__(self, fn):
        self.fn = fn


class Jit(Decorator):
    def __init__(self, fn):
        super().__init__(fn)
        self.__name__ = fn.__name__


class Autotuner(Decorator):
    def __init__(self, fn, configs):
        super().__init__(fn)
        self.configs = configs


class CachedAutotuner(Autotuner):
    def __init__(self, fn, configs):
        super().__init__(fn, configs)
        self.kernel_name = fn.fn.__name__


class AnyAttribute:
    """As torch.ops: asked for `fn` again and again it would never end."""

    def __getattr__(self, name):
        return self


def jit(module, name):
    def kernel(): ...

    kernel.__module__, kernel.__name__ = module, name
    return Jit(kernel)


def module(**attributes):
    made = types.ModuleType("made")
    vars(made).update(attributes)
    return made


SMALL, LARGE = Config({"BK": 32, "DOT": "ieee"}, num_warps=2, num_stages=1), Config({"BK": 64, "DOT": "tf32"})


@pytest.fixture
def modules():
    shared = Decorator(CachedAutotuner(jit("fla.a", "shared"), [SMALL, LARGE]))
    return {
        "fla": module(missing=None, number=3),
        "fla.a": module(shared=shared, plain=Decorator(Autotuner(jit("fla.a", "plain"), [SMALL, LARGE]))),
        "fla.b": module(
            shared=shared,
            inner=CachedAutotuner(Decorator(jit("fla.b", "outer")), [LARGE, SMALL]),
            one=Autotuner(jit("fla.b", "one"), [SMALL]),
            untuned=jit("fla.b", "untuned"),
            any=AnyAttribute(),
        ),
        "fla.c": None,
        "flax": module(other=CachedAutotuner(jit("flax", "other"), [SMALL, LARGE])),
    }


def test_every_tuned_kernel_of_the_library_is_found_once(modules):
    assert set(tuned_kernels(modules)) == {"fla.a.shared", "fla.a.plain", "fla.b.outer"}


def test_each_file_has_the_first_config(modules, tmp_path):
    folder = tmp_path / "new" / "configs"
    assert write_configs(tuned_kernels(modules), folder, "3.6.0") == (2, ["fla.a.plain"])
    assert {p.name for p in folder.iterdir()} == {"shared.json", "outer.json"}
    assert json.loads((folder / "shared.json").read_text()) == {
        "kernel_name": "shared",
        "triton_version": "3.6.0",
        "default_config": {
            "kwargs": {"BK": 32, "DOT": "ieee"},
            "num_warps": 2,
            "num_stages": 1,
            "num_ctas": 1,
            "maxnreg": None,
            "ir_override": None,
        },
    }
    assert json.loads((folder / "outer.json").read_text())["default_config"]["kwargs"]["BK"] == 64


def test_kernels_of_one_name_and_two_configs_have_no_file(tmp_path):
    kernels = {f"fla.{m}.k": CachedAutotuner(jit(f"fla.{m}", "k"), [c, c]) for m, c in (("a", SMALL), ("b", LARGE))}
    assert write_configs(kernels, tmp_path, "3.6.0") == (0, ["fla.a.k", "fla.b.k"])
    assert not list(tmp_path.iterdir())
    kernels["fla.b.k"].configs = [SMALL, LARGE]
    assert write_configs(kernels, tmp_path, "3.6.0") == (2, [])


@pytest.fixture
def library(modules, monkeypatch):
    """A library of these modules that imports."""
    for place, name in (("kda", "chunk_kda"), ("delta_rule", "chunk_delta_rule")):
        function = jit(f"fla.ops.{place}.chunk", name).fn
        function.__code__ = function.__code__.replace(co_name=name)
        modules[f"fla.ops.{place}"] = module(**{name: function})
    for name, made in {**modules, "fla.ops": module(), "triton": module(__version__="3.6.0")}.items():
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "")  # set by the import, and put back after the test


def test_the_line_says_how_to_use_the_files_and_what_stays_tuned(library, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")
    monkeypatch.chdir(tmp_path)
    assert main(["a b"]) == 0
    assert capsys.readouterr().out == (
        f"wrote configs of 2 kernels; use them with FLA_CACHE_MODE=default FLA_CONFIG_DIR='{tmp_path}/a b'; "
        "without a file, so tuned still: fla.a.plain\n"
    )
    assert Path("a b/shared.json").is_file()
    plain = Autotuner(jit("fla.a", "plain"), [SMALL, LARGE])
    many = {f"fla.a.k{i:02}": plain for i in range(SHOWN + 3)}
    monkeypatch.setattr(fla_untuned, "tuned_kernels", lambda modules: tuned_kernels(modules) | many)
    assert main(["c"]) == 0
    said = capsys.readouterr().out
    assert "tuned still: fla.a.k00, " in said
    assert said.endswith(" and 4 more\n")


def test_a_library_without_such_kernels_is_refused(library, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")
    for name in ("fla.a", "fla.b"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main([str(tmp_path)]) == 2
    assert "no kernel of fla reads a config file" in capsys.readouterr().err


def test_what_cannot_be_done_is_one_sentence_and_exit_status_2(tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.touch()
    assert main([str(file)]) == 2
    assert capsys.readouterr().err == f"folder {file} is a file; name a folder\n"
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "")
    assert main([str(tmp_path / "new")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "new").exists()
