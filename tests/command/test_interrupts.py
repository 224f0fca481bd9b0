"""Ctrl-C and SIGTERM, on real processes: what was found is kept and closed, and nobody is left behind.

What could go wrong here: a record without its last line, half a line, the traceback of a process that was cut off, a
process that runs on alone, a second signal (`timeout` sends two) that cuts off the closing, a signal that does nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from verikda import interrupts
from verikda.cli import main
from verikda.finding import load_case
from verikda.interrupts import SAME, Worker, held, on_stop, processes

ROOT = Path(__file__).parents[2]
SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
GROUP = pytest.mark.parametrize("group", [False, True], ids=["alone", "group"])
SOME = pytest.mark.parametrize(
    ("number", "group"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGTERM, True)],
    ids=["INT-group", "TERM-alone", "TERM-group"],
)  # fmt: skip
CHECK = ("verikda", "check", "--checks", "floor", "--cases", "5000", "--json", "run.jsonl")


QUICK = """
import sys

if __name__ == "__main__":
    from dataclasses import replace
    from verikda import cli, false_alarm
    from verikda.report.grid import GRIDS
    from verikda.zoo import rivals

    false_alarm.SHARE = 10
    rivals.TRIALS = rivals.TRIALS[:5]
    gates = tuple(i / 100 for i in range(1, 501))
    GRIDS["quick"] = replace(GRIDS["quick"], channels=4, tokens=20, gates=gates, lengths=(16,))
    command, *words = sys.argv[1:]
    sys.exit(false_alarm.main(words) if command == "false_alarm" else cli.main([command, *words]))
"""
"""The command with small work, whose first line is soon on record, and enough of it to be interrupted."""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quick.py").write_text(QUICK)


@dataclass
class Ended:
    """What a command left behind."""

    status: int
    stdout: str
    stderr: str
    lines: list[dict[str, Any]]


def own_signals() -> None:
    """As at a terminal: what a background job starts ignores SIGINT."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def started(kind: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process group that runs a command and has a line of `kind` on record; killed at the end."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, "-m", *words], env=env, text=True, start_new_session=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=own_signals)  # fmt: skip
    try:
        record = Path("run.jsonl")
        last = time.monotonic() + 200
        while not (record.exists() and f'"kind": "{kind}"' in record.read_text()):
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < last
            time.sleep(0.1)
        yield run
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def ended(run: subprocess.Popen[str]) -> Ended:
    """Wait for the end of the command and of every process that it started; all lines of the record are whole."""
    stdout, stderr = run.communicate(timeout=200)
    last = time.monotonic() + 60
    while alive(run.pid):
        assert time.monotonic() < last, "a process is left behind"
        time.sleep(0.1)
    text = Path("run.jsonl").read_text()
    assert text.endswith("\n")
    return Ended(run.returncode, stdout, stderr, [json.loads(line) for line in text.splitlines()])


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def workers(run: subprocess.Popen[str]) -> list[int]:
    """The processes of a search that the command has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == run.pid and b"spawn_main" in path.with_name("cmdline").read_bytes():
                found.append(int(path.parent.name))
    return found


def stopped(kind: str, number: signal.Signals, group: bool, *words: str) -> Ended:
    """A command that gets the signal once a line of `kind` is on record, as `timeout` sends it if to the group."""
    with started(kind, *words) as run:
        os.kill(run.pid, number)
        if group:
            os.killpg(run.pid, number)
        return ended(run)


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize(("target", "kind", "status"), [("emulator", "case", 0), ("zoo:DV_OFF", "finding", 1)])
@SIGNALS
@GROUP
def test_check_keeps_what_was_found_and_closes_its_record(
    jobs: str, target: str, kind: str, status: int, number: signal.Signals, group: bool
) -> None:
    run = stopped(kind, number, group, *CHECK, target, "--jobs", jobs, "--summary", "sum.jsonl")
    assert (run.status, run.stderr) == (status, "")
    assert "(interrupted)" in run.stdout.splitlines()[-1]
    end = run.lines[-1]
    assert (end["kind"], end["interrupted"]) == ("end", True)
    cases = [line for line in run.lines if line["kind"] == "case"]
    assert 0 < len(cases) == sum(end["verdicts"].values()) < 5000
    (short,) = map(json.loads, Path("sum.jsonl").read_text().splitlines())
    assert short["verdicts"] == end["verdicts"]
    if status:
        (found,) = Path("verikda-findings").glob("*.json")
        assert load_case(found)[1] == target
    else:
        assert not Path("verikda-findings").exists()


OTHERS = {
    "report": ("point", ("quick", "report", "emulator", "--json", "run.jsonl"), "cut short"),
    "zoo": ("kill", ("quick", "zoo", "--kill-matrix", "--json", "run.jsonl"), "the same command goes on from here"),
    "compare": ("rival", ("quick", "zoo", "--compare", "--json", "run.jsonl"), "the same command goes on from here"),
    "probe": ("frontier", ("quick", "probe", "emulator", "--json", "run.jsonl"), "drift, pool (interrupted)"),
    "false_alarm": ("share", ("quick", "false_alarm", "--cases", "9000", "--json", "run.jsonl"), "of 900 shares"),
}


@pytest.mark.parametrize("name", OTHERS)
@SOME
def test_other_commands_end_as_well(name: str, number: signal.Signals, group: bool) -> None:
    kind, words, says = OTHERS[name]
    run = stopped(kind, number, group, *words, *(() if name in ("probe", "compare") else ("--jobs", "2")))
    assert (run.status, run.stderr) == (0, "")
    assert says in run.stdout
    if name in ("report", "probe"):
        assert (run.lines[-1]["kind"], run.lines[-1]["interrupted"]) == ("end", True)


EVIDENCE = """
import sys
from pathlib import Path
from unittest.mock import Mock
from verikda import bench, evidence

CODES = {
    "long": "print('{\\"verdict\\": \\"%s\\", \\"says\\": \\"s\\", \\"numbers\\": {}}')",
    "many": "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(90)']);"
    "open('many', 'w'); time.sleep(90)",
    "large": "print('{\\"verdict\\": \\"pass\\", \\"says\\": \\"s\\", \\"numbers\\": {}}')",
    "repeat": "import time; open('repeat', 'w'); time.sleep(90)",
    "graph": "open('graph', 'w')",
}
bench.cuda_torch = lambda: Mock(cuda=Mock(get_device_name=lambda: "none"))
evidence.item_command = lambda item: [sys.executable, "-c", CODES[item]]
sys.exit(evidence.main(["--json", "run.jsonl", "--items", ",".join(CODES)]))
"""


@pytest.mark.parametrize(("verdict", "status"), [("pass", 0), ("fail", 1)])
@SOME
def test_evidence_records_what_has_ended_and_ends_the_rest(
    verdict: str, status: int, number: signal.Signals, group: bool
) -> None:
    """The first item has been told, the third has ended behind the second, the fourth runs, the last is never begun."""
    Path("fake_evidence.py").write_text(EVIDENCE.replace("%s", verdict))
    with started("evidence", "fake_evidence") as run:
        last = time.monotonic() + 60
        while not (Path("many").exists() and Path("repeat").exists()):
            assert time.monotonic() < last
            time.sleep(0.1)
        os.kill(run.pid, number)
        if group:
            os.killpg(run.pid, number)
        begun = time.monotonic()
        result = ended(run)
    assert time.monotonic() - begun < 60, "it waited for what it should have ended"
    assert (result.status, result.stderr) == (status, "")
    assert result.stdout.splitlines()[-1] == "interrupted after 2 of 5 items"
    assert [line["item"] for line in result.lines] == ["long", "large"]
    assert not Path("graph").exists()
    last = time.monotonic() + 60
    while any(same_folder(x) for x in Path("/proc").glob("[0-9]*/cwd")):
        assert time.monotonic() < last, "a process is left behind"
        time.sleep(0.1)


def same_folder(link: Path) -> bool:
    """Whether a process other than this one works in the current folder."""
    with suppress(OSError):
        return link.parent.name != str(os.getpid()) and link.resolve() == Path.cwd()
    return False


def test_a_comparison_that_has_judged_nothing_shows_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: Any) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("verikda.zoo.rivals.compare", compare)
    result = CliRunner().invoke(main, ["zoo", "--compare", "--fault", "DV_OFF"])
    assert (result.exit_code, result.stdout.count("\n")) == (2, 1)
    assert "interrupted before there was anything to tell" in result.stderr


def test_python_gets_its_turn_within_the_reverse_of_a_naive_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one call into torch that takes seconds, and a signal is heard between steps of Python only."""
    torch = pytest.importorskip("torch")
    from verikda.zoo.naive import naive
    from verikda.zoo.trials import TRIALS, make_call

    plain, turns = torch.autograd.grad, []

    def grad(*arguments: Any) -> Any:
        before = sys.getprofile()
        ours = naive.__code__.co_filename
        sys.setprofile(lambda frame, *_: turns.append(frame) if frame.f_code.co_filename == ours else None)
        try:
            return plain(*arguments)
        finally:
            sys.setprofile(before)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    naive(make_call(TRIALS[0]).problem, "float32")
    assert len(turns) >= sum(TRIALS[0].lengths)


@pytest.mark.parametrize("name", ["check", "report"])
@SOME
def test_processes_that_are_still_starting_end_as_well(name: str, number: signal.Signals, group: bool) -> None:
    words, kind = ((*CHECK, "emulator"), "run") if name == "check" else (OTHERS["report"][1], "report")
    run = stopped(kind, number, group, *words, "--jobs", "2")
    assert "Traceback" not in run.stderr
    assert "Error" not in run.stderr
    # earlier than that the command has begun nothing that it could close
    assert run.lines[-1]["kind"] == kind or run.lines[-1]["interrupted"] is True


@pytest.mark.parametrize(("owner", "name"), [(threading.Thread, "_ExecutorManagerThread"), (Worker, "Worker")])
def test_a_pool_that_is_interrupted_before_a_part_of_it_starts_ends(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shutting a pool down joins a thread and ends processes, which are not there yet."""
    plain, seen = owner.start, []

    def start(self: Any) -> None:
        if type(self).__name__ == name:
            seen.append(self)
            signal.raise_signal(signal.SIGTERM)  # a script's background job ignores the other one
        plain(self)

    monkeypatch.setattr(owner, "start", start)
    monkeypatch.setattr(interrupts, "_state", interrupts._State())
    with pytest.raises(KeyboardInterrupt), on_stop(), processes(1) as pool:
        pool.submit(abs, -1)
    assert seen


def test_a_share_that_somebody_else_ends_is_no_whole_search() -> None:
    with started("case", *CHECK, "emulator", "--jobs", "2") as run:
        os.kill(workers(run)[0], signal.SIGTERM)
        result = ended(run)
    assert (result.status, result.stderr) == (0, "")
    assert result.lines[-1]["interrupted"] is True


def test_a_search_whose_master_is_killed_ends() -> None:
    with started("case", *CHECK, "emulator", "--jobs", "2") as run:
        run.kill()
        result = ended(run)
    assert (result.status, result.stderr) == (-signal.SIGKILL, "")


class Clock:
    """Time for `verikda.interrupts` that passes only when told to, whatever else the machine is doing."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """A clock, no signal heard so far, and signals as at a terminal: tests in the background ignore SIGINT."""
    made = Clock()
    monkeypatch.setattr(interrupts, "time", made)
    monkeypatch.setattr(interrupts, "_state", interrupts._State())
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("clock")
def test_a_ctrl_c_while_a_process_is_started_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpawnProcess, "start", lambda self: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), on_stop():
        Worker().start()


@SIGNALS
def test_the_second_signal_of_a_pair_changes_nothing(number: signal.Signals, clock: Clock) -> None:
    before, asked = signal.getsignal(number), []
    with on_stop(lambda: asked.append(1)):
        signal.raise_signal(number)
        clock.now += 0.99 * SAME
        signal.raise_signal(number)
        assert len(asked) == 1
        clock.now += 0.02 * SAME
        signal.raise_signal(number)
        assert len(asked) == 2
    assert signal.getsignal(number) is before


@SIGNALS
def test_what_is_held_is_stopped_at_its_end(number: signal.Signals, clock: Clock) -> None:
    done = []

    def work() -> None:
        with on_stop(), held():
            with held():
                signal.raise_signal(number)
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]


@SIGNALS
@pytest.mark.usefixtures("clock")
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with on_stop():
        signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_IGN


def test_another_thread_changes_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def inside() -> None:
        with on_stop():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_fork_of_the_checked_code_ends_as_it_would_alone() -> None:
    code = """
import os, signal, time
from verikda.interrupts import on_stop
with on_stop():
    begun, begins = os.pipe()
    child = os.fork()
    if not child:
        os.write(begins, b"x")  # Python forgets signals that came before its first step after a fork
        time.sleep(60)
    os.read(begun, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        preexec_fn=own_signals,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
