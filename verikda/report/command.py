"""What `verikda report` does, apart from reading the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernels_cuda.sources import source_hash
from verikda import show
from verikda.choose import choose_one
from verikda.environment import environment
from verikda.record import Record, check_outputs, plain
from verikda.report.grid import GRIDS
from verikda.report.lines import read_all
from verikda.report.run import items, measure_all
from verikda.status import FAIL, NOTHING, PASS
from verikda.targets import resolve


def report_command(
    targets: Sequence[str],
    *,
    grid: str,
    sources: Sequence[Path],
    json_path: Path | None,
    html: Path | None,
    markdown: Path | None,
    jobs: int = 1,
) -> int:
    """Measure, or read earlier lines, and render what was asked for; the exit status.

    Raises
    ------
    ValueError
        For an unknown grid, or files that are none.
    TargetError
        For a target that cannot be used.
    """
    chosen = choose_one("grid", GRIDS, grid)
    if html is not None or markdown is not None:
        _need_jinja()
    check_outputs(json=json_path, html=html, markdown=markdown)
    for path in (html, markdown):
        if path is not None and path.resolve() in {source.resolve() for source in sources}:
            raise ValueError(f"{path} is what --from reads, and the page would replace it; name another file")
    out = show.console()
    lines = read_all(sources) if sources else _measured(out, targets or ("verikda",), chosen, json_path, jobs)
    from verikda.report.page import Page, terminal

    page = Page.of(lines)
    for path, render in ((html, page.html), (markdown, page.markdown)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(render(), encoding="utf-8")
            out.print(f"wrote {path}", markup=False)
    terminal(out, page)
    verdicts = [line["verdict"] for line in lines if line["kind"] == "point"]
    if "fail" in verdicts:
        return FAIL
    return PASS if "pass" in verdicts else NOTHING


def _need_jinja() -> None:
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(f"a page needs jinja2 and matplotlib ({error}): pip install 'verikda[report]'") from None


def _measured(out: Any, names: Sequence[str], grid: Any, json_path: Path | None, jobs: int) -> list[dict[str, Any]]:
    """Run the grid; lines as they would be read back from the file. KeyboardInterrupt where there are none yet."""
    made = [resolve(name) for name in names]
    todo = items(grid, names, grid.flags and any(name in ("verikda", "verikda:cuda") for name in names))
    lines: list[dict[str, Any]] = []
    record = Record(json_path)

    def keep(line: dict[str, Any]) -> None:
        record.write(line)
        lines.append(json.loads(json.dumps(plain(line))))  # as it would be read back

    keep({
        "kind": "report", "targets": list(names), "grid": grid.name, "kernels": source_hash(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"), "environment": environment(),
    })  # fmt: skip
    out.print(f"measuring {', '.join(t.name for t in made)}: grid {grid.name}, {len(todo)} items", markup=False)
    with show.progress(out, len(todo), "report") as step:

        def on_lines(some: list[dict[str, Any]]) -> None:
            for line in some:
                keep(line)
            step(str(some[0].get("series") or some[0].get("claim") or some[0]["kind"]) if some else "")

        whole = False
        try:
            whole = measure_all(todo, jobs, on_lines)
        finally:  # also where a process of it crashed
            keep({"kind": "end", "interrupted": not whole, "lines": len(lines) - 1})
            record.close()
    if not whole and len(lines) == 2:  # the first and the last one
        raise KeyboardInterrupt
    return lines
