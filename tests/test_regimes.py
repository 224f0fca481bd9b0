"""Regimes: each is really what its name says.

Each has a predicate here, which must hold for it and fail for a rival: a regime that drew something else, or a
predicate that holds for anything, is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from oracles.problem import Problem
from oracles.recurrence import is_stable
from verikda import regimes
from verikda.case import Case
from verikda.inputs import make_call


def norms(p: Problem) -> np.ndarray:
    return np.sqrt((p.k**2).sum(-1))


def cosines(p: Problem) -> np.ndarray:
    """Cosines of neighbouring keys in each head, within sequences."""
    out = [
        (p.k[b, a : z - 1] * p.k[b, a + 1 : z]).sum(-1) / (norms(p)[b, a : z - 1] * norms(p)[b, a + 1 : z] + 1e-300)
        for b, a, z in p.spans
        if z - a > 1
    ]
    return np.concatenate(out).ravel()


def rows_of(p: Problem, x: np.ndarray, which: Callable[[int, int, int], int]) -> np.ndarray:
    """One row of every sequence that is not empty, [N', ...]."""
    return np.stack([x[b, which(b, a, z)] for b, a, z in p.spans if z > a])


def last(p: Problem, x: np.ndarray) -> np.ndarray:
    return rows_of(p, x, lambda b, a, z: z - 1)


def each(p: Problem, x: np.ndarray) -> list[np.ndarray]:
    return [x[b, a:z] for b, a, z in p.spans if z > a]


def between(x: np.ndarray, low: float, high: float) -> bool:
    return bool(((x >= low) & (x <= high)).all())


Predicate = Callable[[Problem], bool]

GATES: dict[str, tuple[str, Predicate]] = {
    "random": ("slow", lambda p: p.g.max() < 0 and p.g.min() < -3 and -1.1 < p.g.mean() < -0.9),
    "zero": ("slow", lambda p: bool((p.g == 0).all())),
    "bound": ("random", lambda p: bool((p.g == -1).all())),
    "slow": ("random", lambda p: between(p.g, -0.02, -0.001)),
    "one_slow": ("mixed", lambda p: bool(((p.g > -0.03).sum(-1) == 1).all()) and p.g.min() < -0.5),
    "mixed": ("one_slow", lambda p: between(p.g[..., 0::2], -1.5, -0.5) and between(p.g[..., 1::2], -0.02, 0)),
    "spike": (
        "slow",
        lambda p: all((s == -30).all((1, 2)).sum() == 1 for s in each(p, p.g)) and np.median(p.g) > -0.02,
    ),
    "reset": ("spike", lambda p: all(np.isneginf(s).all((1, 2)).any() for s in each(p, p.g)) and p.g.max() > -0.02),
    "ragged": ("random", lambda p: p.g.min(-1).min() < -4 and (p.g.min(-1) > -0.01).any() and p.g.max() < 0),
    "model": ("random", lambda p: -0.3 < np.median(p.g) < -0.02 and p.g.min() < -2 and p.g.max() < 0),
    "heads": ("random", lambda p: between(p.g[:, :, 0], -6, -2) and between(p.g[:, :, 2], -1.5 / 256, -0.4 / 256)),
    "last_row_strong": ("slow", lambda p: bool((last(p, p.g) == -16).all()) and (p.g > -0.03).mean() > 0.9),
    "tiny_steps": ("slow", lambda p: bool((p.g == -1 / 1024).all())),
    "zero_rows": ("random", lambda p: 0.2 < (p.g == 0).all((2, 3)).mean() < 0.8 and p.g.min() < -0.5),
    "positive": ("random", lambda p: p.g.min() > 0 and p.g.max() <= 1),
}
KEYS: dict[str, tuple[str, Predicate]] = {
    "random": ("collinear", lambda p: between(norms(p), 0.99, 1) and np.abs(cosines(p)).mean() < 0.5),
    "collinear": ("random", lambda p: cosines(p).min() > 0.8 and cosines(p).max() < 1 - 1e-6),
    "repeated": ("collinear", lambda p: bool((p.k == p.k[:, :1]).all()) and between(norms(p), 0.99, 1)),
    "alternating": ("collinear", lambda p: cosines(p).max() < -0.8),
    "orthogonal": (
        "random",
        lambda p: set(np.unique(p.k)) == {0, 1} and (norms(p) == 1).all() and not cosines(p).any(),
    ),
    "sparse_int": ("orthogonal", lambda p: set(np.unique(p.k)) == {-1, 0, 1} and bool((norms(p) == 1).all())),
    "zero_rows": ("random", lambda p: all((s == 0).all((1, 2)).any() for s in each(p, p.k)) and norms(p).max() > 0.9),
    "small": ("random", lambda p: between(norms(p) * 1024, 0.99, 1)),
    "unnormalised": ("random", lambda p: norms(p).max() > 3 and 0.9 < (p.k**2).mean() < 1.1),
}
QUERIES: dict[str, tuple[str, Predicate]] = {
    "random": ("keys", lambda p: between((p.q**2).sum(-1), 0.99, 1.01) and np.abs((p.q * p.k).sum(-1)).mean() < 0.5),
    "keys": ("random", lambda p: (p.q * p.k).sum(-1).min() > 0.98),
    "zero": ("random", lambda p: not p.q.any()),
    "zero_rows": ("random", lambda p: 0 < (p.q == 0).all((2, 3)).mean() < 0.6),
    "ints": ("random", lambda p: set(np.unique(p.q)) == {-2, -1, 0, 1, 2}),
    "one_large_row": (
        "random",
        lambda p: all(((s**2).sum(-1).min(-1) > 4000).sum() == 1 for s in each(p, p.q)),
    ),
}
BETAS: dict[str, tuple[str, Predicate]] = {
    "random": ("near_one", lambda p: between(p.beta, 0, 1) and 0.4 < p.beta.mean() < 0.6 and p.beta.min() > 0),
    "one": ("near_one", lambda p: bool((p.beta == 1).all())),
    "zero": ("tiny", lambda p: not p.beta.any()),
    "near_one": ("random", lambda p: between(p.beta, 1 - 1 / 64, 1) and p.beta.min() < 0.99),
    "tiny": ("random", lambda p: between(p.beta, 0, 1 / 1024) and p.beta.min() > 0),
    "zero_rows": ("random", lambda p: all((s == 0).all(1).any() for s in each(p, p.beta)) and p.beta.max() > 0.5),
    "binary": ("zero_rows", lambda p: set(np.unique(p.beta)) == {0, 1}),
    "up_to_two": ("random", lambda p: between(p.beta, 0, 2) and p.beta.max() > 1.8 and p.beta.min() > 0),
}
VALUES: dict[str, tuple[str, Predicate]] = {
    "random": ("one_large_row", lambda p: 0.85 < (p.v**2).mean() < 1.15 and np.abs(p.v).max() < 3.47),
    "zero": ("random", lambda p: not p.v.any()),
    "ints": ("random", lambda p: set(np.unique(p.v)) == set(range(-4, 5))),
    "constant": ("random", lambda p: bool((p.v == p.v[:, :1]).all()) and p.v.any()),
    "one_large_row": (
        "random",
        lambda p: all((np.abs(s).max((1, 2)) > 20).sum() == 1 for s in each(p, p.v)) and np.median(np.abs(p.v)) < 1,
    ),
    "converged": ("random", lambda p: rank_with_keys(p) <= p.k.shape[3]),
}
DOS: dict[str, tuple[str, Predicate]] = {
    "random": ("decades", lambda p: 0.85 < (p.do**2).mean() < 1.15),
    "zero": ("random", lambda p: not p.do.any()),
    "ints": ("random", lambda p: set(np.unique(p.do)) == {-2, -1, 0, 1, 2}),
    "last_token_only": (
        "random",
        lambda p: last(p, p.do).any() and all(not s[:-1].any() for s in each(p, p.do)),
    ),
    "first_token_only": (
        "last_token_only",
        lambda p: all(s[0].any() and not s[1:].any() for s in each(p, p.do)),
    ),
    "decades": (
        "random",
        lambda p: all(np.abs(s[-1]).max() < 2.0 ** (2 - 20 * (len(s) - 1) // len(s)) for s in each(p, p.do)),
    ),
}


def rank_with_keys(p: Problem) -> int:
    """Rank of [K V] in head 0: K when v is a linear map of k."""
    return int(np.linalg.matrix_rank(np.concatenate([p.k[0, :, 0], p.v[0, :, 0]], axis=1), tol=0.05))


PREDICATES = {
    "gate_regime": GATES,
    "key_regime": KEYS,
    "query_regime": QUERIES,
    "beta_regime": BETAS,
    "value_regime": VALUES,
    "do_regime": DOS,
}
SCENES = {
    "long": Case(lengths=(200,), heads=4, K=8, V=6, seed=1),
    "pack": Case(lengths=(30, 0, 80, 1, 90), packed=True, heads=3, K=8, V=6, seed=2),
}


def test_regimes_that_follow_keys_follow_their_own_head() -> None:
    """Value head i belongs to key head i // groups: only there is v a linear map of k."""
    case = Case(lengths=(64,), heads=2, groups=2, K=8, V=8, value_regime="converged", query_regime="keys")
    p = make_call(case).problem
    for head in range(4):
        own, other = (np.concatenate([p.k[0, :, h], p.v[0, :, head]], axis=1) for h in (head // 2, 1 - head // 2))
        assert np.linalg.matrix_rank(own, tol=0.05) == 8
        assert np.linalg.matrix_rank(other, tol=0.05) > 8


def test_every_regime_has_a_predicate() -> None:
    assert {field: set(table) for field, table in regimes.KINDS.items()} == {
        field: set(table) for field, table in PREDICATES.items()
    }


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize(("field", "name"), [(f, n) for f, table in PREDICATES.items() for n in table])
def test_regime_is_what_it_says(field: str, name: str, scene: str) -> None:
    rival, predicate = PREDICATES[field][name]
    assert predicate(make_call(replace(SCENES[scene], **{field: name})).problem)
    assert not predicate(make_call(replace(SCENES[scene], **{field: rival})).problem)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_stable_regimes_are_stable_and_others_are_not(dtype: str) -> None:
    """Every pair of gate, key and beta regime, after rounding; for every K the length of a key stays at most 1."""
    unstable = []
    for gate in regimes.GATES.values():
        for key in regimes.KEYS.values():
            for beta in regimes.BETAS:
                case = Case(
                    lengths=(13,), heads=2, K=24, V=1, dtype=dtype, g_dtype="same", beta_dtype="same",
                    gate_regime=gate.name, key_regime=key.name, beta_regime=beta,
                )  # fmt: skip
                stable = is_stable(make_call(case).problem)
                assert stable or not (gate.stable and key.stable), case
                if not stable:
                    unstable.append((gate.name, key.name))
    assert {g for g, _ in unstable} >= {"positive"}
    assert {k for _, k in unstable} >= {"unnormalised"}


@pytest.mark.parametrize("K", [1, 2, 3, 17, 100, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rounded_keys_are_at_most_one_long(K: int, dtype: str) -> None:
    for regime in regimes.KEYS.values():
        if regime.stable:
            for seed in range(3):
                case = Case(lengths=(64,), heads=2, K=K, dtype=dtype, key_regime=regime.name, seed=seed)
                assert (make_call(case).problem.k ** 2).sum(-1).max() <= 1, regime.name


def test_every_regime_says_what_it_draws_and_faults_have_theirs() -> None:
    every = [regime for table in regimes.KINDS.values() for regime in table.values()]
    assert all(regime.text.endswith(".") and len(regime.text) < 130 for regime in every)
    assert any("cudnn #1017" in regime.faults for regime in every)
