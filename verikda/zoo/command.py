"""What `verikda zoo` does, apart from reading the command line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.markup import escape

from verikda import show
from verikda.environment import environment
from verikda.record import Record, check_outputs
from verikda.status import FAIL, PASS
from verikda.zoo import kills, matrix, page, rivals, tables
from verikda.zoo.specimens import HEALTHY, SPECIMENS, specimen

NUMPY = ("python", "boundary")
"""Where faults are planted that need nothing compiled: what is taken unless the user says otherwise."""


def chosen(names: Iterable[str], where: Iterable[str] = NUMPY) -> list[str]:
    """Names of the specimens asked for; where none is, all that are planted in one of the places `where`.

    Raises
    ------
    ValueError
        For a name that the zoo does not have.
    """
    return [specimen(name).name for name in names] or [n for n, s in SPECIMENS.items() if s.where in where]


def list_command(names: Iterable[str], where: Iterable[str]) -> int:
    """Print the specimens asked for, or all."""
    out = show.console()
    rows = show.table("fault", "planted in", "place", "says")
    for name in chosen(names, tuple(where) or ("python", "boundary", "cuda")):
        s = SPECIMENS[name]
        rows.add_row(name, s.where, s.place, escape(s.what))
    out.print(rows)
    out.print("zoo:FAULT is a target for each that is planted in python or at the boundary.", markup=False)
    return PASS


def kill_matrix(wanted: list[str], seeds: int, jobs: int, json_path: Path | None, markdown: Path | None) -> int:
    """Hunt every fault with every seed that the record lacks; status 1 when one is missed or health raises an alarm."""
    lines = [] if json_path is None else matrix.read(json_path)
    done = {(k.specimen, k.seed) for k in matrix.kills(lines)}
    todo = [(n, seed) for seed in range(seeds) for n in (*wanted, HEALTHY.name) if (n, seed) not in done]
    record = Record(json_path)
    lines += opened(record, lines)
    out = show.console()
    out.print(f"{len(wanted)} faults and the healthy implementation, {seeds} seeds: {len(todo)} searches to run")
    try:
        with show.progress(out, len(todo), "zoo") as step:
            for kill in kills.hunt_all(todo, jobs):
                lines.append(kill.to_line())
                record.write(lines[-1])
                step(f"{kill.specimen} {kill.check or 'not seen'}")
    except KeyboardInterrupt:
        out.print("interrupted; the same command goes on from here" if json_path else "interrupted")
    finally:
        record.close()
    results = [k for k in matrix.kills(lines) if k.specimen in (*wanted, HEALTHY.name) and k.seed < seeds]
    tables.kill_tables(out, results)
    if markdown is not None:
        page.write(markdown, lines)
    t = matrix.totals(results)
    return FAIL if t.alarms or t.killed < t.searches or not t.searches else PASS


def comparison(names: Iterable[str], json_path: Path | None, markdown: Path | None) -> int:
    """Judge the zoo as people do today, with what the record lacks."""
    lines = [] if json_path is None else matrix.read(json_path)
    wanted = chosen(names)
    record = Record(json_path)
    lines += opened(record, lines)
    out = show.console()
    out.print(f"the healthy implementation and {len(wanted)} faults, on the inputs of today's tests")
    try:
        with show.progress(out, len(wanted) + 1, "zoo") as step:
            for line in rivals.compare(wanted, list(lines)):
                lines.append(line)
                record.write(line)
                step(str(line["specimen"]))
    except KeyboardInterrupt:
        if not rivals.scores(lines):  # each fault is compared with the healthy implementation, which comes first
            raise
        out.print("interrupted; the same command goes on from here" if json_path else "interrupted")
    finally:
        record.close()
    tables.rival_tables(out, lines)
    if markdown is not None:
        page.write(markdown, lines)
    return PASS


def opened(record: Record, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The line that opens a record, written unless there is one for these versions already."""
    line = {"kind": "zoo", "budget": kills.budget(), "environment": environment()}
    versions = line["environment"]["versions"]  # type: ignore[index]
    if any(x["kind"] == "zoo" and x["environment"]["versions"] == versions for x in lines):
        return []
    record.write(line)
    return [line]


def zoo_command(
    target: str | None,
    kill: bool,
    compare: bool,
    names: tuple[str, ...],
    where: tuple[str, ...],
    seeds: int,
    jobs: int,
    json_path: Path | None,
    markdown: Path | None,
    findings: Path,
) -> int:
    """Do what the command line asks for; the exit status.

    Raises
    ------
    ValueError
        For options that do not go together.
    """
    if kill and compare:
        raise ValueError(
            "--kill-matrix and --compare are two runs; give one of them, with the same --json and --report"
        )
    if (kill or compare) and target is not None:
        raise ValueError(f"no target is run with --kill-matrix or --compare; leave out {target}")
    if not kill and (seeds, where) != (1, ()):
        raise ValueError("--seeds belongs to --kill-matrix, --where to --kill-matrix and --list")
    if compare and jobs != 1:
        raise ValueError("--compare runs in one process; leave out --jobs")
    if kill or compare:
        check_outputs(json=json_path, report=markdown)
    if kill:
        return kill_matrix(chosen(names, where or NUMPY), seeds, jobs, json_path, markdown)
    if compare:
        return comparison(names, json_path, markdown)
    if json_path is not None or markdown is not None:
        raise ValueError("--json and --report belong to --kill-matrix and --compare; findings on a target are files")
    from verikda.zoo.known import known_faults

    return known_faults(target or "verikda", chosen(names), findings, jobs)
