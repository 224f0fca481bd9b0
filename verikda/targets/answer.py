"""What may come back from a target's function: which errors decline a call, and which arrays are a result."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from verikda.call import Call, Crashed, Malformed, Refused
from verikda.targets.base import told
from verikda.targets.signature import result_shapes

REFUSALS = (ValueError, TypeError, NotImplementedError, AssertionError)
"""How functions decline arguments. Any other error is a crash: on arguments within its capabilities a function
must not fail, and an IndexError or a shape mismatch deep inside is a fault."""

UNSUPPORTED = re.compile(
    r"\bunsupported\b(?! operation: more than one element)|\bnot (?:yet |currently )?(?:supported|implemented)"
    r"|\bmust be contiguous\b|\bonly supports?\b|(?:does|do)(?: not|n't) support"
    r"|\bcompiled with non-empty donated buffers\b",
    re.IGNORECASE,
)
"""A plain RuntimeError with such a text is a refusal too: it is what C++ extensions raise. The exception is torch's
message about writing into an expanded tensor, which means that the function writes into its input. The last is what
torch.compile says of a second backward through one forward, unless its `donated_buffer` is off."""

BAD_GRADIENT = (
    "returned an invalid gradient",
    "returned an incorrect number of gradients",
    "expected Variable or None",
)
"""What autograd says when a backward function answers with the wrong shapes, or with no tensor."""


def sort_error(error: BaseException, where: str = "") -> Exception:
    """The outcome that an exception of the target's call means; raise it from `error`."""
    text = f"{where}{told(error)}"
    if any(part in text for part in BAD_GRADIENT):
        return Malformed(text)
    if isinstance(error, REFUSALS) or (type(error) is RuntimeError and UNSUPPORTED.search(text)):
        return Refused(text)
    return Crashed(text)


def context_ended(synchronize: Callable[[], Any]) -> bool:
    """Whether a device answers no more: after an illegal address and the like its CUDA context fails every call.

    Parameters
    ----------
    synchronize : waits for the device, as an array library does it.
    """
    try:
        synchronize()
    except RuntimeError:  # so are the errors of torch, CuPy and JAX
        return True
    return False


STATES = ("float16", "bfloat16", "float32", "float64")
"""Dtypes that a returned state may have."""


def judged_as(dtype: str) -> str:
    """The dtype as which an array is judged: float64 as float32, which the public signature has."""
    return "float32" if dtype == "float64" else dtype


def check_array(name: str, shape: tuple[int, ...], dtype: str, call: Call) -> None:
    """Check one returned array against what the public signature promises.

    o must have the dtype of q; gradients that of their input, which autograd enforces and others must keep.
    The states (ht, dh0) may have any dtype of `STATES`: the public one is float32, and what it is gets recorded.

    Raises
    ------
    Malformed
        When shape or dtype is another.
    """
    label = {"ht": "final_state"}.get(name, name)
    expected = result_shapes(call).get(name)
    if expected is None:
        raise Malformed(f"returned {label}, which this call has no input for")
    if shape != expected:
        raise Malformed(f"{label} has shape {list(shape)}; expected {list(expected)}")
    if dtype not in STATES:
        raise Malformed(f"{label} has dtype {dtype}; expected one of {', '.join(STATES)}")
    promised = call.dtypes["q" if name == "o" else name.removeprefix("d")] if name not in ("ht", "dh0") else dtype
    if dtype != promised:
        raise Malformed(f"{label} has dtype {dtype}; expected {promised}")
