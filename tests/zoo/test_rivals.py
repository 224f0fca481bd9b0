"""The judges of today's tests do what their projects' tests do, neither kinder nor harsher, and are scored fairly.

What could go wrong here: a judge that complains of everything and is praised for it, a reference that is wrong, a
limit that is not theirs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from oracles.recurrence import forward_reverse
from verikda.cli import main
from verikda.zoo import page, rivals, tables, trials
from verikda.zoo.naive import naive
from verikda.zoo.rivals import Complaints, Trialed, judged, scores
from verikda.zoo.specimens import HEALTHY, SPECIMENS
from verikda.zoo.trials import TRIALS, Trial

SMALL = (
    Trial("T = 63", (63,), H=1, HV=1),
    Trial("float32", (40, 40), dtype="float32", D=8),
    Trial("pack", (15, 20), packed=True, gate="softplus", l2norm=True, dtype="bfloat16"),
)


@cache
def small() -> list[Trialed]:
    return [Trialed(t, trials.make_call(t)) for t in SMALL]


@pytest.mark.parametrize("gate", ["log", "softplus", "bounded", "none"])
def test_the_naive_recurrence_is_the_oracle_in_float64(gate: Any) -> None:
    trial = Trial("x", (9, 4, 7), packed=True, H=2, HV=4, D=5, gate=gate, l2norm=True, sigmoid=True, neg_eigval=True,
                  lower_bound=-5.0 if gate == "bounded" else None)  # fmt: skip
    p = trials.make_call(trial).problem
    truth, tried = forward_reverse(p), naive(p, "float64")
    assert truth.keys() == tried.keys()
    for name, expected in truth.items():
        np.testing.assert_allclose(tried[name], expected, rtol=0, atol=1e-12 * np.abs(expected).max(), err_msg=name)


def test_the_naive_recurrence_rounds_in_its_dtype() -> None:
    t = small()[0]
    error = {d: float(np.abs(naive(t.call.problem, d)["o"] - t.truth["o"]).max()) for d in ("float32", "float16")}
    assert error["float32"] < 1e-5 < 1e-4 < error["float16"]


def test_rms_ratios_are_judged_by_their_limits() -> None:
    t = small()[0]
    for name, limit in t.limits.items():
        if name in t.truth:
            for factor, complains in ((0.99, False), (1.01, True)):
                wrong = t.truth[name] * (1 + factor * limit)
                assert rivals.rms(t, name, wrong, "float16") is complains
    assert rivals.rms(t, "o", np.full_like(t.truth["o"], np.nan), "float16")
    assert not rivals.rms(t, "o", t.truth["o"] + 9e-7, "float16")
    assert (t.limits["o"], t.limits["dg"]) == (0.005, 0.02)
    assert small()[2].limits["dg"] == 0.015


def test_their_ci_forgives_small_differences() -> None:
    t = small()[0]
    big = replace(t.trial)
    scaled = Trialed(big, t.call)
    scaled.__dict__["truth"] = {n: 100 * x for n, x in t.truth.items()}
    assert not rivals.rms_in_ci(scaled, "o", scaled.truth["o"] * 1.009, "float16")
    assert rivals.rms_in_ci(scaled, "o", scaled.truth["o"] * 1.5, "float16")
    assert not rivals.rms_in_ci(t, "o", t.truth["o"] + 0.29, "float16")
    assert rivals.rms_in_ci(t, "o", t.truth["o"] * np.inf, "float16")


def test_allclose_is_that_of_torch() -> None:
    t = small()[1]
    o = t.truth["o"]
    assert not rivals.allclose(t, "o", o + 0.9e-5, "float32")
    assert rivals.allclose(t, "o", o + 2e-5 + 2e-6 * np.abs(o), "float32")


def test_twice_the_error_of_the_same_dtype() -> None:
    t = small()[2]
    own = float(np.abs(t.same["ht"] - t.truth["ht"]).max())
    assert own > 0
    assert not rivals.twice_same_dtype(t, "ht", t.same["ht"], "float32")
    assert rivals.twice_same_dtype(t, "ht", t.truth["ht"] + 2.5 * own + 1e-6, "float32")


def test_a_fault_counts_only_where_health_is_silent() -> None:
    healthy = judged(HEALTHY, small(), {})
    assert healthy["rms"].of == frozenset()
    assert len(healthy["allclose"].of) > 10  # in 16 bits it complains of everything
    lines = [rivals._line(HEALTHY, healthy, {})]
    lines += [
        rivals._line(SPECIMENS[n], judged(SPECIMENS[n], small(), healthy), healthy)
        for n in ("STATE_TRANSPOSED", "DQ_OFF", "INPUT_OVERWRITTEN")
    ]
    found = {judge: set(score.found) for judge, score in scores(lines).items()}
    assert found["rms"] == {"STATE_TRANSPOSED"}
    assert found["rms, CI"] == {"STATE_TRANSPOSED"}
    assert found["allclose"] == {"STATE_TRANSPOSED", "DQ_OFF"}
    assert scores(lines)["rms"].alarms == 0
    assert scores(lines[1:]) == {}
    assert lines[1]["outputs"] < lines[0]["outputs"]  # every judge had found it


def test_the_trials_are_what_they_say() -> None:
    assert len({t.name for t in TRIALS}) == len(TRIALS)
    assert {t.dtype for t in TRIALS} == {"float16", "bfloat16", "float32"}
    assert {t.gate for t in TRIALS} == {"log", "softplus", "bounded", "none"}
    assert max(max(t.lengths) for t in TRIALS) == 2048
    call = trials.make_call(TRIALS[0])
    np.testing.assert_allclose(np.linalg.norm(call.problem.k, axis=-1), 1, atol=1e-3)
    assert call.problem.q.min() >= 0  # torch.rand


def test_the_command_compares_and_resumes(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(rivals, "prepared", small)
    record, report = tmp_path / "zoo.jsonl", tmp_path / "zoo.md"
    arguments = ["zoo", "--compare", "--fault", "state_transposed", "--json", str(record), "--report", str(report)]
    first = CliRunner().invoke(main, arguments)
    assert first.exit_code == 0, first.output
    lines = record.read_text().splitlines()
    assert len(lines) == 3
    again = CliRunner().invoke(main, arguments)
    assert record.read_text().splitlines() == lines
    assert again.exit_code == 0
    assert "judged as people do today" in report.read_text()


def test_the_table_compares_the_same_faults() -> None:
    def rival(name: str, **of: list[str]) -> dict[str, Any]:
        return {"kind": "rival", "specimen": name, "outputs": 10,
                "complaints": {j: of.get(j.replace(", ", "_"), []) for j in rivals.JUDGES}}  # fmt: skip

    lines = [
        rival("NONE", allclose=["a / o"]),
        rival("DQ_OFF"),
        rival("STATE_TRANSPOSED", rms=["b"]),
    ]
    header, body = tables.comparison(lines)
    assert header == ["place", "faults", "rms", "rms, CI", "allclose", "2x"]
    assert body == [
        ["state", "1", "1", "0", "0", "0"],
        ["gradient", "1", "0", "0", "0", "0"],
        ["**all**", "**2**", "**1**", "**0**", "**0**", "**0**"],
        ["false alarms", "", "0 of 10 outputs", "0 of 10 outputs", "1 of 10 outputs", "0 of 10 outputs"],
    ]
    assert Complaints(3).of == frozenset()
    assert "| **all** | **2** |" in page.page(lines)
