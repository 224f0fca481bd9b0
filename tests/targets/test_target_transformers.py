"""Kimi-Linear's torch functions are really what runs, and they are right."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace

import calls
import numpy as np
import pytest

from oracles.recurrence import forward_reverse

pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[peers]'")
pytest.importorskip("transformers.models.kimi_linear", reason="needs transformers: pip install 'verikda[peers]'")

import torch

from verikda.targets import TargetError, resolve
from verikda.targets import transformers as module

NAMES = ("transformers", "transformers:recurrent")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 0.02), ("float16", 2e-3)])
@pytest.mark.parametrize("h0", [True, False])
def test_right(name, dtype, tolerance, h0):
    call = calls.make(dtype, shape=(2, 37, 2, 2, 5, 3), h0=h0, problem={"qk_l2norm": True}, chunk_size=16)
    result = resolve(name).run(call)
    expected = forward_reverse(call.problem)
    assert set(result.outputs) == set(expected)
    for n, value in expected.items():
        assert np.abs(result.outputs[n] - value).max() <= tolerance * (np.abs(value).max() + 1), n
    assert result.dtypes["o"] == dtype
    assert result.dtypes["ht"] == "float32"


@pytest.mark.parametrize("name", NAMES)
def test_memory_changes_nothing(name):
    call = calls.make("bfloat16", shape=(2, 18, 2, 2, 3, 4), chunk_size=16)
    target = resolve(name)
    plain = target.run(call)
    for layout in ("sliced", "strided", "expanded", "misaligned"):
        other = target.run(replace(call, layout=layout, poison=np.nan))
        assert other.changed == ()
        assert all(np.array_equal(plain.outputs[n], other.outputs[n]) for n in plain.outputs), layout


@pytest.mark.parametrize("name", NAMES)
def test_capabilities(name):
    c = resolve(name).capabilities
    for field in ("grouped", "packed", "empty", "scale", "beta_sigmoid", "safe_gate", "state_v_first", "recompute"):
        assert not getattr(c, field), field
    assert c.initial_state
    assert c.dht
    assert c.qk_l2norm
    assert c.gates == ("log",)
    assert c.chunk_sizes == ((16, 32, 64) if name == "transformers" else (64,))


def test_hard_reset():
    """The claim in `capabilities`: token by token it works, by differences of cumulative gates it does not."""
    call = calls.make(shape=(1, 4, 1, 1, 2, 2))
    call.problem.g[0, 1] = -np.inf
    assert resolve("transformers:recurrent").capabilities.hard_reset
    assert not resolve("transformers").capabilities.hard_reset
    expected = forward_reverse(call.problem)
    right = resolve("transformers:recurrent").run(call).outputs
    for n, value in expected.items():
        assert np.abs(right[n] - value).max() <= 1e-5 * (np.abs(value).max() + 1), n
    assert np.isnan(resolve("transformers").run(call).outputs["o"]).any()


def test_where_it_runs():
    assert {resolve(name).device for name in NAMES} == {"cpu"}
    if not torch.cuda.is_available():
        with pytest.raises(
            TargetError, match="target transformers:cuda asks for device 'cuda', but torch finds no GPU"
        ):
            resolve("transformers:cuda")


def test_contracts():
    call = calls.make("bfloat16", chunk_size=32)
    assert resolve("transformers").contract(call).name == "float32-c32"
    assert resolve("transformers:recurrent").contract(call).chunk is None


def test_a_fused_kernel_that_is_installed_does_not_run_instead(tmp_path):
    (tmp_path / "fla.py").write_text("def chunk_kda(q, k, v, g, beta, **kwargs):\n    return 'fused kernel', None\n")
    script = textwrap.dedent(
        """
        import calls
        from transformers.models.kimi_linear import modeling_kimi_linear as m
        from verikda.targets import resolve
        print(m.chunk_kimi_delta_attention(1, 2, 3, 4, 5)[0])
        result = resolve("transformers").run(calls.make(shape=(1, 3, 1, 1, 2, 2)))
        print(result.outputs["o"].shape, result.ran)
        """
    )
    import pathlib

    here = pathlib.Path(__file__).parent
    path = [str(tmp_path), str(here), str(here.parent.parent)]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{script}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 0, run.stderr
    assert lines[0] == "fused kernel", "the decorated function is replaced, so this test can tell"
    assert lines[1].startswith("(1, 3, 1, 2) transformers.models.kimi_linear.modeling_kimi_linear.chunk_kimi_delta_")
    assert "transformers/models/kimi_linear/modeling_kimi_linear.py:" in lines[1]


def test_a_function_that_cannot_be_unwrapped(monkeypatch):
    from transformers.models.kimi_linear import modeling_kimi_linear

    monkeypatch.setattr(modeling_kimi_linear, "chunk_kimi_delta_attention", lambda query, key: None)
    with pytest.raises(TargetError, match="could not be unwrapped to the model's own torch code"):
        module.chunked()
    monkeypatch.delattr(modeling_kimi_linear, "chunk_kimi_delta_attention")
    with pytest.raises(TargetError, match="has no chunk_kimi_delta_attention"):
        module.chunked()
