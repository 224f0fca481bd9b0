"""The inputs that today's tests of these kernels use, to judge the zoo by.

In the style of flash-linear-attention's tests/ops/test_kda.py and test_delta.py at bc3b101d: a seed of 42, q, k and v
uniform on (0, 1), q and k normalised, gates logsigmoid(normal) over a normaliser, some of them masked to 0, beta the
sigmoid of a normal number, an initial state, gradients of output and final state; V = K; lengths from 63 to 2,048 and
a few packs. Channels are a quarter of theirs (15, 16, 25, 32 for 60, 64, 100, 128) and rows fewer, so that the zoo's
NumPy code gets through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from oracles.problem import Array, Gate, Problem
from verikda.call import Call
from verikda.dtypes import round_to


@dataclass(frozen=True)
class Trial:
    """One test: shapes, dtype, gates and flags.

    Attributes
    ----------
    lengths : of the sequences; equal ones are a batch unless `packed`.
    D : channels of keys and values.
    scale : None is K**-0.5.
    normaliser : divides the log gate.    mask : share of gates set to 0, of -1000 in a pack.
    gate : "log", "softplus" (gate in the kernel) or "none" (delta rule).
    """

    name: str
    lengths: tuple[int, ...]
    H: int = 2
    HV: int = 2
    D: int = 16
    dtype: str = "float16"
    scale: float | None = None
    normaliser: float = 1.0
    mask: float = 0.0
    packed: bool = False
    gate: Gate = "log"
    lower_bound: float | None = None
    l2norm: bool = False
    sigmoid: bool = False
    neg_eigval: bool = False
    v_first: bool = False
    safe_gate: bool = False
    recompute: bool = True
    chunk_size: int = 64

    @property
    def states(self) -> int:
        return len(self.lengths)


TRIALS = (
    Trial("T = 63", (63,), H=1, HV=1),
    Trial("float32, T = 100", (100, 100), dtype="float32", scale=1.0),
    Trial("delta rule, chunk 16", (63,), gate="none", chunk_size=16),
    Trial("float32, delta rule", (500,), dtype="float32", gate="none"),
    Trial("gate in kernel", (500,), gate="softplus", l2norm=True),
    Trial("chunk 32", (500,), chunk_size=32),
    Trial("state [V,K]", (256,), v_first=True, HV=4),
    Trial("pack of three", (15, 85, 200), packed=True, H=4, HV=4),
    Trial("bounded gate in kernel", (500,), gate="bounded", lower_bound=-5.0, safe_gate=True, l2norm=True),
    Trial("delta rule, chunk 32", (100, 100), gate="none", chunk_size=32, dtype="bfloat16", l2norm=True),
    Trial("bounded gate in kernel, bfloat16", (256,), gate="bounded", lower_bound=-5.0, l2norm=True, dtype="bfloat16"),
    Trial("negative eigenvalues", (256,), sigmoid=True, neg_eigval=True, l2norm=True),
    Trial("chunk 32, bfloat16, no recompute", (256, 256), chunk_size=32, dtype="bfloat16", recompute=False),
    Trial("delta rule, pack", (15, 85, 200), packed=True, gate="none"),
    Trial("float32, T = 1000", (1000,), dtype="float32", HV=4, D=15),
    Trial("T = 500, D = 60/4", (500, 500), H=3, HV=3, D=15),
    Trial("T = 1000, weak gates, half masked", (1000,), normaliser=0.1, mask=0.5, H=2, HV=4),
    Trial("T = 1024, D = 100/4, strong gates", (1024,), D=25, normaliser=0.1, scale=0.1),
    Trial("T = 1024, D = 128/4", (1024,), D=32, normaliser=10.0, dtype="bfloat16"),
    Trial("T = 1500, grouped, safe gate", (1500,), H=1, HV=4, normaliser=10.0, safe_gate=True),
    Trial("T = 2048", (2048,), normaliser=1.0, l2norm=True),
    Trial("beta sigmoid in kernel", (1024,), sigmoid=True, l2norm=True, gate="softplus"),
    Trial("pack of six, hard gates", (1, 99, 200, 15, 85, 112), packed=True, D=32, mask=0.5),
    Trial("pack, gate in kernel", (256, 244, 500), packed=True, gate="softplus", l2norm=True),
    Trial("delta rule, T = 1024", (1024,), gate="none", D=32),
)
"""Short ones first, in all dtypes: most faults are judged by these."""


def make_call(trial: Trial) -> Call:
    """The call of a trial; values are float64 numbers of the dtypes they travel in."""
    rng = np.random.default_rng(42)
    N, H, HV, D = trial.states, trial.H, trial.HV, trial.D
    B, T = (1, sum(trial.lengths)) if trial.packed else (N, trial.lengths[0])
    a: dict[str, Array] = {n: rng.random((B, T, H, D)) for n in ("q", "k")}
    a["v"] = rng.random((B, T, HV, D))
    if not trial.l2norm:
        for n in ("q", "k"):
            a[n] /= np.linalg.norm(a[n], axis=-1, keepdims=True)
    raw = rng.normal(size=(B, T, HV, D))
    if trial.gate == "log":
        gates = -np.logaddexp(0.0, -raw) / trial.normaliser
        masked = rng.random(gates.shape) < trial.mask
        a["g"] = np.where(masked, -1000.0 if trial.packed else 0.0, gates)
    elif trial.gate != "none":
        a["g"] = raw
        a["A_log"] = np.log(1.0 + 15.0 * rng.random(HV))
        a["dt_bias"] = rng.normal(size=(HV, D))
    beta = rng.normal(size=(B, T, HV))
    a["beta"] = beta if trial.sigmoid else 1 / (1 + np.exp(-beta))
    a["h0"] = rng.normal(size=(N, HV, D, D))
    a["do"] = rng.normal(size=(B, T, HV, D))
    a["dht"] = rng.normal(size=(N, HV, D, D))
    narrow = ("q", "k", "v", "do", *(("g",) if trial.gate in ("softplus", "bounded") else ()), "beta")
    dtypes = {n: trial.dtype if n in narrow else "float32" for n in a}
    values: dict[str, Any] = {n: round_to(x, dtypes[n]) for n, x in a.items()}
    if trial.packed:
        values["cu_seqlens"] = np.cumsum([0, *trial.lengths], dtype=np.int64)
        dtypes["cu_seqlens"] = "int64"
    problem = Problem(
        **({"g": None} | values),
        scale=D**-0.5 if trial.scale is None else trial.scale,
        gate=trial.gate,
        lower_bound=trial.lower_bound,
        qk_l2norm=trial.l2norm,
        beta_sigmoid=trial.sigmoid,
        allow_neg_eigval=trial.neg_eigval,
    )
    return Call(
        problem,
        dtypes,
        chunk_size=trial.chunk_size,
        safe_gate=trial.safe_gate,
        state_v_first=trial.v_first,
        recompute=trial.recompute,
    )
