"""Where precision is lost: every intermediate of the notes against the same algorithm in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from oracles.arithmetic import Exact, Nearest
from oracles.chunked import emulate
from oracles.contract import chunked32
from oracles.noisy import LN2
from oracles.problem import Array
from verikda.call import Call
from verikda.dtypes import NUMPY_DTYPES
from verikda.inputs import make_call
from verikda.ops import engine
from verikda.ops.engine import Ready
from verikda.ops.validate import check_call
from verikda.permits import permits
from verikda.report.grid import Point
from verikda.report.measure import first_line, relative, rounded
from verikda.targets.base import Target
from verikda.targets.emulator import Emulator
from verikda.targets.own import Own, gpu_missing

FORWARD = ("Gamma", "Aqk", "L", "A", "U", "W", "Qg", "Kg", "S", "Vnew")
BACKWARD = ("dAqk", "dU", "dS", "dW", "dA")
STAGES = (*FORWARD, "o", "ht", *BACKWARD, "dq", "dk", "dv", "dbeta", "dg", "dh0")
"""In the order in which the algorithm makes them."""


def stage_line(target: Target, point: Point) -> dict[str, Any]:
    """The "stages" line: relative error of each intermediate and output of one case.

    Parameters
    ----------
    target : the emulator or verikda's own kernels; others return no intermediates.
    point : its case has one sequence of whole chunks.

    Returns
    -------
    dict
        kind, target, dtype, case, verdict ("measured" or "not run"), detail, and errors by name.
    """
    case = point.case
    line: dict[str, Any] = {
        "kind": "stages", "target": target.name, "dtype": case.dtype, "case": case.to_dict(), "verdict": "not run",
        "detail": "", "errors": {},
    }  # fmt: skip
    if not isinstance(target, Emulator | Own):
        return line | {"detail": "the target returns no intermediates"}
    if reason := permits(target.capabilities, case):
        return line | {"detail": f"the target does not support {reason}"}
    call = make_call(case)
    wanted = _exact(call)
    try:
        found = _emulated(target, call) if isinstance(target, Emulator) else _own(target, call)
    except Exception as error:  # kernels fail in ways of their own, and the line says how
        return line | {"verdict": "fail", "detail": f"{type(error).__name__}: {first_line(error)}"}
    for x in (found, wanted):
        x["dA"] = _below(x["dA"])
    errors = {n: rounded(relative(found[n], wanted[n])) for n in STAGES if n in found and n in wanted}
    return line | {"verdict": "measured", "contract": target.contract(call).name, "errors": errors}


def _exact(call: Call) -> dict[str, Array]:
    trace = emulate(call.problem, chunked32(call.chunk_size), Exact(), intermediates=True)
    return {**trace.outputs, **{n: _rows(n, x) for n, x in trace.intermediates.items()}}


def _emulated(target: Emulator, call: Call) -> dict[str, Array]:
    trace = emulate(call.problem, target.contract(call), Nearest(), intermediates=True)
    inner = {n: _rows(n, np.asarray(x, np.float64)) for n, x in trace.intermediates.items()}
    return {**target.run(call).outputs, **inner}


def _rows(name: str, x: Array) -> Array:
    """[1,HV,chunks,C,D] as kernels lay it out: [1,T,HV,D], states [chunks,HV,K,V]."""
    if name in ("S", "dS"):
        states: Array = x[0].swapaxes(0, 1)
        return states
    _, heads, chunks, rows, width = x.shape
    flat: Array = np.moveaxis(x[0], 0, 2).reshape(1, chunks * rows, heads, width)
    return flat


def _below(x: Array) -> Array:
    """The strict lower triangles of [1,T,HV,C]: of dA nothing else is used later."""
    tokens, C = x.shape[1], x.shape[3]
    kept: Array = np.where(np.arange(C) < (np.arange(tokens) % C)[:, None, None], x, 0.0)
    return kept


def _arguments(call: Call, on_gpu: bool) -> dict[str, Any]:
    """Arrays of a plain call by the names of `check_call`, do and dht with them, where the kernels run."""
    names = {"h0": "initial_state"}
    found = {}
    for name, dtype in call.dtypes.items():
        x: Any = np.ascontiguousarray(getattr(call.problem, name), NUMPY_DTYPES[dtype])
        if on_gpu:
            import cupy

            x = cupy.asarray(x)
        found[names.get(name, name)] = x
    return found


def _read_back(x: Any) -> Array:
    """An array of the kernels as float64 on the CPU."""
    return np.asarray(x.get() if hasattr(x, "get") else x).astype(np.float64)


def _own(target: Own, call: Call) -> dict[str, Array]:
    """Outputs of the target itself; intermediates of the same kernels through the operators' engine."""
    on_gpu = target.name != "verikda:host" and gpu_missing() is None
    x = _arguments(call, on_gpu)
    do, dht = x.pop("do"), x.pop("dht")
    ready = Ready.of(check_call(**x, gated=True, scale=call.problem.scale, output_final_state=True,
                                chunk_size=call.chunk_size))  # fmt: skip
    forward = [n for n in FORWARD if n != "L"]
    inner: Mapping[str, Any] = engine.forward(ready, keep=forward)
    inner = {n: inner[n] for n in forward} | dict(engine.backward(ready, do, dht, keep=BACKWARD))
    found = {n: _read_back(inner[n]) for n in (*forward, *BACKWARD)}
    chunks = call.problem.q.shape[1] // call.chunk_size
    found |= {n: found[n][:chunks] for n in ("S", "dS")}
    found["Gamma"] *= LN2
    return {**target.run(replace(call, recompute=False)).outputs, **found}
