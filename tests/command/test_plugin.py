"""The pytest plugin in a pytest of its own: one test per check, findings as messages, fixtures for users' tests.

What could go wrong here: a fault that leaves pytest green, an unknown target that runs nothing and passes, a case
that cannot tell counted as a pass, a test that README prints and that fails on every kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verikda.case import Case
from verikda.checks import CHECKS
from verikda.finding import load_case

ROOT = Path(__file__).parents[2]
PASSED, FAILED, USAGE = 0, 1, 4

USER_TESTS = """
from verikda.case import Case

CASE = Case(lengths=(5,), K=3, V=2)

def test_mine(verikda_target, verikda_check):
    verikda_check(verikda_target, CASE, ("floor", "inputs_unchanged"))

def test_by_name(verikda_check):
    verikda_check("zoo", CASE, ("floor",))

def test_a_function_and_one_check(verikda_check):
    from verikda import chunk_kda
    verikda_check(chunk_kda, CASE, "floor")
"""

FAULTY_TESTS = """
import pytest
from verikda.case import Case

def test_fault(verikda_check):
    verikda_check("zoo:DV_OFF", Case(lengths=(5,), K=3, V=2), ("floor",))

def test_cannot_tell(verikda_check):
    zero = Case(lengths=(4,), K=2, V=2, value_regime="zero", do_regime="zero")
    verikda_check("emulator", zero, ("floor",))

def test_no_check_applies(verikda_check):
    verikda_check("zoo", Case(lengths=(4,)), ("packed_separate",))

def test_no_such_check(verikda_check):
    with pytest.raises(ValueError, match="there is no check 'flor'; the checks are floor, "):
        verikda_check("zoo", Case(), ("flor",))

def test_without_the_option(verikda_target):
    raise AssertionError("must be skipped")
"""


def pytest_in(folder: Path, surroundings: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--rootdir", str(folder), *options]
    return subprocess.run(
        command, cwd=folder, env=surroundings, text=True, capture_output=True, timeout=300, check=False
    )


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # The plugin is named, and nothing else is loaded: so it is loaded once, installed or not.
    surroundings = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return pytest_in(folder, surroundings, "-p", "verikda.pytest_plugin", *options)


def test_pytest_finds_the_plugin_of_the_installed_package(tmp_path: Path) -> None:
    """With no -p: through the entry point that the package declares."""
    ask = "from importlib.metadata import entry_points as e; print(*(p.value for p in e(group='pytest11')))"
    installed = subprocess.run([sys.executable, "-I", "-c", ask], text=True, capture_output=True, check=True).stdout
    if "verikda." not in installed:
        pytest.skip("the package is not installed here, only imported")
    assert "verikda.pytest_plugin" in installed.split()
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    plain.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD", None)
    options = ("--verikda-target=zoo", "--verikda-cases=2")
    result = pytest_in(tmp_path, plain, *options)
    assert result.returncode == PASSED, result.stdout + result.stderr
    assert "PASSED verikda::floor" in result.stdout
    without = pytest_in(tmp_path, plain, "-p", "no:verikda", *options)
    assert without.returncode == USAGE
    assert "unrecognized arguments: --verikda-target=zoo" in without.stderr


def test_a_healthy_target_and_a_users_test_pass(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text(USER_TESTS)
    result = run(tmp_path, "--verikda-target=zoo", "--verikda-cases=6")
    assert result.returncode == PASSED, result.stdout
    for line in ("PASSED verikda::floor", "PASSED verikda::pool", "PASSED test_user.py::test_mine",
                 "PASSED test_user.py::test_by_name"):  # fmt: skip
        assert line in result.stdout
    assert not (tmp_path / "verikda-findings").exists()


def test_a_fault_fails_with_the_finding_and_writes_its_file(tmp_path: Path) -> None:
    result = run(tmp_path, "--verikda-target=zoo:DV_OFF", "--verikda-cases=3")
    assert result.returncode == FAILED, result.stdout
    assert "FAILED verikda::floor" in result.stdout
    assert "PASSED verikda::inputs_unchanged" in result.stdout
    for part in ("FAIL  zoo:DV_OFF", "floor / dv:", "error / noise floor", "smallest case: kda"):
        assert part in result.stdout
    assert "Traceback" not in result.stdout
    path = next(line.split()[-1] for line in result.stdout.splitlines() if "replay: verikda replay" in line)
    assert load_case(tmp_path / path)[1:] == ("zoo:DV_OFF", "floor")


CRASHING = """
from verikda.call import Crashed
from verikda.zoo.target import ZooTarget

class Crashing(ZooTarget):
    def run(self, call):
        if call.chunk_size == 16:
            raise Crashed("CompilationError: at 3:4")
        return super().run(call)
"""


def test_a_crash_fails_every_check_that_saw_it_by_its_one_finding(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    options = ("--verikda-target=crashing:Crashing", "--verikda-cases=12", "-k", "floor or chunk_sizes")
    result = run(tmp_path, *options)
    assert result.returncode == FAILED, result.stdout
    assert "FAILED verikda::floor" in result.stdout
    assert "FAILED verikda::chunk_sizes" in result.stdout
    assert len(list((tmp_path / "verikda-findings").iterdir())) == 1


def test_one_test_per_check_is_collected(tmp_path: Path) -> None:
    result = run(tmp_path, "--verikda-target=zoo", "--collect-only", "-q")
    assert result.returncode == PASSED, result.stdout
    collected = [line.rpartition("::")[2] for line in result.stdout.splitlines() if line.startswith("verikda::")]
    assert collected == [*(check.name for check in CHECKS), "pool"]


def test_the_pool_is_one_more_test_that_can_be_left_out(tmp_path: Path) -> None:
    options = ("--verikda-target=zoo:STATE_IN_PLACE", "--verikda-cases=16", "-k", "pool")
    result = run(tmp_path, *options)
    assert result.returncode == FAILED, result.stdout
    for part in ("FAILED verikda::pool", "the pool is wrong after", "the call changed h0", "replay: verikda replay"):
        assert part in result.stdout
    assert "PASSED" not in result.stdout
    assert "Traceback" not in result.stdout
    left = run(tmp_path, "--verikda-target=zoo", "--collect-only", "-q", "--deselect=verikda::pool")
    assert "verikda::floor" in left.stdout
    assert "verikda::pool" not in left.stdout


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--verikda-target=nope", "target 'nope' is not known: use one of verikda, "),
        ("--verikda-target=zoo:DV_OF", "the zoo has no fault 'DV_OF'; did you mean DV_OFF"),
    ],
)
def test_an_unknown_target_is_a_usage_error(tmp_path: Path, option: str, message: str) -> None:
    (tmp_path / "test_user.py").write_text(USER_TESTS)
    result = run(tmp_path, option)
    assert result.returncode == USAGE
    assert f"ERROR: {message}" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_a_fault_and_a_case_that_cannot_tell_fail_a_users_test(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text(FAULTY_TESTS)
    result = run(tmp_path)
    assert result.returncode == FAILED
    for line in ("FAILED test_user.py::test_fault", "FAILED test_user.py::test_cannot_tell",
                 "PASSED test_user.py::test_no_such_check"):  # fmt: skip
        assert line in result.stdout
    for part in ("FAIL  zoo:DV_OFF", "emulator: inconclusive: floor: every output is zero",
                 "zoo:NONE: inconclusive: packed_separate: not packed",
                 "give --verikda-target=NAME"):  # fmt: skip
        assert part in result.stdout
    assert "1 passed, 1 skipped" in result.stdout
    replay = next(x.partition("replay: ")[2] for x in result.stdout.splitlines() if "replay: " in x)
    known: dict[str, object] = {}
    exec(replay, known)
    assert known["case"] == Case(lengths=(5,), K=3, V=2)


README = (ROOT / "README.md").read_text(encoding="utf-8")
FEW = """
from hypothesis import HealthCheck, Phase, settings

few = settings(max_examples=12, derandomize=True, database=None, phases=[Phase.generate])
settings.register_profile("few", few, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("few")
"""
KERNELS = """
import toy_kda

chunk_kda, recurrent = toy_kda.chunk_kda, toy_kda.long_names  # every flag, and few

def wrong(query, key, value, g, beta, initial_state, output_final_state, **kwargs):
    o, ht = recurrent(query, key, value, g, beta, initial_state, output_final_state)
    return o * 1.02, ht
"""
DRAWN = """
from hypothesis import given, settings, strategies as st
from verikda.case import Case

TOLD = [Case(lengths=(n,), K=2, V=2) for n in range(3, 9)]
ZERO = Case(lengths=(4,), K=2, V=2, value_regime="zero", do_regime="zero")

@settings(deadline=None)
@given(st.sampled_from([*TOLD, ZERO]))
def test_some_cannot_be_told(verikda_check, case):
    verikda_check("emulator", case, ("floor",))

@settings(deadline=None)
@given(st.integers())
def test_none_can_be_told(verikda_check, number):
    verikda_check("emulator", ZERO, ("floor",))
"""


def in_hypothesis(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_user.py").write_text(test)
    (folder / "conftest.py").write_text(FEW)
    (folder / "kernels.py").write_text(KERNELS)
    surroundings = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    surroundings["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "targets", folder)))
    plugins = ("-p", "_hypothesis_pytestplugin", "-p", "verikda.pytest_plugin", "--hypothesis-show-statistics")
    return pytest_in(folder, surroundings, *plugins)


def readmes_test(folder: Path, kernel: str) -> subprocess.CompletedProcess[str]:
    """README's test in Hypothesis, as printed, on another kernel."""
    block = README.split("In your own tests, with Hypothesis' shrinking:")[1].split("```python\n")[1].split("```")[0]
    assert block.count("mypackage.ops:chunk_kda") == 1
    return in_hypothesis(folder, block.replace("mypackage.ops:chunk_kda", kernel))


@pytest.mark.parametrize("kernel", ["kernels:chunk_kda", "kernels:recurrent"])
def test_readmes_own_test_passes_on_a_healthy_kernel(kernel: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = readmes_test(tmp_path, kernel)
    assert result.returncode == PASSED, result.stdout
    assert "PASSED test_user.py::test_my_kernel" in result.stdout


@pytest.mark.parametrize("kernel", ["kernels:wrong", "zoo:DV_OFF"])
def test_readmes_own_test_fails_on_a_fault(kernel: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = readmes_test(tmp_path, kernel)
    assert result.returncode == FAILED, result.stdout
    for part in ("FAILED test_user.py::test_my_kernel", f"FAIL  {kernel}", "floor / ", "Case.from_json("):
        assert part in result.stdout
    assert "Flaky" not in result.stdout


def test_a_case_that_cannot_be_told_counts_for_nothing_in_hypothesis(tmp_path: Path) -> None:
    result = in_hypothesis(tmp_path, DRAWN)
    assert result.returncode == FAILED, result.stdout
    assert "PASSED test_user.py::test_some_cannot_be_told" in result.stdout
    assert "FAILED test_user.py::test_none_can_be_told" in result.stdout
    assert "inconclusive: floor: every output is zero here" in result.stdout  # the statistics
