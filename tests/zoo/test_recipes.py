"""Recipes: healthy targets pass them, targets with less than everything still get what they can run.

That each recipe kills its fault is shown in test_faults. What could go wrong here: a recipe that fails on health, a
target that is said to pass what was never run on it, a finding that cannot be replayed.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from verikda.call import Capabilities
from verikda.case import Case
from verikda.checks import named
from verikda.cli import main
from verikda.finding import load_case
from verikda.permits import permits
from verikda.run_case import run_case
from verikda.search import Search, Settings
from verikda.zoo.faults import Fault
from verikda.zoo.known import tried
from verikda.zoo.public import KINDS
from verikda.zoo.recipes import RECIPES, case_of, fitted
from verikda.zoo.specimens import HEALTHY, SPECIMENS, fresh
from verikda.zoo.target import ZooTarget


def checked() -> dict[Case, set[str]]:
    """Every case of the recipes with the checks that recipes run on it."""
    found: dict[Case, set[str]] = {}
    for fault, all_knobs in RECIPES.items():
        for knobs in all_knobs:
            found.setdefault(case_of(knobs), set()).update(fault.info.kills)
    return found


@pytest.mark.parametrize("case", checked(), ids=lambda c: f"{c.T}-{c.chunk_size}-{c.gate_regime}-{c.key_regime}")
def test_healthy_passes_every_recipe(case: Case) -> None:
    report = run_case(HEALTHY.make(), case, named(tuple(checked()[case])))
    assert report.verdict == "pass", report.failures


def test_every_fault_has_a_recipe() -> None:
    assert set(RECIPES) == set(Fault) - {Fault.NONE}


LESS: list[dict[str, Any]] = [
    {"dtypes": ("bfloat16",)},
    {"packed": False, "empty": False, "tail_padding": False},
    {"empty": False},
    {"initial_state": False, "dht": False},
    {"grouped": False, "chunk_sizes": (64,)},
    {"k_sizes": (16,), "v_sizes": (16,)},
    {"required": ("qk_l2norm",)},
    {"backward": False, "dht": False},
]


@pytest.mark.parametrize("less", LESS, ids=lambda d: " ".join(d))
def test_a_recipe_gives_way_but_not_in_what_it_is_about(less: dict[str, Any]) -> None:
    c = Capabilities(**less)
    fits = 0
    for all_knobs in RECIPES.values():
        for knobs in all_knobs:
            case = fitted(knobs, c)
            if isinstance(case, str):
                assert permits(c, case_of(knobs)) is not None
                continue
            fits += 1
            assert permits(c, case) is None
            assert all(getattr(case, name) == value for name, value in knobs.items())
    assert fits > 20
    assert fitted({}, Capabilities()) == case_of({})


class Less(ZooTarget):
    """The healthy zoo without state_v_first."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, state_v_first=False)


class Careful(ZooTarget):
    """The healthy zoo that promises nothing of gates below -5 under safe_gate."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, beyond_safe_gate=False)


def test_what_a_target_lacks_is_not_run() -> None:
    target = Less()
    known = tried(target, SPECIMENS["STATE_V_FIRST_NOT_READ"])
    assert (known.verdict, known.reason) == ("not run", "the target does not support state_v_first")
    assert tried(ZooTarget(), SPECIMENS["SAFE_GATE_CLAMPS"]).verdict == "pass"
    careful = tried(Careful(), SPECIMENS["SAFE_GATE_CLAMPS"])
    assert careful.verdict == "inconclusive"
    assert careful.reason == "the target does not promise gates below -5 under safe_gate (beyond_safe_gate)"


def test_a_search_of_checks_that_do_not_apply_says_why() -> None:
    summary = Search(Careful(), Settings(cases=3, stratified=3, checks=named(("safe_gate",)))).run()
    assert summary.verdict == "inconclusive"
    assert any("does not promise gates below -5" in text for text in summary.doubts)


def test_the_fault_of_a_target_is_told_by_its_outputs() -> None:
    target = fresh(Fault.DV_OFF)
    own, other = (tried(target, SPECIMENS[name]) for name in ("DV_OFF", "DV_A_NOT_TRANSPOSED"))
    assert (own.verdict, own.alike) == ("fail", True)
    assert other.verdict == "fail"
    assert tried(target, SPECIMENS["STATE_TRANSPOSED"]).alike is False
    assert tried(target, SPECIMENS["INPUT_OVERWRITTEN"]).verdict == "pass"


def zoo(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["zoo", *arguments])


def test_the_command_says_which_faults_a_target_has(tmp_path: Path) -> None:
    names = [x for name in ("STATE_TRANSPOSED", "INPUT_OVERWRITTEN", "CUDA_X_SIGN") for x in ("--fault", name)]
    sick = zoo("zoo:state_transposed", *names, "--findings", str(tmp_path))
    assert sick.exit_code == 1, sick.output
    assert "vllm #41292" in sick.output
    assert "3 known faults: 1 fail, 1 pass, 1 not run" in sick.output
    (file,) = tmp_path.glob("*.json")
    case, target, check = load_case(file)
    assert (target, check) == ("zoo:state_transposed", "floor")
    assert run_case(fresh(Fault.STATE_TRANSPOSED), case).verdict == "fail"

    assert zoo("zoo", *names, "--findings", str(tmp_path / "none")).exit_code == 0
    elsewhere = zoo("zoo", "--fault", "CUDA_X_SIGN")
    assert elsewhere.exit_code == 2
    assert "planted in the CUDA sources" in elsewhere.output


ENDING = """
import os
from losing import Losing

ending = Losing(lambda call, n: call.state_v_first and {end})
"""
FOUR = [x for name in ("DQ_OFF", "STATE_V_FIRST_NOT_READ", "DV_OFF", "DK_OFF") for x in ("--fault", name)]


def test_jobs_give_the_same_in_the_same_order(tmp_path: Path) -> None:
    words = ("zoo:dv_off", *FOUR, "--fault", "INPUT_OVERWRITTEN", "--findings", str(tmp_path))
    one, two = zoo(*words), zoo(*words, "--jobs", "2")
    assert (one.exit_code, two.exit_code) == (1, 1), two.output
    assert two.output == one.output
    assert "5 known faults: 4 fail, 1 pass" in one.output


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ending", raising=False)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_recipe_that_ends_the_context_ends_the_run(jobs: str, in_a_folder: None) -> None:
    Path("ending.py").write_text(ENDING.format(end="True"))
    result = zoo("ending:ending", *FOUR, "--jobs", jobs)
    assert result.exit_code == 1, result.output
    assert "ended after 2 of 4: STATE_V_FIRST_NOT_READ: a call ended the CUDA context" in result.output
    assert "2 known faults: 1 pass, 1 fail" in result.output
    assert len(list(Path("verikda-findings").iterdir())) == 1


def test_a_process_that_ends_leaves_what_was_told_and_is_no_pass(in_a_folder: None) -> None:
    Path("ending.py").write_text(ENDING.format(end="os._exit(7)"))
    result = zoo("ending:ending", "--fault", "DQ_OFF", "--fault", "STATE_V_FIRST_NOT_READ", "--jobs", "2")
    assert result.exit_code == 2, result.output
    assert " of 2: one of 2 processes ended with exit status 7 before its work; " in result.output
    assert " zoo:NONE: " in result.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--compare", "--jobs", "2"], "--compare runs in one process; leave out --jobs"),
        (["--fault", "DQ_OF"], "the zoo has no fault 'DQ_OF'; did you mean DQ_OFF"),
        (["zoo", "--kill-matrix"], "no target is run with --kill-matrix"),
        (["--kill-matrix", "--compare"], "are two runs"),
        (["zoo", "--seeds", "3"], "--seeds belongs to --kill-matrix"),
        (["--kill-matrix", "--findings", "x"], "--findings is of a TARGET"),
        (["--compare", "--findings", "x"], "--findings is of a TARGET"),
        (["--list", "--findings", "x"], "--list runs nothing"),
        (["zoo", "--json", "x.jsonl"], "belong to --kill-matrix and --compare"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], says: str) -> None:
    result = zoo(*arguments)
    assert result.exit_code == 2
    assert says in result.output


def test_every_public_report_is_covered_or_has_a_reason() -> None:
    reports = [r for kind in KINDS for r in kind.reports]
    assert len(reports) == len(set(reports)) > 120
    for kind in KINDS:
        assert bool(kind.specimens) != bool(kind.reason), kind
    cited = {r for s in SPECIMENS.values() for r in s.reports}
    assert cited <= set(reports)
