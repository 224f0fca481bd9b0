"""`import verikda` stays light, and the operators load no array library that the caller has not."""

from __future__ import annotations

import subprocess
import sys

import pytest

import verikda


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_loads_none_of_the_heavy_packages():
    heavy = "('torch', 'cupy', 'matplotlib', 'mpmath', 'transformers', 'numpy', 'hypothesis')"
    assert fresh(f"import sys, verikda; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_operators_load_neither_torch_nor_cupy():
    code = "import sys; from verikda import chunk_kda; print([m for m in ('torch', 'cupy') if m in sys.modules])"
    assert fresh(code) == "[]"


def test_every_operator_is_public():
    from verikda import ops

    for name in ops.__all__:
        assert getattr(verikda, name) is getattr(ops, name)
        assert name in verikda.__all__
    with pytest.raises(AttributeError, match=r"no attribute 'chunk_gdn'; it has .*chunk_kda"):
        verikda.chunk_gdn  # noqa: B018
