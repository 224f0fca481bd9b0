"""One case on one target: the numbers that a report keeps of it, as one line of JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from oracles.contract import Contract
from oracles.problem import Array
from oracles.recurrence import forward, forward_reverse
from verikda.call import Call, Capabilities, Crashed, Malformed, Refused, Result
from verikda.case import Case
from verikda.dtypes import round_to, ulp
from verikda.floor import LIMIT, Judged, Judgement, judge
from verikda.inputs import SAFE_GATE, make_call
from verikda.noise import Floor
from verikda.permits import permits
from verikda.report.grid import Point
from verikda.targets.base import Target, TargetError
from verikda.targets.contracts import NAMES, contract_by_name

PROBABILITIES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999, 1.0)
"""Of the quantiles of errors in ulp."""
PLACES = ("o", "dq", "dk", "dv", "dg", "dbeta")
"""Outputs with a token axis, whose errors are kept by position."""
BINS = 64
"""Stretches of tokens by which a position is kept, at most."""


def fitted(point: Point, c: Capabilities) -> Case:
    """The case of a point with everything that its series is not about changed to what a target supports.

    A target of few sizes gets one of them, one that always norms q and k gets raw ones, one without a state none, one
    whose gate is in the kernel raw gates of the same decay. A gate beyond -5, a chunk size or a flag that the series
    varies stays, and is not run where it is not supported.
    """
    case = point.case
    changes: dict[str, Any] = dict.fromkeys(c.required, True)
    changes |= {"h0": case.h0 if c.initial_state else "none", "dht": case.dht and c.dht and c.backward}
    changes |= {"K": _nearest(case.K, c.k_sizes), "V": _nearest(case.V, c.v_sizes)}
    changes |= {n: "same" for n in ("g_dtype", "beta_dtype") if getattr(case, n) not in getattr(c, f"{n}s")}
    if point.series not in ("gates", "flags"):
        changes["chunk_size"] = _nearest(case.chunk_size, c.chunk_sizes)
    if "kda" not in c.rules and point.series not in ("gates", "safe"):
        changes |= {"rule": "delta", "gate_regime": "random", "gate_magnitude": 1.0, "g_dtype": "float32"}
    elif "log" not in c.gates and "bounded" in c.gates and case.gate_magnitude <= -SAFE_GATE:
        changes |= {"gate_in_kernel": True, "lower_bound": SAFE_GATE}
    try:
        return replace(case, **changes)
    except ValueError:  # no such case, as beta above 1 under a sigmoid
        return case


def _nearest(n: int, sizes: Sequence[int]) -> int:
    return min(sizes, key=lambda size: abs(size - n)) if sizes else n


@lru_cache(maxsize=4)
def shared_call(case: Case, backward: bool) -> tuple[Call, dict[str, Array]]:
    """A call and its truth; the same objects for every target, so that they share noise floors too."""
    call = make_call(case, backward=backward)
    return call, forward_reverse(call.problem) if backward else forward(call.problem)


def measure(target: Target, point: Point) -> dict[str, Any]:
    """The "point" line of a case on a target.

    Parameters
    ----------
    target : what is measured.
    point : the case, and what is kept of it.

    Returns
    -------
    dict
        kind, series, target, dtype, case, verdict ("pass", "fail", "inconclusive", "refused" or "not run"), detail,
        and where the call was made: contract, ran, seconds, outputs, and what `point.keep` names.
    """
    return measure_and_keep(target, point)[0]


def measure_and_keep(target: Target, point: Point) -> tuple[dict[str, Any], Result | None]:
    """The line of `measure`, and what the target returned; None where it did not."""
    started = time.perf_counter()
    case = fitted(point, target.capabilities)
    line: dict[str, Any] = {
        "kind": "point", "series": point.series, "target": target.name, "dtype": case.dtype, "case": case.to_dict(),
        "verdict": "not run", "detail": "",
    }  # fmt: skip
    if reason := permits(target.capabilities, case):
        return line | {"detail": f"the target does not support {reason}"}, None
    call, truth = shared_call(case, target.capabilities.backward)
    try:
        result = target.run(call)
    except Refused as error:
        return line | {"verdict": "refused", "detail": first_line(error)}, None
    except TargetError as error:  # of an earlier call, which ended the CUDA context and has failed
        return line | {"detail": first_line(error)}, None
    except (Crashed, Malformed) as error:
        return line | {"verdict": "fail", "detail": f"{type(error).__name__.lower()}: {first_line(error)}"}, None
    contract = target.contract(call)
    judged = _judged(result, call, contract, truth)
    line |= {
        "verdict": judged.verdict, "detail": judged.detail, "contract": contract.name, "ran": result.ran,
        "outputs": {n: output(j, result.outputs[n], truth[n]) for n, j in judged.outputs.items()},
    }  # fmt: skip
    finite = {n: x for n, x in result.outputs.items() if n in judged.outputs and x.shape == truth[n].shape}
    if "contracts" in point.keep:
        line["contracts"] = other_contracts(result, call, contract, truth)
    if "ulps" in point.keep:
        line["ulps"] = {n: ulp_quantiles(x, truth[n], result.dtypes[n]) for n, x in finite.items()}
    if "bias" in point.keep:
        line["bias"] = {n: head_means(n, x - truth[n]) for n, x in finite.items() if np.isfinite(x).all()}
    if "positions" in point.keep:
        line["positions"] = positions(finite, truth, result.dtypes, call, contract)
    return line | {"seconds": round(time.perf_counter() - started, 3)}, result


def first_line(error: Exception) -> str:
    """The first line of what an error says, no longer than a row of a table takes."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 200 else text[:197] + "..."


def _judged(result: Result, call: Call, contract: Contract, truth: Mapping[str, Array]) -> Judgement:
    return judge(result.outputs, result.dtypes, call.problem, contract, truth=truth, backward=call.backward)


def output(j: Judged, actual: Array, truth: Array) -> dict[str, Any]:
    """What is kept of one output: ratio to the floor, relative error, relative floor, values that are not finite."""
    kept: dict[str, Any] = {"verdict": j.verdict, "ratio": rounded(j.ratio), "dtype": j.dtype}
    if actual.shape == truth.shape:
        usable = np.isfinite(round_to(truth, j.dtype))
        kept["nonfinite"] = int(np.count_nonzero(usable & ~np.isfinite(actual)))
        kept["error"] = rounded(relative(actual, truth, usable & np.isfinite(actual)))
    kept["floor"] = rounded(None if j.resolution is None else j.resolution / LIMIT)
    if j.verdict != "pass":
        kept |= {"message": j.message, "coordinate": j.coordinate, "expected": j.expected, "actual": j.actual}
    return kept


def relative(actual: Array, truth: Array, where: Any = True) -> float | None:
    """Root of the summed squared error over that of the truth; None where the truth is 0."""
    size = float(np.sqrt(np.sum(truth**2, where=where)))
    return float(np.sqrt(np.sum((actual - truth) ** 2, where=where))) / size if size else None


def rounded(x: float | None) -> float | None:
    """Four digits: what a report shows of an error."""
    return None if x is None else float(f"{x:.4g}") if math.isfinite(x) else x


def other_contracts(
    result: Result, call: Call, own: Contract, truth: Mapping[str, Array]
) -> dict[str, dict[str, float | None]]:
    """Ratios of the same result under each contract known by name, the declared one left out."""
    named = {name: contract_by_name(name, call.dtypes["q"], call.chunk_size) for name in NAMES}
    different = {c: name for name, c in reversed(named.items()) if c != own}
    return {
        name: {n: rounded(j.ratio) for n, j in _judged(result, call, c, truth).outputs.items()}
        for c, name in reversed(different.items())
    }


def ulp_quantiles(actual: Array, truth: Array, dtype: str) -> list[float | None]:
    """Errors in spacings of the dtype at each true value, at `PROBABILITIES`."""
    usable = np.isfinite(round_to(truth, dtype)) & np.isfinite(actual)
    if not usable.any():
        return []
    ulps = np.abs(actual - truth)[usable] / ulp(truth[usable], dtype)
    return [rounded(float(x)) for x in np.quantile(ulps, PROBABILITIES, method="inverted_cdf")]


def head_means(name: str, error: Array) -> list[float | None]:
    """Mean signed error of each head in units of the root mean square error of all: heads are independent draws."""
    scale = float(np.sqrt(np.mean(error**2)))
    heads = 1 if name in ("ht", "dh0") else 2
    means = error.mean(tuple(i for i in range(error.ndim) if i != heads))
    return [rounded(float(x) / scale) if scale else 0.0 for x in means]


def positions(
    outputs: Mapping[str, Array], truth: Mapping[str, Array], dtypes: Mapping[str, str], call: Call, contract: Contract
) -> dict[str, Any]:
    """Root mean square of error, floor and truth over stretches of tokens, of the outputs that have tokens."""
    names = [n for n in PLACES if n in outputs]
    floor = Floor(call.problem, contract, {n: truth[n] for n in names}, dtypes, call.backward, 4, 0)
    tokens = call.problem.q.shape[1]
    width = -(-tokens // BINS)
    edges = list(range(0, tokens, width))

    def by_bin(squared: Array) -> list[float | None]:
        rows = squared.reshape(squared.shape[0], tokens, -1).mean((0, 2))
        return [rounded(float(np.sqrt(rows[a : a + width].mean()))) for a in edges]

    kept: dict[str, Any] = {"tokens": [a + (min(a + width, tokens) - a) / 2 for a in edges]}
    for n in names:
        kept[n] = {
            "error": by_bin((outputs[n] - truth[n]) ** 2),
            "floor": by_bin(floor.outputs[n].per_element),
            "truth": by_bin(truth[n] ** 2),
        }
    return kept
