"""Kimi-Linear's own torch functions from the transformers library, as targets.

The library decorates both functions so that a call goes to a fused kernel wherever one is installed. The
functions under test are the undecorated ones: the target unwraps them and checks that the code belongs to
the model's own file. Inside, everything is float32; only o is rounded back to the dtype of q.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from verikda.targets.base import TargetError
from verikda.targets.signature import read
from verikda.targets.torch_function import TorchFunction, import_torch

MODULE = "transformers.models.kimi_linear.modeling_kimi_linear"


def torch_path(name: str, target: str = "transformers") -> Callable[..., Any]:
    """The function `name` of the Kimi-Linear model, without the decorator that may replace it.

    Raises
    ------
    TargetError
        When transformers is missing, is too old to have the model, or hides the function in a way that is
        not understood.
    """
    import_torch(target)
    try:
        from transformers.models.kimi_linear import modeling_kimi_linear as module
    except ImportError as error:
        raise TargetError(
            f"target {target} needs {MODULE}, which cannot be imported ({error}): pip install 'verikda[peers]'"
        ) from error
    decorated = getattr(module, name, None)
    if decorated is None:
        raise TargetError(f"{MODULE} has no {name}; verikda knows transformers 5.17 to 5.x")
    function: Callable[..., Any] = inspect.unwrap(decorated)
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename != module.__file__ or code.co_name != name:
        raise TargetError(f"{MODULE}.{name} could not be unwrapped to the model's own torch code (found {function!r})")
    return function


def chunked(target: str = "transformers", device: str = "cpu") -> TorchFunction:
    """`chunk_kimi_delta_attention`: chunked, any chunk size. Differences of cumulative gates make g = -inf NaN."""
    function = torch_path("chunk_kimi_delta_attention", target)
    capabilities = replace(
        read(function, target).capabilities(), grouped=False, hard_reset=False, shape_invariant=False
    )
    return TorchFunction(function, target, capabilities=capabilities, contract="float32", device=device)


def on_gpu() -> TorchFunction:
    """The same function on the GPU, where its products are cuBLAS's.

    Raises
    ------
    TargetError
        See `torch_path`; and when torch finds no GPU.
    """
    return chunked("transformers:cuda", "cuda")


def recurrent() -> TorchFunction:
    """`recurrent_kimi_delta_attention`: token by token."""
    target = "transformers:recurrent"
    function = torch_path("recurrent_kimi_delta_attention", target)
    capabilities = replace(read(function, target).capabilities(), grouped=False, shape_invariant=False)
    return TorchFunction(function, target, capabilities=capabilities, contract="recurrent32", device="cpu")
