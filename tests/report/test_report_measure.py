"""What is kept of a case: numbers recomputed here from their definitions, and faults that must show in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from losing import LOST, Losing
from planted import Planted

from kernels_cuda.modules import load
from oracles.gates import log_decay
from oracles.recurrence import forward_reverse
from verikda.call import Call, Capabilities, Crashed, Result
from verikda.case import DTYPES, Case
from verikda.dtypes import format_of, ulp
from verikda.inputs import make_call
from verikda.permits import permits
from verikda.report import anchors, exponentials, flags, inverse, tables
from verikda.report.grid import GRIDS, Point, flag_points, points
from verikda.report.measure import PROBABILITIES, fitted, head_means, measure
from verikda.report.stages import STAGES, stage_line
from verikda.targets import own, resolve
from verikda.targets.contracts import NAMES
from verikda.targets.emulator import Emulator

CASE = Case(
    lengths=(40,), heads=2, K=8, V=8, dtype="bfloat16", chunk_size=16, gate_magnitude=0.1, h0="random", dht=True
)
ALL = frozenset({"ulps", "bias", "positions", "contracts"})


def spoiled(change: Callable[[str, Any], Any], **capabilities: Any) -> Planted:
    """The emulator with its outputs changed by a function."""

    def each(call: Call, result: Result) -> Result:
        return replace(result, outputs={n: change(n, x.copy()) for n, x in result.outputs.items()})

    return Planted(Emulator(), each, **capabilities)


def test_numbers_of_an_output_are_those_of_their_definitions() -> None:
    line = measure(Emulator(), Point("seeds", CASE, ALL))
    call = make_call(CASE)
    truth, result = forward_reverse(call.problem), Emulator().run(call)
    assert line["verdict"] == "pass"
    for name, o in line["outputs"].items():
        error = result.outputs[name] - truth[name]
        assert o["error"] == pytest.approx(np.linalg.norm(error) / np.linalg.norm(truth[name]), rel=1e-3)
        assert 0.1 < o["ratio"] < 4
        assert 0.3 * o["error"] < o["floor"] < 5 * o["error"]
        ulps = np.sort((np.abs(error) / ulp(truth[name], result.dtypes[name])).ravel())
        assert line["ulps"][name][-1] == pytest.approx(ulps[-1], rel=1e-3)
        assert line["ulps"][name][PROBABILITIES.index(0.5)] == pytest.approx(ulps[(len(ulps) - 1) // 2], rel=1e-3)
    error = result.outputs["dh0"] - truth["dh0"]
    wanted = [error[:, h].mean() / math.sqrt((error**2).mean()) for h in range(2)]
    assert line["bias"]["dh0"] == pytest.approx(wanted, rel=1e-3)
    where = line["positions"]
    assert where["tokens"][:2] == [0.5, 1.5]
    assert len(where["o"]["error"]) == 40
    assert where["o"]["error"][3] == pytest.approx(
        math.sqrt(((result.outputs["o"] - truth["o"])[:, 3] ** 2).mean()), rel=1e-3
    )
    together = math.sqrt(sum(e**2 for e in where["o"]["error"]) / sum(f**2 for f in where["o"]["floor"]))
    assert 0.3 < together < 2


def test_other_contracts_see_the_storage_of_16_bits() -> None:
    line = measure(Emulator(), Point("regimes", CASE, ALL))
    assert set(line["contracts"]) == {*NAMES} - {"storage16"}
    assert line["contracts"]["float32"]["ht"] > 100
    single = measure(Emulator(), Point("regimes", replace(CASE, dtype="float32"), ALL))
    assert set(single["contracts"]) == {"recurrent32"}, "the others are the declared one of float32 inputs"


def test_a_wrong_output_fails_and_no_other() -> None:
    line = measure(spoiled(lambda n, x: x * 1.1 if n == "dv" else x), Point("regimes", CASE))
    assert line["verdict"] == "fail"
    assert {n for n, o in line["outputs"].items() if o["verdict"] == "fail"} == {"dv"}
    assert line["outputs"]["dv"]["ratio"] > 4
    assert line["outputs"]["dv"]["message"].startswith("dv[")


def test_values_that_are_not_finite_are_counted_and_end_the_measured_frontier() -> None:
    def spoil(name: str, x: Any) -> Any:
        if name == "dk":
            x[0, 1, 0, :3] = np.inf
        return x

    line = measure(spoiled(spoil), Point("gates", replace(CASE, gate_regime="bound", gate_magnitude=2.0)))
    assert line["outputs"]["dk"]["nonfinite"] == 3
    assert line["outputs"]["dk"]["ratio"] == math.inf
    fine = measure(Emulator(), Point("gates", replace(CASE, gate_regime="bound", gate_magnitude=1.0)))
    table = tables.gate_map([fine, line])
    assert table is not None
    assert [c.text for c in table.rows[0][-2:]] == ["1", "1"]
    assert table.rows[0][4].level == "inf"


def test_a_bias_shows_and_its_absence_too() -> None:
    seeds = [Point("seeds", replace(CASE, seed=s), frozenset({"bias"})) for s in range(5)]
    drift = spoiled(lambda n, x: x + 0.5 * ulp(x, "bfloat16") if n == "o" else x)
    for target, biased in ((Emulator(), False), (drift, True)):
        mean, error, heads = tables.bias([measure(target, p) for p in seeds])["emulator", "bfloat16", "o"]
        assert heads == 10
        assert (abs(mean) > 5 * error) is biased
    assert head_means("o", np.zeros((1, 2, 3, 4))) == [0.0, 0.0, 0.0]


def test_a_crash_is_a_failure_and_a_missing_feature_is_not() -> None:
    class Broken(Emulator):
        def run(self, call: Call) -> Result:
            raise Crashed("RuntimeError: out of luck\nand a traceback")

    line = measure(Broken(), Point("regimes", CASE))
    assert (line["verdict"], line["detail"]) == ("fail", "crashed: RuntimeError: out of luck")
    shy = spoiled(lambda n, x: x, dtypes=("float32",))
    line = measure(shy, Point("regimes", CASE))
    assert (line["verdict"], line["detail"]) == ("not run", "the target does not support dtype bfloat16")


NARROW = {
    "few sizes, gate, norm and sigmoid in the kernel": Capabilities(
        dtypes=("bfloat16",), chunk_sizes=(64,), rules=("kda",), gates=("bounded",), k_sizes=(128,), v_sizes=(128,),
        backward=False, dht=False, g_dtypes=("same",), beta_dtypes=("same",), required=("qk_l2norm", "beta_sigmoid"),
    ),
    "only delta, no state": Capabilities(rules=("delta",), gates=(), k_sizes=(64, 128), initial_state=False),
}  # fmt: skip


@pytest.mark.parametrize("name", NARROW)
def test_a_case_is_fitted_to_a_target_but_for_what_its_series_is_about(name: str) -> None:
    c = NARROW[name]
    made = [p for p in points(GRIDS["quick"]) if p.case.dtype == "bfloat16"]
    run = {p.series for p in made if permits(c, fitted(p, c)) is None}
    assert run >= {"regimes", "seeds", "keys", "lengths"}
    beyond = [p for p in made if p.series == "gates" and (p.case.gate_magnitude > 5 or p.case.chunk_size < 64)]
    assert all(permits(c, fitted(p, c)) for p in beyond)
    assert ("gates" in run) is ("kda" in c.rules)
    above_one = [p for p in points(GRIDS["full"]) if p.case.beta_regime == "up_to_two"]
    assert all(permits(c, fitted(p, c)) for p in above_one) is ("beta_sigmoid" in c.required)
    everything = Capabilities()
    assert all(fitted(p, everything) == p.case for p in made), "nothing is to be changed for who supports everything"


def test_a_fitted_gate_has_the_decay_that_was_asked_for() -> None:
    c = next(iter(NARROW.values()))
    point = Point("gates", replace(CASE, gate_regime="bound", gate_magnitude=2.0, chunk_size=64))
    problem = make_call(fitted(point, c), backward=False).problem
    assert log_decay(problem, problem.g) == pytest.approx(-2.0, rel=1e-2)


def test_states_are_left_out_where_a_target_takes_none() -> None:
    forward = spoiled(lambda n, x: x, backward=False)
    line = measure(forward, Point("regimes", CASE))
    assert set(line["outputs"]) == {"o", "ht"}


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_has_every_axis_for_every_dtype(name: str) -> None:
    made = list(points(GRIDS[name]))
    assert len({(p.series, p.case) for p in made}) == len(made)
    for dtype in DTYPES:
        mine = [p for p in made if p.case.dtype == dtype]
        assert {p.series for p in mine} == {"regimes", "stages", "seeds", "keys", "safe", "gates", "lengths"}
        gates = [p.case for p in mine if p.series == "gates"]
        for chunk in GRIDS[name].chunks:
            reach = [c.gate_magnitude for c in gates if c.chunk_size == chunk]
            assert min(reach) < exponentials.frontier(dtype, chunk) < max(reach), (
                "the frontier lies outside of the grid"
            )


def test_intermediates_of_the_emulator_lose_what_their_dtype_loses() -> None:
    case = replace(CASE, lengths=(32,))
    line = stage_line(Emulator(), Point("stages", case))
    assert list(line["errors"]) == [n for n in STAGES if n in line["errors"]]
    assert set(line["errors"]) == set(STAGES)
    unit = format_of("bfloat16").unit_roundoff
    for name, e in line["errors"].items():
        low, high = (0.0, 1e-5) if name in ("Gamma", "L") else (unit / 100, 4 * unit)
        assert low <= e <= high, (name, e)
    assert stage_line(resolve("zoo"), Point("stages", case))["verdict"] == "not run"


def test_intermediates_of_the_kernels_are_those_of_the_emulator() -> None:
    case = replace(CASE, lengths=(16,), heads=1, K=4, V=4)
    line = stage_line(resolve("verikda:host"), Point("stages", case))
    assert line["verdict"] == "measured", line["detail"]
    emulated = stage_line(Emulator(), Point("stages", case))["errors"]
    assert set(line["errors"]) == set(emulated) - {"L"}
    for name, e in line["errors"].items():
        assert e <= max(3 * emulated[name], 1e-6), (name, e, emulated[name])


def test_each_set_of_flags_is_a_target_and_none_is_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def host(backend: str, flags: tuple[str, ...]) -> Any:
        asked.append(flags)
        return load("host")

    if own.gpu_missing() is not None:
        assert flags.flag_targets() == ()
        flags.flag_targets.cache_clear()
        monkeypatch.setattr(own, "gpu_missing", lambda: None)
    monkeypatch.setattr(flags, "load", host)
    monkeypatch.setattr(flags, "compiler", lambda: "NVRTC 13.0")
    made = flags.flag_targets()
    shipped, *others = flags.FLAGS.values()
    assert asked == [shipped, *((*other, "--no-cache") for other in others)]
    assert made[-1].name == "verikda, fast math"
    line = measure(made[-1], Point("flags", replace(CASE, lengths=(16,), heads=1, K=4, V=4)))
    assert line["verdict"] == "pass", line
    assert set(line["outputs"]) == {"o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0"}
    flags.flag_targets.cache_clear()


def test_the_values_that_a_build_changes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "flag_targets", lambda: (resolve("zoo"), resolve("zoo"), resolve("zoo:DV_OFF")))
    case = replace(CASE, dtype="float32")
    lines = list(flags.flag_lines(Point("flags", case)))
    assert [set(x["changed"].values()) for x in lines[:2]] == [{0.0}, {0.0}]
    assert {n for n, share in lines[2]["changed"].items() if share} == {"dv"}
    call = make_call(case)
    dv, planted = (resolve(name).run(call).outputs["dv"] for name in ("zoo", "zoo:DV_OFF"))
    assert lines[2]["changed"]["dv"] == pytest.approx(np.mean(dv != planted), rel=1e-3)
    table = tables.builds(lines)
    assert table is not None
    shipped, fault = ({h: cell.text for h, cell in zip(table.headers, row, strict=True)} for row in table.rows)
    assert (shipped["build"], shipped["verdict"], shipped["cases"], shipped["dv"]) == (
        "zoo:NONE",
        "pass",
        "2 pass",
        "0",
    )
    assert (fault["build"], fault["verdict"], fault["cases"], fault["o"]) == ("zoo:DV_OFF", "fail", "1 fail", "0")
    assert fault["worst ratio"].endswith(" dv")
    assert fault["dv"] == "100 %"


def test_flags_are_measured_on_divisions_roots_and_subnormal_numbers() -> None:
    cases = [p.case for p in flag_points(GRIDS["wide"])]
    for dtype in DTYPES:
        mine = [c for c in cases if c.dtype == dtype]
        assert {(c.gate_regime, c.key_regime) for c in mine} >= {(r[0], r[2]) for r in GRIDS["wide"].regimes}
        assert any(c.qk_l2norm and c.beta_sigmoid and c.gate == "softplus" for c in mine)
    p = make_call(next(c for c in cases if c.dtype == "float32" and c.v_exponent < 0)).problem
    dk = np.abs(forward_reverse(p)["dk"])
    assert np.mean((dk > 0) & (dk < np.finfo(np.float32).tiny)) > 0.9


# ------------------------------------------------------------------ the notes' claims


def test_both_inverses_are_exact_where_nothing_rounds() -> None:
    N = np.tril(np.array([[[0, 0, 0, 0], [1, 0, 0, 0], [2, -1, 0, 0], [-1, 2, 1, 0]]], np.float32), -1)
    wanted = np.rint(np.linalg.inv(np.eye(4) + N))  # whole numbers, as N is
    for method in (inverse.substitution, inverse.neumann):
        np.testing.assert_array_equal(method(N, "float16"), wanted)


def test_the_series_loses_to_substitution_and_the_more_so_the_more_keys_agree() -> None:
    N = {c: inverse.correlated(c, 0.95) for c in (0.0, 0.3, 1.0)}
    keys = N[1.0] / 0.95
    assert np.allclose(keys[:, 1:, 0], 1.0), "equal keys have the cosine 1"
    assert abs(N[0.3].sum() / (0.95 * inverse.MATRICES * 64 * 63 / 2) - 0.3) < 0.02
    errors = {
        (c, m.__name__): inverse._error(m, x, "float32", np.linalg.inv(np.eye(64) + x))
        for c, x in N.items() for m in (inverse.substitution, inverse.neumann)
    }  # fmt: skip
    assert all(errors[c, "substitution"] < 1e-6 for c in N)
    assert errors[0.0, "neumann"] < 1e-6 < 1e-3 < errors[0.3, "neumann"]
    assert errors[1.0, "neumann"] > 1
    counts = inverse.operations(64)
    assert counts["neumann"] == {"multiply_adds": 10 * 64**3, "steps": 6}
    assert counts["substitution"] == {"multiply_adds": sum(math.comb(i, 2) for i in range(64)), "steps": 63}


@pytest.mark.parametrize("dtype", DTYPES)
def test_naive_exponentials_overflow_at_the_frontier_and_are_right_before(dtype: str) -> None:
    edge = exponentials.frontier(dtype, 32)
    assert edge == pytest.approx(math.log(format_of(dtype).largest) / 32)
    first = exponentials.first_overflow(dtype, 32)
    assert first is not None
    assert edge <= first < 1.25 * edge
    assert exponentials.naive_error(first, dtype, 32) == math.inf
    assert exponentials.naive_error(0.5 * edge, dtype, 32) < 2 * format_of(dtype).unit_roundoff


def test_local_anchors_are_fine_where_one_anchor_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "DTYPES", ("float16",))
    monkeypatch.setattr(anchors, "GATES", (("bound", 5.0),))
    (line,) = anchors.anchor_lines()
    found = {r["path"]: r for r in line["rows"]}
    assert [found[p]["verdict"] for p in ("pairs", "local anchors", "one anchor")] == ["pass", "pass", "fail"]
    assert found["one anchor"]["nonfinite"] > 0 == found["local anchors"]["nonfinite"]
    assert found["local anchors"]["ratios"]["dg"] < 2


def test_points_after_a_lost_context_are_not_run() -> None:
    target = Losing(lambda call, n: n == 1, Emulator())
    found = [measure(target, Point("regimes", CASE)) for _ in range(2)]
    assert [(x["verdict"], x["detail"]) for x in found] == [
        ("fail", f"contextlost: {LOST}"),
        ("not run", "an earlier call has ended the CUDA context"),
    ]
