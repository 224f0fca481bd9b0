"""What only a GPU can show of verikda's kernels: `python -m verikda.evidence --json reports/h200/evidence.jsonl`.

Each item runs in a process of its own under a time limit, so that a hang or a broken device ends one item, and appends
one line with its numbers, the device and the hash of the kernel sources. `proven` reads those lines back. Ctrl-C and
SIGTERM end a run early: items that have ended are recorded, those that run are ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernels_cuda.sources import source_hash
from verikda.environment import environment
from verikda.interrupts import held, on_stop

FOLDER = Path(__file__).resolve().parents[1] / "reports" / "h200"
ITEMS: dict[str, tuple[str, int]] = {
    "long": ("T = 65536 against float64", 180),
    "many": ("4096 sequences of 1 to 3 tokens, K = V = 256, against float64", 180),
    "large": ("more than 2^31 elements, bit for bit as its samples alone", 180),
    "repeat": ("50 repeats bit for bit, alone, on reused memory, and with another stream busy", 180),
    "graph": ("CUDA graph replays bit for bit as eager, also after new inputs", 180),
    "memcheck": ("every kernel under compute-sanitizer: no access outside what is allocated", 400),
    "racecheck": ("every kernel under compute-sanitizer: no race in shared memory", 400),
    "initcheck": ("every kernel under compute-sanitizer: no value read that was never written", 400),
}
"""Title and time limit in seconds of each item."""
SANITIZERS = ("memcheck", "racecheck", "initcheck")
"""Items that run `evidence_items.cover` under the tool of that name."""
SANITIZER_FOUND = 9
"""Exit status by which compute-sanitizer says that it found an error."""

PROVEN = "proven on {device}"
CHANGED = "kernels changed since the last GPU run: unproven"
NEVER = "never run on a GPU"
PASS, FAIL, NOT_RUN = "pass", "fail", "not run"


def proven(folder: Path = FOLDER) -> str:
    """What the evidence under `folder` says of the kernel sources as they are now.

    Parameters
    ----------
    folder : its *.json and *.jsonl files are read; lines that are no evidence are passed over.

    Returns
    -------
    str
        "proven on NVIDIA H200" where the last run of every item with these sources passed there; a sentence with the
        items where some did not; "kernels changed since the last GPU run: unproven" where all evidence is of other
        sources; "never run on a GPU" where there is none.
    """
    lines = sorted(_lines(folder), key=lambda line: str(line.get("time", "")))
    if not lines:
        return NEVER
    # an item that could not run shows nothing of the kernels
    mine = {line["item"]: line for line in lines if line.get("kernels") == source_hash()}
    if not mine:
        return CHANGED
    short = [f"{item} {mine[item]['verdict'] if item in mine else 'missing'}" for item in ITEMS
             if item not in mine or mine[item]["verdict"] != PASS]  # fmt: skip
    if short:
        return f"unproven: {', '.join(short)}"
    return PROVEN.format(device=" and ".join(sorted({str(mine[item].get("device")) for item in ITEMS})))


def _lines(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.jsonl")]):
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if isinstance(line, dict) and line.get("kind") == "evidence" and line.get("item") and line.get("verdict"):
                found.append(line)
    return found


def run_item(item: str, command: Sequence[str] | None = None, limit: float | None = None) -> dict[str, Any]:
    """Verdict, text and numbers of one item, run by `command` (this module with --item, if left out).

    A process that ends without a result, or not within the limit, is a failure: kernels that hang or break the device
    do exactly that.
    """
    seconds = limit if limit is not None else ITEMS[item][1]
    command = command or item_command(item)
    # each tensor an allocation of its own, so that a read past its end is one past the allocation's
    environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if item in SANITIZERS else None
    try:
        done = _ended(command, seconds, environ)
    except FileNotFoundError:
        return {
            "verdict": NOT_RUN,
            "says": f"{command[0]} is not installed (it comes with the CUDA toolkit)",
            "numbers": {},
        }
    except subprocess.TimeoutExpired:
        return {"verdict": FAIL, "says": f"did not end within {seconds:g} s", "numbers": {}}
    if done.returncode == SANITIZER_FOUND:
        errors = [
            line.strip("= ") for line in done.stdout.splitlines() if line.startswith("=========") and line.strip("= ")
        ]
        return {"verdict": FAIL, "says": f"{item} found: {'; '.join(errors[1:4])}", "numbers": {}}
    for text in reversed(done.stdout.splitlines()):
        if text.startswith("{"):
            result: dict[str, Any] = json.loads(text)
            return result
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"verdict": FAIL, "says": f"ended with status {done.returncode}: {last}", "numbers": {}}


_running: set[subprocess.Popen[str]] = set()
"""Processes of items that run now."""


def _ended(command: Sequence[str], seconds: float, environ: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    """Run a process to its end, and whatever it has started: a sanitizer runs the item as a process of its own.

    Raises
    ------
    FileNotFoundError
        When there is no such program.
    subprocess.TimeoutExpired
        When it does not end in time.
    """
    pipe = subprocess.PIPE
    # a session of its own does not hear the Ctrl-C of a terminal, and ends as one
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environ, start_new_session=True) as process:
        _running.add(process)
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        except BaseException:
            _kill(process)
            raise
        finally:
            _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_items(items: Sequence[str], keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Run items and hand on what `run_item` says of each, in order.

    Ctrl-C and SIGTERM end those that run; those that had ended are still handed on.

    Raises
    ------
    KeyboardInterrupt
        When it was ended early.
    """
    # Two at a time: the float64 truth of the first takes the CPU for about a minute, the others mostly the GPU.
    pool = ThreadPoolExecutor(2)
    left = [(item, pool.submit(run_item, item)) for item in items]
    with on_stop():
        try:
            while left:
                item, future = left[0]
                result = future.result()
                with held():  # what is taken out is handed on
                    del left[0]
                    keep(item, result)
        except KeyboardInterrupt:
            with held():
                ended = [(item, future.result()) for item, future in left if future.done()]
                for _, future in left:
                    future.cancel()
                while wait([future for _, future in left], timeout=0.1).not_done:
                    for process in list(_running):  # also one that was only starting
                        _kill(process)
                for item, result in ended:
                    keep(item, result)
            raise


def item_command(item: str) -> list[str]:
    """The process that runs an item."""
    this = [sys.executable, "-m", "verikda.evidence", "--item"]
    if item not in SANITIZERS:
        return [*this, item]
    tool = ["compute-sanitizer", "--tool", item, "--error-exitcode", str(SANITIZER_FOUND), "--print-limit", "20"]
    return [*tool, *this, "cover"]


def alone(item: str) -> dict[str, Any]:
    """Run one item in this process."""
    from verikda import evidence_items
    from verikda.bench import cuda_torch

    torch = cuda_torch()
    try:
        passed, says, numbers = evidence_items.RUN[item](torch)
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        says = f"out of memory with {free / 1e9:.0f} of {total / 1e9:.0f} GB free: {str(error).splitlines()[0]}"
        return {"verdict": NOT_RUN, "says": says, "numbers": {}}
    except ImportError as error:
        return {"verdict": NOT_RUN, "says": str(error), "numbers": {}}
    return {"verdict": PASS if passed else FAIL, "says": says, "numbers": numbers}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the items; 0 where all that ended passed, 1 where one failed, 2 where one could not run or none ended."""
    parser = argparse.ArgumentParser(prog="python -m verikda.evidence", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="append every result to this JSON Lines file")
    parser.add_argument("--items", default=",".join(ITEMS), help=f"comma-separated, of {', '.join(ITEMS)}")
    parser.add_argument("--item", choices=[*ITEMS, "cover"], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    items = [name.strip() for name in given.items.split(",") if name.strip()]
    unknown = [name for name in items if name not in ITEMS]
    if unknown or not items:
        parser.error(f"--items has {unknown[0] if unknown else 'nothing'}; use some of {', '.join(ITEMS)}")

    from verikda.bench import NoGpuError, cuda_torch
    from verikda.record import Record, check_outputs, plain

    if given.item:
        print(json.dumps(plain(alone(given.item)), allow_nan=False), flush=True)
        return 0
    verdicts = []
    try:
        with on_stop():
            try:
                check_outputs(json=given.json)
                device = str(cuda_torch().cuda.get_device_name())
                record = Record(given.json)
            except (NoGpuError, ValueError) as error:
                print(f"verikda: {error}", file=sys.stderr)
                return 2

            def keep(item: str, result: dict[str, Any]) -> None:
                verdicts.append(result["verdict"])
                mark = "not run:" if result["verdict"] == NOT_RUN else result["verdict"].upper()
                print(f"{mark} {ITEMS[item][0]}: {result['says']}", flush=True)
                record.write(
                    {"kind": "evidence", "item": item, "title": ITEMS[item][0], **result, "device": device,
                     "kernels": source_hash(), "time": datetime.now(UTC).isoformat(timespec="seconds"),
                     "environment": environment()}
                )  # fmt: skip

            run_items(items, keep)
    except KeyboardInterrupt:
        print(f"interrupted after {len(verdicts)} of {len(items)} items")
    return 1 if FAIL in verdicts else 2 if NOT_RUN in verdicts or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
