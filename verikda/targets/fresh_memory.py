"""Memory that a torch function takes without filling it holds NaN at first.

Allocators hand out zeros, or the right answer of an earlier call, so an element that no kernel writes may look right.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

MAKERS = (
    "empty", "empty_like", "empty_strided", "empty_permuted", "Tensor.new_empty", "Tensor.new_empty_strided",
)  # fmt: skip
"""Functions of torch whose result is uninitialised. Memory taken inside torch's own kernels is out of reach."""

DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Integers are left alone: one out of range, read as an index, would end the process where it could be a finding."""


@contextmanager
def poisoned() -> Iterator[None]:
    """A context in which `MAKERS` give NaN, looked up as `torch.empty` or `x.new_empty`, in every thread.

    They are replaced in torch: a mode of torch (TorchFunctionMode) does not reach the functions that autograd calls,
    and its deterministic mode, which fills memory too, makes torch choose other kernels.
    """
    import torch

    with ExitStack() as stack:
        for name in MAKERS:
            owner = torch.Tensor if "." in name else torch
            make = _filled(operator.attrgetter(name)(torch))
            stack.enter_context(patch.object(owner, name.rpartition(".")[2], make))
        yield


def _filled(make: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    dtypes = {getattr(torch, name) for name in DTYPES}

    @functools.wraps(make)
    def filled(*args: Any, **kwargs: Any) -> Any:
        x = make(*args, **kwargs)
        if type(x) is torch.Tensor and x.dtype in dtypes:  # not what torch.compile traces with
            with torch.no_grad():  # a new leaf may ask for gradients
                x.fill_(math.nan)
        return x

    return filled
