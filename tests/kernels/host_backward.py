"""Run forward and backward kernels on NumPy arrays, on the host backend, with guards around every buffer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from host_forward import Arena, describe

from kernels_cuda import backward as plan
from kernels_cuda.forward import forward
from kernels_cuda.modules import Backend
from verikda.call import Call


def run_backward(
    backend: Backend, call: Call, *, keep: Collection[str] = (), offset: int = 0, recompute: bool = True, **options: Any
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Results and kept intermediates as float64, states in [N,HV,K,V]; and the dtype of each."""
    p, arena = call.problem, Arena(offset)
    forwards = describe(call, arena)
    do = arena.put("do", np.zeros_like(p.v) if p.do is None else p.do, call.dtypes["q"])
    dht = p.dht.swapaxes(-1, -2) if p.dht is not None and call.state_v_first else p.dht
    kept = () if recompute else [name for name in plan.needed(forwards) if name != "decay"]
    saved, table = forward(backend, forwards, arena.allocate, keep=kept, **options)
    out = plan.backward(
        backend, forwards, arena.allocate, do=do, dht=0 if dht is None else arena.put("dht", dht, "float32"),
        saved=None if recompute else saved, table=None if recompute else table, keep=keep, **options,
    )  # fmt: skip
    arena.check()
    names = ("dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias", *keep)
    arrays = {name: arena.arrays[name] for name in ("o", "ht")} | {n: arena.arrays[n] for n in names if n in out}
    dtypes = {name: str(x.dtype) for name, x in arrays.items()}
    found = {name: x.astype(np.float64) for name, x in arrays.items()}
    for name in ("ht", "dh0"):
        if call.state_v_first and name in found:
            found[name] = found[name].swapaxes(-1, -2)
    return found, dtypes
