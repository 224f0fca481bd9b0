"""Answers that are not finite, or out of range, are judged without a word of NumPy in between.

A RuntimeWarning on the terminal looks like a fault of the verifier, and hides those that are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from oracles.rounding import round_stochastic, round_to
from verikda.dtypes import ulp
from verikda.search import Search, Settings
from verikda.zoo.target import ZooTarget

STRANGE = (
    0.0,
    -0.0,
    5e-324,
    1e-310,
    1e-45,
    1e-40,
    6e-8,
    65504.0,
    65520.0,
    3.4e38,
    3.5e38,
    1e300,
    1.8e308,
    np.inf,
    np.nan,
)
SIGNALLING = {"float16": (np.uint16, 0x7D00), "bfloat16": (np.uint16, 0x7F81), "float32": (np.uint32, 0x7F800001)}
"""NaNs that tell of every use, as they lie in memory that nobody has written."""


@pytest.fixture(autouse=True)
def _errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numbers_of_every_size_are_rounded(dtype: str) -> None:
    wide = np.array([*STRANGE, *(-x for x in STRANGE)])
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    salt = np.arange(3, dtype=np.uint32)[:, None]
    for x in (wide, narrow):
        for i in range(len(x)):
            round_to(x[: i + 1], dtype)
            round_to(x[i:], dtype)
        round_stochastic(x, dtype, salt)
    ulp(wide, dtype)


def spoiled(what: str) -> ZooTarget:
    """A healthy implementation whose every answer holds numbers of one strange kind."""
    target = ZooTarget()
    healthy = target.function
    target.function = lambda **given: {n: _spoil(x, what) for n, x in healthy(**given).items()}
    return target


def _spoil(x: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
    x = x.copy()
    if what == "signalling":
        word, bits = SIGNALLING[x.dtype.name]
        x.view(word).reshape(-1)[::2] = bits
    elif what == "mixed":
        x.reshape(-1)[::3] = np.inf
        x.reshape(-1)[1::3] = -np.inf
        x.reshape(-1)[2::3] = np.nan
    else:
        x.reshape(-1)[::2] = ml_dtypes.finfo(x.dtype).max
    return x


@pytest.mark.parametrize("what", ["signalling", "mixed", "largest"])
def test_strange_answers_are_judged(what: str) -> None:
    settings = Settings(cases=8, stratified=8, turns=20, shrink_attempts=0)
    assert Search(spoiled(what), settings).run().verdict == "fail"
