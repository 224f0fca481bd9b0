"""The corpus of worst cases: one small JSON file each, tried first by every later run. It only grows.

A case enters when its ratio is the largest so far for its output and dtype, by a quarter or more, and above 1.5:
a lower bound on the worst case, found by search.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

from oracles.problem import GRADIENTS, OUTPUTS
from verikda.case import Case, parse_json
from verikda.record import plain
from verikda.run_case import CaseReport

ENTERS_ABOVE = 1.5
ENTERS_BY = 1.25


@dataclass(frozen=True)
class Worst:
    """A case with the ratio that one output reached on one target."""

    case: Case
    target: str
    output: str
    ratio: float


class Corpus:
    """The files of one folder.

    Parameters
    ----------
    folder : of `*.json` files; None is an empty corpus that is never written.

    Raises
    ------
    ValueError
        When a file in it is not a worst case, or `folder` is a file; the sentence names the file.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.entries: list[Worst] = []
        if folder is not None and folder.exists():
            if not folder.is_dir():
                raise ValueError(f"{folder} is a file; the corpus of worst cases is a folder: name one")
            for path in sorted(folder.glob("*.json")):
                self.entries.append(_load(path))

    def cases(self) -> list[Case]:
        """Every case once, worst ratio first."""
        ordered = sorted(self.entries, key=lambda w: -w.ratio)
        return list(dict.fromkeys(w.case for w in ordered))

    def offer(self, target: str, report: CaseReport) -> list[Worst]:
        """Add the case for each output whose record it breaks; return what was added."""
        if self.folder is None or report.verdict == "fail":
            return []
        ratios: dict[str, float] = {}
        for o in report.outcomes:
            if o.check == "floor" and o.verdict == "pass":
                ratios.update(o.ratios)
        added = []
        for output, ratio in ratios.items():
            best = max(
                (w.ratio for w in self.entries if w.output == output and w.case.dtype == report.case.dtype),
                default=ENTERS_ABOVE / ENTERS_BY,
            )
            if ratio >= best * ENTERS_BY:
                worst = Worst(report.case, target, output, ratio)
                self.entries.append(worst)
                added.append(worst)
                self._write(worst)
        return added

    def _write(self, worst: Worst) -> None:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(worst.case.to_json().encode()).hexdigest()[:10]
        path = self.folder / f"{worst.case.dtype}-{worst.output}-{digest}.json"
        data = {
            "schema": 1,
            "target": worst.target,
            "output": worst.output,
            "ratio": worst.ratio,
            "case": worst.case.to_dict(),
        }
        path.write_text(json.dumps(plain(data), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _load(path: Path) -> Worst:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or set(data) != {"schema", "target", "output", "ratio", "case"}:
            seen = ", ".join(sorted(data)) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"it holds {seen}; the fields must be schema, target, output, ratio and case")
        schema, target, output, ratio = (data[name] for name in ("schema", "target", "output", "ratio"))
        if schema != 1 or isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not math.isfinite(ratio):
            raise ValueError(f"schema {schema!r} with ratio {ratio!r} is not a worst case of schema 1")
        if not isinstance(target, str) or output not in (*OUTPUTS, *GRADIENTS):
            raise ValueError(f"target {target!r} with output {output!r} is not a target and one of its outputs")
        return Worst(Case.from_dict(data["case"]), target, output, float(ratio))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {error}; move the file away or mend it") from None
