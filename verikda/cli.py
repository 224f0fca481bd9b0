"""The `verikda` command. Exit status: 0 pass, 1 a failure was found, 2 unusable input or nothing could be told.

Ctrl-C and SIGTERM end a command early; its exit status is then that of what it had found.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from verikda import __version__
from verikda.status import NOTHING

DEFAULT_FINDINGS = Path("verikda-findings")
DEFAULT_WORST = Path("reports/worst")


class Unusable(click.ClickException):
    """Input that cannot be used: one line, exit status 2."""

    exit_code = NOTHING

    def show(self, file: Any = None) -> None:
        click.echo(f"verikda: {self.message}", err=True)


def finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """A number that a clock can reach: NaN passes every range of click, and no comparison with it is true."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.", ctx, param)
    return value


def clear_errors(command: Callable[..., int]) -> Callable[..., None]:
    """Turn the errors of bad input into one line and exit status 2, and the result into the exit status.

    SIGTERM reaches the command as Ctrl-C does, as a KeyboardInterrupt.
    """
    from functools import wraps

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        from verikda.interrupts import on_stop
        from verikda.targets.base import TargetError

        try:
            with on_stop():
                status = command(*args, **kwargs)
        except (TargetError, ValueError) as error:
            raise Unusable(str(error)) from None
        except OSError as error:
            raise Unusable(f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")) from None
        except KeyboardInterrupt:
            raise Unusable("interrupted before there was anything to tell") from None
        sys.exit(status)

    return run


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="verikda")
@click.pass_context
def main(context: click.Context) -> None:
    """Is a KDA or DeltaNet kernel right, how precise is it, how fast is it?

    Ctrl-C and SIGTERM (which timeout and job schedulers send) end a command early: what it has found is kept, its
    files are closed, and its exit status is that of what it has found.

    NumPy and torch take one thread unless OMP_NUM_THREADS says otherwise; --jobs uses more cores.
    """
    if context.invoked_subcommand != "capture":  # that one runs the user's own script
        from verikda.threads import one_thread

        one_thread()


@main.command()
@click.argument("target", default="verikda")
@click.option("--profile", default="dev", show_default=True, help="dev, ci, gpu, nightly or hunt: how many cases.")
@click.option("--cases", type=click.IntRange(min=1), help="Number of cases, instead of the profile's.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    callback=finite,
    help="Stop drawing cases after this time.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the search.")
@click.option("--checks", "check_names", help="Comma-separated names of checks; all of them if left out.")
@click.option(
    "--contract",
    help="Judge under this contract (storage16, operands16, operands_tf32, float32, recurrent32), not the target's.",
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Append every result to this JSON Lines file."
)
@click.option(
    "--findings",
    type=click.Path(path_type=Path),
    default=DEFAULT_FINDINGS,
    show_default=True,
    help="Folder of findings.",
)
@click.option(
    "--worst",
    type=click.Path(path_type=Path),
    help=f"Folder of worst cases, tried first; {DEFAULT_WORST} if it exists.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes that share the cases; with 1, a target that crashes its process ends the whole run.",
)
@click.option(
    "--summary", "summary_path", type=click.Path(path_type=Path), help="Append one line with the outcome to this file."
)
@clear_errors
def check(
    target: str,
    profile: str,
    cases: int | None,
    seconds: float | None,
    seed: int,
    check_names: str | None,
    contract: str | None,
    json_path: Path | None,
    findings: Path,
    worst: Path | None,
    jobs: int,
    summary_path: Path | None,
) -> int:
    """Search TARGET for failures: `verikda`, `emulator`, `transformers`, or `module:function`.

    TARGET is any name that `verikda targets` lists, or a function with the public signature of chunk_kda on torch
    tensors. Each failure is shrunk and written as one JSON file that `verikda replay` runs again.
    """
    from verikda.checking import check_command

    return check_command(
        target,
        profile=profile,
        cases=cases,
        seconds=seconds,
        seed=seed,
        check_names=check_names,
        contract=contract,
        json_path=json_path,
        findings=findings,
        jobs=jobs,
        summary_path=summary_path,
        worst=worst if worst is not None else (DEFAULT_WORST if DEFAULT_WORST.is_dir() else None),
    )


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("target", required=False)
@click.option(
    "--snippet",
    type=click.Path(path_type=Path),
    help="Write a standalone script (NumPy and the target only) that exits with 1 where values are wrong; of the "
    "checks, run floor and that of the finding only.",
)
@click.option("--contract", help="Judge under this contract instead of the target's.")
@clear_errors
def replay(file: Path, target: str | None, snippet: Path | None, contract: str | None) -> int:
    """Run the case in FILE again, on the target named in it or on TARGET, through every check.

    FILE is a finding, a bare case, or a captured call (.safetensors).
    """
    from verikda.checking import replay_command

    return replay_command(file, target, snippet, contract)


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--function", "functions", multiple=True, help="module:function to capture; all known ones if left out.")
@click.option("--limit", type=click.IntRange(min=1), default=8, show_default=True, help="Calls that are kept.")
@clear_errors
def capture(folder: Path, script: Path, arguments: tuple[str, ...], functions: tuple[str, ...], limit: int) -> int:
    """Run SCRIPT (Python) with its ARGUMENTS, and keep its calls of delta-rule operators as files in FOLDER."""
    from verikda.capture_command import capture_command

    return capture_command(folder, script, arguments, functions, limit)


@main.command()
@click.argument("target", required=False)
@click.option("--kill-matrix", is_flag=True, help="Search every planted fault with each seed.")
@click.option("--compare", is_flag=True, help="Judge the planted faults with the tests in use today (needs torch).")
@click.option("--list", "listed", is_flag=True, help="List the planted faults; run nothing.")
@click.option("--fault", "faults", multiple=True, help="Only this planted fault; may be given several times.")
@click.option(
    "--where",
    type=click.Choice(("python", "boundary", "cuda")),
    multiple=True,
    help="With --kill-matrix or --list, only faults planted there; repeatable. Left out, the kill matrix takes all but "
    "cuda, whose kernels are compiled one by one.",
)
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Seeds of the kill matrix.")
@click.option(
    "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that share the faults."
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    help="Append every result to this JSON Lines file; what is in it already is not run again.",
)
@click.option("--report", type=click.Path(path_type=Path), help="Write the results as Markdown to this file.")
@click.option(
    "--findings",
    type=click.Path(path_type=Path),
    default=DEFAULT_FINDINGS,
    show_default=True,
    help="Folder of findings on TARGET.",
)
@clear_errors
def zoo(
    target: str | None,
    kill_matrix: bool,
    compare: bool,
    listed: bool,
    faults: tuple[str, ...],
    where: tuple[str, ...],
    seeds: int,
    jobs: int,
    json_path: Path | None,
    report: Path | None,
    findings: Path,
) -> int:
    """Try the known faults of such kernels on TARGET, or show that verikda finds them.

    TARGET, `verikda` if left out, runs one small case for each kind of fault in the zoo: which of them does it have?
    With --kill-matrix or --compare no target is run but the zoo itself, faults planted in a healthy implementation.
    """
    from verikda.zoo.command import list_command, zoo_command

    if listed:
        rest = (target, kill_matrix, compare, seeds, jobs, json_path, report, findings)
        if rest != (None, False, False, 1, 1, None, None, DEFAULT_FINDINGS):
            raise ValueError("--list runs nothing and goes with --fault and --where only; leave out the rest")
        return list_command(faults, where)
    if (kill_matrix or compare) and findings != DEFAULT_FINDINGS:
        raise ValueError("--findings is of a TARGET; --kill-matrix and --compare run none and write no finding")
    return zoo_command(target, kill_matrix, compare, faults, where, seeds, jobs, json_path, report, findings)


@main.command()
@click.argument("target", default="verikda")
@click.option("--only", help="Comma-separated: frontier, drift, pool; all of them if left out.")
@click.option(
    "--tokens", type=click.IntRange(min=64), default=4096, show_default=True, help="Length of the sequence of drift."
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of all inputs.")
@click.option("--contract", help="Judge under this contract instead of the target's.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Append every result to this JSON Lines file."
)
@click.option(
    "--findings",
    type=click.Path(path_type=Path),
    default=DEFAULT_FINDINGS,
    show_default=True,
    help="Folder of findings.",
)
@clear_errors
def probe(target: str, json_path: Path | None, findings: Path, **options: Any) -> int:
    """Ask TARGET what no single case tells.

    Which gates overflow it, whether its error grows along thousands of tokens, and whether a pool of carried states
    stays right under append, fork and reset. Exit status as of `verikda check`.
    """
    from verikda.probes.command import probe_command

    return probe_command(target, json_path=json_path, findings=findings, **options)


@main.command()
@clear_errors
def targets() -> int:
    """List the targets that can be checked here, and why others cannot."""
    from verikda.checking import targets_command

    return targets_command()


@main.command()
@clear_errors
def doctor() -> int:
    """Show what this machine has: packages, compilers, GPU, cache, and what each of them is for."""
    from verikda.doctor import doctor_command

    return doctor_command()


def _refuse_others(why: str, *heeded: str) -> None:
    """Refuse what the command line says beside the parameters `heeded`, because it would not be heeded."""
    context = click.get_current_context()
    said = [
        p.opts[0].upper() if isinstance(p, click.Argument) else p.opts[0]
        for p in context.command.params
        if p.name not in (None, *heeded)
        and context.get_parameter_source(p.name or "") is click.core.ParameterSource.COMMANDLINE
    ]
    if said:
        raise ValueError(f"{why}; leave out {', '.join(said)}")


@main.command()
@click.argument("targets", nargs=-1)
@click.option(
    "--shapes", multiple=True, default=("quick",), show_default=True, help="quick, full, pack, or B,T,H; repeatable."
)
@click.option("--kinds", multiple=True, help="fast, slow, fused (KDA) or none (DeltaNet); repeatable, all if left out.")
@click.option("--modes", multiple=True, help="forward, backward or forward+backward; repeatable, all if left out.")
@click.option("--also-wrong", is_flag=True, help="Time a target too whose errors are too large, and mark it.")
@click.option(
    "--compile-jobs",
    type=click.IntRange(min=0),
    default=0,
    help="Processes that compile what Triton's tuners of fla try, before the bench; 0, the default, leaves it to them.",
)
@click.option("--cpu", is_flag=True, help="Time the verifier on this CPU instead: oracle, emulator, judged cases.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Append every result to this JSON Lines file."
)
@click.option("--benchmark-json", type=click.Path(path_type=Path), help="Write a file for `pytest-benchmark compare`.")
@click.option("--summary", type=click.Path(path_type=Path), help="Write the tables to this Markdown file.")
@clear_errors
def bench(targets: tuple[str, ...], cpu: bool, json_path: Path | None, **options: Any) -> int:
    """Time TARGETS (verikda, fla, fla:safe, cudnn, jla, flashkda; all if left out) on a GPU, after checking each."""
    if cpu:
        _refuse_others("--cpu times the verifier itself and takes nothing but --json", "cpu", "json_path")
        from verikda.bench.cpu import cpu_command
        from verikda.record import check_outputs

        check_outputs(json=json_path)
        return cpu_command(json_path)
    from verikda.bench.command import bench_command

    return bench_command(targets, json_path=json_path, **options)


@main.command()
@click.argument("targets", nargs=-1)
@click.option("--grid", default="quick", show_default=True, help="quick (minutes), wide (K = V = 128) or full.")
@click.option(
    "--from", "sources", type=click.Path(path_type=Path), multiple=True, help="Render this file, run nothing."
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Append every result to this JSON Lines file."
)
@click.option("--html", type=click.Path(path_type=Path), help="Write one self-contained page to this file.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write the tables to this Markdown file.")
@click.option(
    "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that share the cases."
)
@clear_errors
def report(
    targets: tuple[str, ...],
    grid: str,
    sources: tuple[Path, ...],
    json_path: Path | None,
    html: Path | None,
    markdown: Path | None,
    jobs: int,
) -> int:
    """Measure how precise TARGETS are, over a grid of gates, keys, lengths, chunk sizes and dtypes; render a page.

    TARGETS are names that `verikda check` takes (`verikda` if left out). Exit status 0 if every case passed, 1 if
    one failed, 2 if nothing could be told.
    """
    if sources:
        why = "--from renders what earlier runs measured, runs nothing, and goes with --html and --markdown only"
        _refuse_others(why, "sources", "html", "markdown")
    from verikda.report.command import report_command

    return report_command(
        targets, grid=grid, sources=sources, json_path=json_path, html=html, markdown=markdown, jobs=jobs
    )


@main.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option(
    "--factor", type=float, default=1.5, show_default=True, callback=finite, help="Change of a number that counts."
)
@clear_errors
def diff(before: Path, after: Path, factor: float) -> int:
    """Compare two --json files of report, check or bench; exit status 1 if something got worse."""
    from verikda.report.diff import diff_command

    return diff_command(before, after, factor)
