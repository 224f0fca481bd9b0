"""A small set of report lines with numbers of its own choosing, so that what is shown can be traced back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verikda.case import Case
from verikda.report.measure import PROBABILITIES

OUTPUTS = ("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0")
DTYPES = ("float16", "bfloat16", "float32")
GATES = (0.5, 2.0, 8.0)
BASE: dict[str, Any] = {"lengths": (64,), "heads": 2, "K": 4, "V": 4, "h0": "random", "dht": True}


def outputs(ratio: float, **changes: Any) -> dict[str, Any]:
    """All outputs with one ratio; `changes` name outputs and replace fields."""
    found = {
        n: {"verdict": "pass", "ratio": ratio, "dtype": "float32", "nonfinite": 0, "error": 1e-3, "floor": 9e-4}
        for n in OUTPUTS
    }
    for name, fields in changes.items():
        found[name] |= fields
    return found


def point(series: str, case: Case, ratio: float, target: str = "toy", **more: Any) -> dict[str, Any]:
    """One point; its verdict is the worst of its outputs."""
    made = more.pop("outputs", outputs(ratio))
    failed = any(o["verdict"] == "fail" for o in made.values())
    return {
        "schema": 1, "kind": "point", "series": series, "target": target, "dtype": case.dtype, "case": case.to_dict(),
        "verdict": "fail" if failed else "pass", "detail": "", "contract": "c64", "ran": "toy on paper",
        "outputs": made, "seconds": 0.1, **more,
    }  # fmt: skip


def lines() -> list[dict[str, Any]]:
    """Lines of every kind and series."""
    out: list[dict[str, Any]] = [{
        "schema": 1, "kind": "report", "targets": ["toy"], "grid": "quick", "kernels": "0123456789abcdef",
        "time": "2026-01-02T03:04:05+00:00",
        "environment": {"command": "verikda report toy", "platform": "Linux x86_64", "versions": {"numpy": "2.0"}},
    }]  # fmt: skip
    for i, dtype in enumerate(DTYPES):
        case = Case(**BASE, dtype=dtype)
        ratios = {"float32": dict.fromkeys(OUTPUTS, 2.345), "recurrent32": dict.fromkeys(OUTPUTS, "inf")}
        out.append(point("regimes", case, 0.7 + i / 1000, contracts=ratios))
        for chunk in (16, 64):
            for m in GATES:
                fine = chunk == 64 or m < 8
                bad = {
                    "dg": {
                        "verdict": "fail",
                        "ratio": 123.4,
                        "message": "dg is <wrong> | off",
                        "nonfinite": 7 * (m > 4),
                    }
                }
                gates = Case(**BASE, dtype=dtype, gate_regime="bound", gate_magnitude=m, chunk_size=chunk)
                out.append(point("gates", gates, 0.811, outputs=outputs(0.811, **({} if fine else bad))))
        for keys in ("random", "repeated"):
            out.append(point("keys", Case(**BASE, dtype=dtype, key_regime=keys), 0.822))
        for safe in (False, True):
            out.append(point("safe", Case(**BASE, dtype=dtype, gate_regime="bound", safe_gate=safe), 0.833))
        for seed in range(3):
            ulps = {"ulps": {"o": [0.1 * (j + 1) for j in range(len(PROBABILITIES))]}} if seed == 0 else {}
            out.append(point("seeds", Case(**BASE, dtype=dtype, seed=seed), 0.844, bias={"o": [0.01, -0.02]}, **ulps))
        where = {"tokens": [16.0, 48.0], "o": {"error": [1e-3, 2e-3], "floor": [1e-3, 1e-3], "truth": [1.0, 1.0]}}
        out.append(point("lengths", Case(**BASE, dtype=dtype, gate_regime="slow"), 0.855, positions=where))
        out.append({
            "schema": 1, "kind": "stages", "target": "toy", "dtype": dtype, "case": case.to_dict(), "detail": "",
            "verdict": "measured", "contract": "c64", "errors": {"Gamma": 1e-7, "A": 2e-4, "o": 3e-3},
        })  # fmt: skip
    return [*out, *claims(), {"schema": 1, "kind": "end", "interrupted": False, "lines": len(out)}]


def claims() -> list[dict[str, Any]]:
    """Lines of the four claims."""
    cosines = [0.0, 0.1, 0.3, 0.999, 1.0]
    errors = {d: {"substitution": [1.11e-4] * 5, "neumann": [2.22e-4, 3e-3, 4.0, "inf", "inf"]} for d in DTYPES}
    counts = {"substitution": {"multiply_adds": 41664, "steps": 63}, "neumann": {"multiply_adds": 2621440, "steps": 6}}
    naive = [{"dtype": d, "chunk": c, "frontier": 11.09 / c, "overflow": 12.34 / c} for d in DTYPES for c in (16, 64)]
    paths = [
        {
            "dtype": "float16", "gates": "bound 5", "path": path, "verdict": verdict, "nonfinite": n,
            "ratios": {"o": ratio, "dg": ratio}, "case": Case(**BASE).to_dict(),
        }
        for path, verdict, n, ratio in (
            ("pairs", "pass", 0, 0.61), ("local anchors", "pass", 0, 0.62), ("one anchor", "fail", 9, "inf"),
        )
    ]  # fmt: skip
    memory = {
        "recomputed": {"held_bytes": 2.0**20, "peak_bytes": 2.0**22, "milliseconds": 1.5},
        "kept": {"held_bytes": 2.0**21, "peak_bytes": 2.0**22, "milliseconds": 1.25},
    }
    return [
        {"schema": 1, "kind": "claim", "claim": name, **more}
        for name, more in {
            "inverse": {
                "chunk": 64, "matrices": 32, "cosines": cosines, "errors": errors, "operations": counts,
                "seconds": {"substitution": 0.001, "neumann": 0.004},
            },
            "exponentials": {"rows": naive},
            "anchors": {"rows": paths},
            "recompute": {
                "verdict": "measured", "detail": "", "device": "GPU of paper", "shape": [1, 2, 3, 4], "repeats": 5,
                "rows": memory,
            },
        }.items()
    ]  # fmt: skip


def write(path: Path, some: list[dict[str, Any]]) -> Path:
    """A JSON Lines file."""
    path.write_text("".join(json.dumps(x) + "\n" for x in some), encoding="utf-8")
    return path
