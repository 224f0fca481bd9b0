"""A target that takes its process with it, under --jobs: what is said, what is kept, and that nothing waits for it.

What could go wrong here: a pass although cases were never run, findings of the other processes lost, a traceback, a
command that waits for a process that is gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from losing import LOST

from verikda.finding import load_case

ROOT = Path(__file__).parents[2]
TARGET = """
import os, signal, time
from pathlib import Path
from losing import Losing
from verikda.zoo.faults import Fault
from verikda.zoo.target import ZooTarget

def ends(call, n):
    if n == {nth}:
        try:
            Path("died").touch(exist_ok={all})
        except FileExistsError:
            return False
        return {end}

dying = Losing(ends, ZooTarget(Fault.{fault}))
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(
    end: str, *words: str, fault: str = "NONE", everyone: bool = False, jobs: str = "2", nth: int = 3
) -> subprocess.CompletedProcess[str]:
    """A command on a target whose nth call is `end`: in the first process that makes it, or in every one."""
    Path("dying.py").write_text(TARGET.format(end=end, fault=fault, all=everyone, nth=nth))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    command = [sys.executable, "-m", *words, "--jobs", jobs, "--json", "run.jsonl"]
    with Path("out").open("w") as out, Path("err").open("w") as err:  # a pipe would wait for what the target forked
        done = subprocess.run(command, stdout=out, stderr=err, env=env, timeout=180, check=False)
    assert "Traceback" not in Path("err").read_text()
    return subprocess.CompletedProcess(command, done.returncode, Path("out").read_text(), Path("err").read_text())


def record() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("run.jsonl").read_text().splitlines()]


CHECK = ("verikda", "check", "dying:dying", "--cases", "16", "--checks", "floor")
ENDS = {
    "os._exit(7)": "ended with exit status 7",
    "os._exit(0)": "ended with exit status 0",
    "os.kill(os.getpid(), signal.SIGSEGV)": "was ended by signal 11 (Segmentation fault)",
}


@pytest.mark.parametrize(("end", "says"), ENDS.items(), ids=["7", "0", "SEGV"])
def test_the_other_share_goes_on_and_the_search_is_no_pass(end: str, says: str) -> None:
    done = run(end, *CHECK)
    assert (done.returncode, done.stderr) == (2, "")
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("share "))
    assert line.endswith(
        f" of 2 {says} in the middle of its cases; to see where, run it with --jobs 1 under a debugger"
    )
    last = record()[-1]
    assert (last["kind"], last["verdict"], last["interrupted"]) == ("end", "inconclusive", False)
    assert [line.startswith(text) for text in last["lost"]] == [True]
    assert last["verdicts"] == {"pass": 8 + 2}, "the share of the other, and what this one had run"
    assert "inconclusive  zoo:NONE: 10 cases" in done.stdout
    assert "(1 shares lost)" in done.stdout
    assert "No case could tell" not in done.stdout, "ten could"


@pytest.mark.parametrize("jobs", ["2", "1"])
def test_a_share_whose_cuda_context_ended_is_lost_and_its_case_is_a_finding(jobs: str) -> None:
    done = run("True", *CHECK, jobs=jobs)
    assert (done.returncode, done.stderr) == (1, "")
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("share "))
    all_cases = 16 // int(jobs)
    assert line.endswith(f" ended after 3 of its {all_cases} cases, because a call ended the CUDA context")
    last = record()[-1]
    assert (last["verdict"], last["lost"]) == ("fail", [line])
    assert last["verdicts"] == {"pass": 2 + (8 if jobs == "2" else 0), "fail": 1}
    (found,) = Path("verikda-findings").glob("*.json")
    data = json.loads(found.read_text())
    assert (data["minimal"], data["case"]) == (False, data["found_in"])
    assert f"the call ended the CUDA context: {LOST}" in " ".join(done.stdout.split())
    # of two shares either may be the one, with a case of its own
    assert "case (not shrunk to the end): " + data["case"].get("rule", "kda") in done.stdout
    assert "(1 shares lost)" in done.stdout


def test_what_the_others_find_is_kept() -> None:
    done = run("os._exit(7)", *CHECK, fault="DV_OFF")
    assert (done.returncode, done.stderr) == (1, "")
    assert "share " in done.stdout
    assert record()[-1]["verdict"] == "fail"
    (found,) = Path("verikda-findings").glob("*.json")
    assert load_case(found)[2] == "floor"


def test_a_search_that_loses_every_share_ends() -> None:
    done = run("os._exit(7)", *CHECK, everyone=True)
    assert (done.returncode, done.stderr) == (2, "")
    assert len(record()[-1]["lost"]) == 2


def test_a_process_that_the_target_has_forked_keeps_nobody_waiting() -> None:
    """It holds open what tells of the end of the one that forked it."""
    end = "os._exit(7) if os.fork() else (Path('pid').write_text(str(os.getpid())), time.sleep(600))"
    try:
        done = run(end, *CHECK)
    finally:
        os.kill(int(Path("pid").read_text()), signal.SIGKILL)
    assert done.returncode == 2
    assert "ended with exit status 7" in done.stdout


def test_false_alarm_shows_the_shares_that_have_ended() -> None:
    done = run("os._exit(7)", "verikda.false_alarm", "--target", "dying:dying", "--cases", "8", everyone=True)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("one of 2 processes ended with exit status 7 before its work; ")
    assert "0 of 1 shares have ended" in done.stdout


def test_a_report_keeps_its_record_and_says_how() -> None:
    done = run("os._exit(7)", "verikda", "report", "dying:dying", everyone=True, nth=1)
    assert done.returncode == 2
    assert done.stderr == (
        "verikda: one of 2 processes ended with exit status 7 before its work; "
        "to see where, run it with --jobs 1 under a debugger\n"
    )
    assert (record()[0]["kind"], record()[-1]["kind"], record()[-1]["interrupted"]) == ("report", "end", True)
