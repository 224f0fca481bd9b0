"""Captured calls: what is kept, that nothing is changed by keeping it, and files that are none."""

from __future__ import annotations

import json
import sys
import types
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")
pytest.importorskip("safetensors", reason="needs safetensors: pip install 'verikda[torch]'")

import torch
from safetensors.torch import load_file, save_file

import verikda
from oracles.recurrence import forward_reverse
from verikda.capture_calls import Capture
from verikda.capture_file import HEADER, load_call
from verikda.cli import main

sys.path.insert(0, str(Path(__file__).parent / "targets"))
import toy_kda


def inputs(dtype: Any = torch.bfloat16, grad: bool = True, **more: Any) -> dict[str, Any]:
    source = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Any:
        return torch.randn(size, generator=source)

    made = {
        "q": normal(1, 21, 2, 4), "k": normal(1, 21, 2, 4) / 4, "v": normal(1, 21, 2, 3),
        "beta": normal(1, 21, 2).sigmoid(),
    }  # fmt: skip
    made = {n: x.to(dtype) for n, x in made.items()} | {"g": -normal(1, 21, 2, 4).exp()} | more
    return {n: x.requires_grad_(grad) if x.is_floating_point() else x for n, x in made.items()}


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize("names", [{}, {"state_v_first": True, "use_qk_l2norm_in_kernel": True, "scale": 0.5}])
def test_a_call_and_its_gradients_come_back_as_they_were(tmp_path: Path, names: dict[str, Any]) -> None:
    source = torch.Generator().manual_seed(1)
    state = torch.randn(2, 2, *((3, 4) if names else (4, 3)), generator=source)
    given = inputs(initial_state=state, cu_seqlens=torch.tensor([0, 5, 21], dtype=torch.int32))
    kept = verikda.capture(tmp_path)(toy_kda.chunk_kda)
    o, ht = kept(**given, **names, output_final_state=True)
    do, dht = (torch.randn(x.shape, generator=source).to(x.dtype) for x in (o, ht))
    plain, state_after = toy_kda.chunk_kda(**given, **names, output_final_state=True)
    assert torch.equal(o, plain)
    torch.autograd.backward([o, ht], [do, dht])
    (path,) = files(tmp_path)
    call, function = load_call(path)
    assert function == "toy_kda:chunk_kda"
    p = call.problem
    for name, x in (("q", given["q"]), ("v", given["v"]), ("g", given["g"]), ("beta", given["beta"]), ("do", do)):
        np.testing.assert_array_equal(getattr(p, name), x.detach().double().numpy())
    turned = (lambda x: x.mT) if names else (lambda x: x)
    np.testing.assert_array_equal(p.h0, turned(state).detach().double().numpy())
    np.testing.assert_array_equal(p.dht, turned(dht).detach().double().numpy())
    assert p.cu_seqlens is not None
    assert p.cu_seqlens.tolist() == [0, 5, 21]
    assert (p.scale, p.qk_l2norm, call.state_v_first) == ((0.5, True, True) if names else (0.5, False, False))
    assert (call.dtypes["q"], call.dtypes["g"], call.dtypes["cu_seqlens"], call.backward) == (
        "bfloat16", "float32", "int32", True,
    )  # fmt: skip
    truth = forward_reverse(p)
    assert np.abs(truth["o"] - o.detach().double().numpy()).max() < 0.02
    assert np.abs(truth["dq"] - given["q"].grad.double().numpy()).max() < 0.05
    assert np.abs(turned(state_after).detach().double().numpy() - truth["ht"]).max() < 1e-5


def test_inputs_are_copied_before_the_call(tmp_path: Path) -> None:
    def overwrites(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        o = v.clone()
        q.zero_()
        return o

    given = inputs(grad=False)
    before = given["q"].clone()
    verikda.capture(tmp_path)(overwrites)(**given)
    (path,) = files(tmp_path)
    assert torch.equal(load_file(path)["q"], before)
    assert not load_call(path)[0].backward


def test_parameters_behind_kwargs_and_positions_are_seen(tmp_path: Path) -> None:
    def chunk_kda(q: Any, k: Any, v: Any, g: Any, beta: Any, use_gate_in_kernel: bool = False, **kwargs: Any) -> Any:
        return v.clone(), None

    given = inputs(A_log=torch.zeros(1, 1, 2, 1), dt_bias=torch.zeros(8))
    tail = {n: given.pop(n) for n in ("A_log", "dt_bias")}
    order = [given[n] for n in ("q", "k", "v", "g", "beta")]
    verikda.capture(tmp_path)(chunk_kda)(*order, use_gate_in_kernel=True, **tail, chunk_size=32)
    call, _ = load_call(files(tmp_path)[0])
    assert (call.problem.gate, call.chunk_size) == ("softplus", 32)
    assert call.problem.A_log is not None
    assert call.problem.dt_bias is not None
    assert (call.problem.A_log.shape, call.problem.dt_bias.shape) == ((2,), (2, 4))


def test_a_context_takes_the_place_of_operators_and_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = types.ModuleType("model_of_mine")
    model.chunk_kda = toy_kda.chunk_kda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "model_of_mine", model)
    with verikda.capture(tmp_path, ["model_of_mine:chunk_kda"], limit=2) as kept:
        for _ in range(3):
            model.chunk_kda(**inputs())  # type: ignore[attr-defined]
    model.chunk_kda(**inputs())  # type: ignore[attr-defined]
    assert model.chunk_kda is toy_kda.chunk_kda  # type: ignore[attr-defined]
    assert kept.count == 2
    assert [p.name for p in files(tmp_path)] == ["chunk_kda-001.safetensors", "chunk_kda-002.safetensors"]


@pytest.mark.parametrize("calls", ["none", "by a name bound before", "through the module", "that fail"])
def test_a_context_that_saw_no_call_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: str) -> None:
    model = types.ModuleType("model_of_mine")
    model.chunk_kda = before = toy_kda.chunk_kda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "model_of_mine", model)

    def run(**options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with suppress(ZeroDivisionError), Capture(tmp_path, ["model_of_mine:chunk_kda"], **options):
                if calls == "through the module":
                    model.chunk_kda(**inputs())
                elif calls == "by a name bound before":
                    before(**inputs())
                elif calls == "that fail":
                    1 / 0  # noqa: B018
        assert all(w.filename == __file__ for w in said)
        return [str(w.message) for w in said]

    if calls in ("through the module", "that fail"):
        assert not run()
    else:
        (text,) = run()
        assert f"kept nothing in {tmp_path}: nobody called model_of_mine:chunk_kda by" in text
        assert not run(warn=False)


def test_known_operators_are_those_that_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verikda import capture_calls

    monkeypatch.setattr(capture_calls, "KNOWN", ("nowhere.at_all:chunk_kda",))
    with pytest.raises(ValueError, match="no known operator is imported yet: import the model first"):
        verikda.capture(tmp_path).__enter__()
    with pytest.raises(ValueError, match=r"'nowhere.at_all:chunk_kda' cannot be found .*; write module:function"):
        verikda.capture(tmp_path, ["nowhere.at_all:chunk_kda"]).__enter__()
    with pytest.raises(ValueError, match="limit is 0; it must be at least 1"):
        verikda.capture(tmp_path, limit=0)


# ------------------------------------------------------------------ judged


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    o, _ = verikda.capture(tmp_path / "c")(toy_kda.chunk_kda)(**inputs())
    o.float().square().sum().backward()
    return files(tmp_path / "c")[0]


def wrong_decay(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state=None, output_final_state=False) -> Any:
    return toy_kda.chunk_kda(q, k, v, 0.9 * g, beta, None, initial_state, output_final_state)


def test_targets_are_judged_on_a_stored_call(stored: Path) -> None:
    good = CliRunner().invoke(main, ["replay", str(stored), "emulator"])
    assert good.exit_code == 0, good.output
    stored = stored.rename(stored.with_name("a" * 140 + stored.suffix))  # wider than any line: its replay is still one
    bad = CliRunner().invoke(main, ["replay", str(stored), "test_capture:wrong_decay"])
    assert bad.exit_code == 1, bad.output
    assert "floor / o:" in bad.output
    assert f"replay: verikda replay {stored} test_capture:wrong_decay" in bad.output
    for output in (good.output, bad.output):
        assert "prefix" in output
        assert "dq" in output or "emulator" in output


def test_a_stored_call_names_no_target(stored: Path) -> None:
    result = CliRunner().invoke(main, ["replay", str(stored)])
    assert result.exit_code == 2
    assert "holds a captured call and names no target; say which" in result.output


def changed(**change: Any) -> Any:
    """Tensors and header of a good file, with some replaced or (None) left out."""

    def make(path: Path, to: Path) -> None:
        tensors = load_file(path)
        said: Any = {"schema": 1, "function": "f"}
        for name, value in change.items():
            if name == "said":
                said = value if not isinstance(value, dict) else {**said, **value}
            elif value is None:
                del tensors[name]
            else:
                tensors[name] = value
        save_file(tensors, str(to), metadata={HEADER: said if isinstance(said, str) else json.dumps(said)})

    return make


def raw(content: bytes) -> Any:
    return lambda path, to: to.write_bytes(content)


BAD = {
    "no safetensors file": (raw(b"not a file of tensors"), "not a safetensors file"),
    "cut off": (lambda path, to: to.write_bytes(path.read_bytes()[:-5]), "not a safetensors file"),
    "empty": (raw(b""), "not a safetensors file"),
    "weights of a model": (
        lambda path, to: save_file({"w": torch.zeros(2)}, str(to)),
        "none that verikda.capture wrote: its metadata has no",
    ),
    "header is no JSON": (changed(said="{"), "its header is not JSON"),
    "header is a list": (changed(said="[1]"), "its header has schema 'list'; this version reads 1"),
    "another schema": (changed(said={"schema": 2}), "its header has schema 2; this version reads 1"),
    "no function": (changed(said={"function": 3}), "its header names the function 3; it must be text"),
    "unknown flag": (changed(said={"speed": 1}), "its header has the unknown key 'speed'; a call has only scale,"),
    "flag of another type": (changed(said={"safe_gate": 1}), "safe_gate is 1; it must be bool"),
    "scale is no number": (changed(said={"scale": float("nan")}), "scale is nan; it must be float or int or null"),
    "scale is too large": (changed(said={"scale": 10**400}), "scale is 10+; it must be float or int or null"),
    "chunk size": (changed(said={"chunk_size": 48}), "chunk_size is 48; it must be 16, 32 or 64"),
    "no keys": (changed(k=None), "it has no k; a call has q, k, v, beta"),
    "another tensor": (changed(w=torch.zeros(2)), "it has the unknown tensor 'w'"),
    "dtype": (changed(q=torch.zeros(1, 21, 2, 4, dtype=torch.float64)), "q is F64; a call has F16, BF16, F32, I32,"),
    "integers": (changed(q=torch.zeros(1, 21, 2, 4, dtype=torch.int32)), "q is int32; it is a float"),
    "offsets as floats": (changed(cu_seqlens=torch.tensor([0.0, 21.0])), "cu_seqlens is float32; offsets are integers"),
    "axes": (changed(q=torch.zeros(21, 2, 4)), r"q has shape \[21, 2, 4\]; expected \[B,T,heads,channels\]"),
    "shape": (changed(k=torch.zeros(1, 21, 2, 5)), r"k has shape \(1, 21, 2, 5\); the other arguments ask for"),
    "offsets": (changed(cu_seqlens=torch.tensor([0, 30])), "must start at 0, never decrease, and end at or before T"),
    "bias": (changed(dt_bias=torch.zeros(7)), "dt_bias has 7 elements; HV K is 8"),
    "not finite": (changed(v=torch.full((1, 21, 2, 3), torch.nan)), "v holds a value that is not finite"),
    "gate parameters without a gate": (changed(A_log=torch.zeros(2)), "A_log or dt_bias is given with gate 'log'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_sentence(name: str, stored: Path, tmp_path: Path) -> None:
    make, says = BAD[name]
    bad = tmp_path / "bad.safetensors"
    make(stored, bad)
    with pytest.raises(ValueError, match=rf"^{bad}: .*{says}"):
        load_call(bad)
    result = CliRunner().invoke(main, ["replay", str(bad), "emulator"])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    result = CliRunner().invoke(main, ["replay", str(tmp_path / "a.safetensors"), "emulator"])
    assert result.exit_code == 2
    assert "a.safetensors: Is a directory" in result.output


def test_a_large_file_is_not_read(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verikda import capture_file

    monkeypatch.setattr(capture_file, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="bytes, at most 100 are read; capture less"):
        load_call(stored)


# ------------------------------------------------------------------ of a script


SCRIPT = """
import sys
import test_capture, toy_kda
for _ in range(int(sys.argv[1])):
    toy_kda.chunk_kda(**test_capture.inputs())
print("ran", __name__)
"""


def test_calls_of_a_script_are_kept(tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text(SCRIPT)
    options = ["capture", "--function", "toy_kda:chunk_kda", "--limit", "2", str(tmp_path / "c"), str(script)]
    result = CliRunner().invoke(main, [*options, "3"])
    assert result.exit_code == 0, result.output
    assert "ran __main__" in result.output
    assert "kept 2 calls" in result.output
    assert len(files(tmp_path / "c")) == 2
    nothing = CliRunner().invoke(main, [*options, "0"])
    assert nothing.exit_code == 2
    assert "no known operator was called" in nothing.output
    missing = CliRunner().invoke(main, ["capture", str(tmp_path / "c"), str(tmp_path / "none.py")])
    assert missing.exit_code == 2
    assert "is no file; give the Python script" in missing.output


@pytest.mark.parametrize(
    ("end", "status", "says"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no data')", 1, "no data"),
        ("raise ValueError('bad config')", 1, "model.py"),
        ("raise FileNotFoundError(2, 'x', 'weights')", 1, "model.py"),
        ("raise KeyboardInterrupt", 1, "model.py"),
    ],
)
def test_what_was_kept_is_said_however_a_script_ends(end: str, status: int, says: str, tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text(SCRIPT + end)
    options = ["capture", "--function", "toy_kda:chunk_kda", str(tmp_path / "c"), str(script)]
    result = CliRunner().invoke(main, [*options, "1"])
    assert result.exit_code == status
    assert "kept 1 calls" in result.output
    assert says in result.output
    assert "capture_command.py" not in result.output, "an error of the script shows the script"
    assert CliRunner().invoke(main, [*options, "0"]).exit_code == (status or 2)


def test_a_folder_that_cannot_be_is_refused_before_the_script_runs(tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text("print('started')\n" + SCRIPT)
    for folder, says in ((script, "File exists"), (script / "c", "Not a directory")):
        options = ["capture", "--function", "toy_kda:chunk_kda", str(folder), str(script), "1"]
        result = CliRunner().invoke(main, options)
        assert result.exit_code == 2
        assert "started" not in result.output
        assert says in result.output


def test_another_run_leaves_the_calls_of_the_first(tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(1)
    for _ in range(2):
        kept = verikda.capture(tmp_path)(toy_kda.chunk_kda)
        for _ in range(2):
            kept(**inputs() | {"v": torch.randn(1, 21, 2, 3, generator=source).bfloat16()})
    assert [p.name for p in files(tmp_path)] == [f"chunk_kda-00{i}.safetensors" for i in (1, 2, 3, 4)]
    assert len({load_call(p)[0].problem.v.tobytes() for p in files(tmp_path)}) == 4


def test_arrays_of_numpy_are_kept_too(tmp_path: Path) -> None:
    import ml_dtypes

    given = {n: x.detach().float().numpy() for n, x in inputs().items()}
    given |= {n: given[n].astype(ml_dtypes.bfloat16) for n in ("q", "k", "v")}
    verikda.capture(tmp_path)(verikda.chunk_kda)(**given)
    (path,) = files(tmp_path)
    call, _ = load_call(path)
    assert (call.dtypes["q"], call.dtypes["g"]) == ("bfloat16", "float32")
    for name in ("q", "g", "beta"):
        np.testing.assert_array_equal(getattr(call.problem, name), given[name].astype(np.float64))


def test_known_operators_of_a_script_are_imported_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from verikda import capture_command

    broken = ("toy_kda:chunk_kda", "toy_kda:nothing", "nowhere.at_all:f", "verikda.nowhere:f")
    monkeypatch.setattr(capture_command, "KNOWN", broken)
    assert capture_command.installed() == ["toy_kda:chunk_kda"]
