"""Two public reading notes print the algorithm with slips; here each printed form fails and its correction holds.

Where the printed form has no shape, it is also tried with K = V = C, where it has one and is wrong in value.
The table "Corrections" in oracles/EQUATIONS.md and the items here must be the same.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equations_mp as eq
import mpmath
import numpy as np
import pytest

import oracles

LIMIT = mpmath.mpf(10) ** -40
SHAPES = {"K=2,V=3,C=4": (10, 4, 2, 3), "K=V=C=3": (9, 3, 3, 3)}

Part = Callable[[SimpleNamespace], Any]


def scene(shape: str, **changes: Any) -> list[SimpleNamespace]:
    """Per chunk: x inputs, f forward, y backward, next the chunk after it, C and n."""
    T, C, K, V = SHAPES[shape]
    x = eq.inputs(7, T, K, V, **changes)
    forward, backward = eq.chunks(x, C), eq.chunks_reverse(x, C)
    parts = [SimpleNamespace(x=x, C=C, n=n, f=f, y=y) for n, (f, y) in enumerate(zip(forward, backward, strict=True))]
    for part, after in pairwise(parts):
        part.next = after
    return parts


def scenes(zero_gates: bool) -> Iterator[tuple[str, SimpleNamespace]]:
    """The chunks of every shape, with its name."""
    for shape, (T, _, K, _) in SHAPES.items():
        for s in scene(shape, **({"g": np.zeros((T, K))} if zero_gates else {})):
            yield shape, s


def gradient(node: str, of: str = "") -> Part:
    """Central differences in one node of the chunk, of the shape of attribute `of` of its backward."""
    return lambda s: eq.numeric(s.x, node, s.n, np.shape(getattr(s.y, of)), s.C)


def arrows(s: SimpleNamespace) -> Any:
    return eq.lower((s.f.Q * s.f.Gamma) @ (s.f.K / s.f.Gamma).T)


def transposed(s: SimpleNamespace) -> Any:
    behind = s.f.Gamma - s.f.gC
    return (eq.diag(s.f.beta) @ s.y.X.T @ (s.f.K * eq.exp(behind))) * eq.exp(-behind)


def carried(s: SimpleNamespace, decay: Any) -> Any:
    """The state gradient after chunk n from that of chunk n + 1, whose rows are those of s.next."""
    after = s.next
    return eq.diag(eq.exp(decay)) @ after.y.dS + after.f.Qg.T @ s.x.do[after.f.rows] - after.f.W.T @ after.y.dU


def unscaled_output(s: SimpleNamespace) -> Any:
    Q, f = s.x.q[s.f.rows], s.f
    return (eq.exp(f.Gamma) * Q) @ f.S + eq.lower(eq.pairs(Q, f.K, f.Gamma, f.Gamma)) @ f.Vnew


def outputs(s: SimpleNamespace) -> Any:
    return np.array(eq.tokens(s.x).o[s.f.rows])


SLIPS: dict[str, tuple[str, str, Part, Part, Part]] = {
    "kda-arrows": (
        "Aqk = (Q * Gamma) (K / Gamma)^T * M",
        "Aqk_ij = M_ij sum_d Q_id K_jd exp(Gamma_id - Gamma_jd)",
        arrows,
        lambda s: s.f.Aqk,
        lambda s: eq.lower((s.f.Q * eq.exp(s.f.Gamma)) @ (s.f.K * eq.exp(-s.f.Gamma)).T),
    ),
    "kda-state-decay": (
        "S = gC S + Kg^T Vnew",
        "S = diag(exp gC) S + Kg^T Vnew",
        lambda s: eq.diag(s.f.gC) @ s.f.S + s.f.Kg.T @ s.f.Vnew,
        lambda s: s.f.Snext,
        lambda s: eq.tokens(s.x).S[s.f.rows.stop - 1],
    ),
    "kda-dQ": (
        "dQ part 1 = exp Gamma * (O S^T)",
        "dQ part 1 = exp Gamma * (dO S^T)",
        lambda s: eq.exp(s.f.Gamma) * (s.f.O @ s.f.S.T),
        lambda s: s.y.dQ_state,
        gradient("Q in Qg", "dQ"),
    ),
    "kda-dW": (
        "dW = -dU S",
        "dW = -dU S^T",
        lambda s: -(s.y.dU @ s.f.S),
        lambda s: s.y.dW,
        gradient("W", "dW"),
    ),
    "kda-dgC-state": (
        "dgC from S = diag(S dS) * exp gC",
        "dgC from S = rowsum(S * dS) * exp gC",
        lambda s: np.diagonal(s.f.S @ s.y.dS) * eq.exp(s.f.gC),
        lambda s: s.y.dgC_S,
        gradient("gC in S", "dgC_S"),
    ),
    "kda-dgC-keys": (
        "dgC from Kg = dKg * Kg",
        "dgC from Kg = sum over rows of dKg * Kg",
        lambda s: s.y.dKg * s.f.Kg,
        lambda s: s.y.dgC_Kg,
        gradient("gC in Kg", "dgC_Kg"),
    ),
    "kda-dA": (
        "dA = (dU V^T + dW (Gamma * K)^T) diag(beta)",
        "dA = (dU V^T + dW (exp Gamma * K)^T) diag(beta)",
        lambda s: (s.y.dU @ s.f.V.T + s.y.dW @ (s.f.Gamma * s.f.K).T) @ eq.diag(s.f.beta),
        lambda s: (s.y.dU @ s.f.V.T + s.y.dW @ (eq.exp(s.f.Gamma) * s.f.K).T) @ eq.diag(s.f.beta),
        gradient("A", "dA"),
    ),
    "kda-dbeta": (
        "dbeta from W = diag(A^T dW (Gamma * K)^T)",
        "dbeta from W = diag(A^T dW (exp Gamma * K)^T)",
        lambda s: np.diagonal(s.y.P @ (s.f.Gamma * s.f.K).T),
        lambda s: np.diagonal(s.y.P @ (eq.exp(s.f.Gamma) * s.f.K).T),
        gradient("beta in betaK", "dbeta"),
    ),
    "kda-dK": (
        "dK from columns of L: diag(beta) X^T K",
        "dK from columns of L: X^T diag(beta) K",
        transposed,
        lambda s: s.y.right_L,
        gradient("K column in L", "right_L"),
    ),
    "kda-dS": (
        "dS_n = exp(gC_n) dS_{n+1} + Qg_{n+1}^T dO_{n+1} - W_{n+1}^T dU_{n+1}",
        "dS_n = exp(gC_{n+1}) dS_{n+1} + Qg_{n+1}^T dO_{n+1} - W_{n+1}^T dU_{n+1}",
        lambda s: carried(s, s.f.gC),
        lambda s: carried(s, s.next.f.gC),
        lambda s: eq.numeric(s.x, "S", s.n + 1, s.f.S.shape, s.C),
    ),
    "kda-scale-o": (
        "O = (exp Gamma * q) S + Aqk(q) Vnew",
        "O = (exp Gamma * Q) S + Aqk(Q) Vnew with Q = scale q",
        unscaled_output,
        lambda s: s.f.O,
        outputs,
    ),
    "kda-scale-dq": (
        "dq = exp Gamma * dQg + dQ_intra",
        "dq = scale (exp Gamma * dQg + dQ_intra)",
        lambda s: s.y.dQ,
        lambda s: s.x.scale * s.y.dQ,
        gradient("q", "dQ"),
    ),
    "deltanet-dV": (
        "dV = diag(beta) A dU",
        "dV = diag(beta) A^T dU",
        lambda s: eq.diag(s.f.beta) @ s.f.A @ s.y.dU,
        lambda s: s.y.dV,
        gradient("V", "dV"),
    ),
    "deltanet-dA-V": (
        "dA from U = dU (V diag(beta))^T",
        "dA from U = dU (diag(beta) V)^T",
        lambda s: s.y.dU @ (s.f.V @ eq.diag(s.f.beta)).T + s.y.dW @ s.f.betaK.T,
        lambda s: s.y.dA,
        gradient("A", "dA"),
    ),
    "deltanet-dA-K": (
        "dA from W = dW (K diag(beta))^T",
        "dA from W = dW (diag(beta) K)^T",
        lambda s: s.y.dU @ s.f.betaV.T + s.y.dW @ (s.f.K @ eq.diag(s.f.beta)).T,
        lambda s: s.y.dA,
        gradient("A", "dA"),
    ),
}
"""Test id -> (printed, holds, printed form, corrected form, what they should be)."""

INVERSE_BETA = (
    "dbeta = diag((A diag(beta))^T d(A diag(beta))) / beta + diag(X (K decayed K^T))",
    "dbeta = rowsum(A^T dU * V) + rowsum(P * exp Gamma * K) + rowsum(X * L)",
)


def usable(name: str, s: SimpleNamespace) -> bool:
    """The last chunk has no next one."""
    return name != "kda-dS" or hasattr(s, "next")


@pytest.mark.parametrize("name", SLIPS)
def test_correction(name: str) -> None:
    _, _, printed, corrected, truth = SLIPS[name]
    with mpmath.workdps(eq.DIGITS):
        for shape, s in scenes(zero_gates=name.startswith("deltanet")):
            if not usable(name, s):
                continue
            expected = truth(s)
            assert eq.difference(corrected(s), expected) < LIMIT
            try:
                wrong = printed(s)
            except ValueError:
                assert shape != "K=V=C=3", "with K = V = C every printed form has a shape"
                continue
            assert wrong.shape != expected.shape or eq.difference(wrong, expected) > 1e-3


def test_correction_inverse_beta() -> None:
    """The printed form divides by beta: right for beta != 0, and no number at beta = 0."""

    def printed(f: SimpleNamespace, y: SimpleNamespace) -> Any:
        scaled = f.A @ eq.diag(f.beta)
        dscaled = y.dU @ f.V.T + y.dW @ (eq.exp(f.Gamma) * f.K).T
        return np.diagonal(scaled.T @ dscaled) / f.beta + np.diagonal(y.X @ f.L.T)

    with mpmath.workdps(eq.DIGITS):
        beta = np.linspace(0.2, 0.9, 10)
        for s in scene("K=2,V=3,C=4", beta=beta):
            assert eq.difference(printed(s.f, s.y), gradient("beta", "dbeta")(s)) < LIMIT
        beta[[1, 5, 8]] = 0.0
        for s in scene("K=2,V=3,C=4", beta=beta):
            with pytest.raises(ZeroDivisionError):
                printed(s.f, s.y)
            assert eq.difference(s.y.dbeta, gradient("beta", "dbeta")(s)) < LIMIT


def test_table_and_items_are_the_same() -> None:
    text = (Path(oracles.__file__).parent / "EQUATIONS.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(.*)` \| `(.*)` \| `test_corrections\.py::(.*)` \|$", text, re.MULTILINE)
    items = [(printed, holds, f"test_correction[{name}]") for name, (printed, holds, *_) in SLIPS.items()]
    assert len(re.findall(r"test_corrections\.py::", text)) == len(table)
    assert table == [*items, (*INVERSE_BETA, "test_correction_inverse_beta")]


def test_every_test_that_the_equations_name_can_be_run() -> None:
    text = (Path(oracles.__file__).parent / "EQUATIONS.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+\.py::[^`]+)`", text))
    assert len(named) > 50
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", *sorted({n.partition("::")[0] for n in named})]
    found = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent, check=True).stdout
    assert not named - {line.rpartition("/")[2] for line in found.splitlines()}
