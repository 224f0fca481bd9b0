"""The example of captured calls: a small Kimi-Linear really is trained, and what it keeps is what is judged."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers.models.kimi_linear", reason="needs transformers: pip install 'verikda[peers]'")
pytest.importorskip("safetensors", reason="needs safetensors: pip install 'verikda[torch]'")

from kernels_cuda.sources import source_hash
from oracles.recurrence import forward_reverse
from verikda import capture_example as example
from verikda.capture_file import load_call
from verikda.targets import resolve

STORED = Path(__file__).parent.parent / "reports" / "cpu"


def test_one_step_is_trained_kept_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "TARGETS", ("transformers", "nowhere"))
    monkeypatch.setattr(example, "TOKENS", 70)
    monkeypatch.setattr(example, "CHECKED", example.CHECKED[:1])
    modeling = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    plain = modeling.chunk_kimi_delta_attention

    @functools.wraps(plain)
    def fused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a fused kernel that is installed was trained with")

    monkeypatch.setattr(modeling, "chunk_kimi_delta_attention", fused)
    arguments = ["--steps", "2", "--folder", str(tmp_path / "c"), "--report", str(tmp_path / "r.md")]
    example.main(arguments)
    kept = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert kept == [f"trained-{kind}-layer{i}.safetensors" for kind in ("bfloat16", "float32") for i in (1, 2)]
    call, function = load_call(tmp_path / "c" / "trained-float32-layer1.safetensors")
    assert function == example.OPERATOR
    p = call.problem
    assert (p.gate, p.qk_l2norm, p.g is not None, call.backward) == ("log", True, True, True)
    truth, found = forward_reverse(p), resolve("transformers").run(call).outputs
    for n, x in truth.items():
        assert np.abs(found[n] - x).max() <= 1e-4 * (np.abs(x).max() + 1e-9), n
    text = (tmp_path / "r.md").read_text()
    assert "2 steps of 2 x 70 bytes" in text
    assert text.count("| trained-float32-layer1 | transformers | pass | o ") == 1
    assert text.count("| nowhere | not run: target 'nowhere' is not known") == 4
    assert text.count("| g, nats per token |") == 6
    assert "- transformers ran transformers.models.kimi_linear" in text


def test_kept_calls_are_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(example, "TARGETS", ("transformers",))
    monkeypatch.setattr(example, "CHECKED", example.CHECKED[:1])
    before, section, _ = (STORED / "captured.md").read_text().partition(example.VERDICTS)
    report = tmp_path / "r.md"
    report.write_text(before + section + " of other kernels")
    example.main(["--again", "--folder", str(STORED / "captured"), "--report", str(report)])
    text = report.read_text()
    assert text.startswith(before + section + "\n\nChecks: floor.\n")
    assert "of other kernels" not in text
    assert text.count(" | transformers | pass | o ") == 4
    for arguments, says in (
        (["--folder", str(tmp_path)], "the folder holds no captured call"),
        (["--report", str(STORED / "transformers.md")], "the report has no section"),
        (["--report", str(tmp_path / "none.md")], "No such file"),
    ):
        with pytest.raises(SystemExit) as ended:
            example.main(["--again", "--report", str(report), *arguments])
        assert ended.value.code == 2
        assert says in capsys.readouterr().err


def test_the_stored_calls_are_small_whole_and_in_the_report() -> None:
    files = sorted((STORED / "captured").iterdir())
    assert len(files) == 4
    assert sum(path.stat().st_size for path in files) < 1_000_000
    text = (STORED / "captured.md").read_text()
    advice = "python -m verikda.capture_example --again"
    assert f"- verikda:host ran kernels_cuda {source_hash()}, " in text, f"of other kernels: {advice}"
    for path in files:
        call, _ = load_call(path)
        median = float(np.quantile(example.distribution(call)["beta"], 0.5))
        (row,) = [line for line in text.splitlines() if line.startswith(f"| beta | {path.stem} |")]
        assert row.split(" | ")[5] == f"{median:.3g}"
        assert f"| {path.stem} | transformers |" in text
