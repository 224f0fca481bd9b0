"""Operators and torch.compile: it must not look inside, where there are addresses and launches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, run as it is where torch.compile meets it, like `torch.compiler.disable` but without importing torch.

    The graph breaks there; gradients still pass.
    """
    hidden: list[Callable[P, R]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not hidden:
            torch: Any = sys.modules.get("torch")
            if torch is None:
                return function(*args, **kwargs)
            hidden.append(torch.compiler.disable(function))
        return hidden[0](*args, **kwargs)

    return call
