"""A captured call as a safetensors file: its tensors as they were, and its flags as JSON in the header.

A file is data. Loading one reads numbers and checks all of them; it never imports or runs anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oracles.problem import Problem
from oracles.validate import check_problem
from verikda.call import Call
from verikda.dtypes import NUMPY_DTYPES

SCHEMA = 1
HEADER = "verikda"
"""Key of the header's JSON in the file's metadata."""
MAX_BYTES = 1 << 30
FLOATS = ("q", "k", "v", "g", "beta", "h0", "A_log", "dt_bias", "do", "dht")
NAMES = (*FLOATS, "cu_seqlens")
_KINDS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "I32": "int32", "I64": "int64"}
FLAGS: Mapping[str, tuple[type, ...]] = {
    "scale": (float, int, type(None)), "lower_bound": (float, int, type(None)), "gate_in_kernel": (bool,),
    "qk_l2norm": (bool,), "beta_sigmoid": (bool,), "allow_neg_eigval": (bool,), "safe_gate": (bool,),
    "state_v_first": (bool,), "recompute": (bool,), "chunk_size": (int,),
}  # fmt: skip
"""What a call says besides its tensors, and the types of it."""
DEFAULTS: Mapping[str, Any] = {
    "scale": None, "lower_bound": None, "gate_in_kernel": False, "qk_l2norm": False, "beta_sigmoid": False,
    "allow_neg_eigval": False, "safe_gate": False, "state_v_first": False, "recompute": True, "chunk_size": 64,
}  # fmt: skip


def header(function: str, flags: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a file: where the call was made, and the flags that differ from their defaults."""
    said = {n: x for n, x in flags.items() if x != DEFAULTS[n]}
    return {HEADER: json.dumps({"schema": SCHEMA, "function": function, **said}, allow_nan=False)}


def load_call(path: Path) -> tuple[Call, str]:
    """The call in a file, and the function that was called.

    Raises
    ------
    ValueError
        When it is no file of this kind, or its numbers are no call; one sentence that names the fault.
    OSError
        When it cannot be read.
    """
    path.open("rb").close()  # an error of it names the file
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"the file has {path.stat().st_size} bytes, at most {MAX_BYTES} are read; capture less")
        said, tensors = _read(path)
        function, flags = _flags(said)
        call = _call(tensors, flags)
        check_problem(call.problem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return call, function


def _read(path: Path) -> tuple[object, dict[str, tuple[str, np.ndarray[Any, Any]]]]:
    """The header's JSON, and dtype name and values (float64 or int64) of every tensor."""
    try:
        from safetensors import SafetensorError, deserialize, safe_open
    except ImportError as error:
        raise ValueError(
            f"captured calls need safetensors, which cannot be imported ({error}): pip install safetensors"
        ) from None
    try:
        with safe_open(str(path), framework="np") as file:
            metadata = file.metadata() or {}
        found = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file ({error}); give one that verikda.capture wrote") from None
    if HEADER not in metadata:
        raise ValueError("a safetensors file, but none that verikda.capture wrote: its metadata has no 'verikda'")
    try:
        said = json.loads(metadata[HEADER])
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"its header is not JSON ({error}); capture the call again") from None
    tensors = {}
    for name, tensor in found:
        dtype = _KINDS.get(tensor["dtype"])
        if dtype is None:
            raise ValueError(f"{name} is {tensor['dtype']}; a call has {', '.join(_KINDS)}")
        raw = np.frombuffer(tensor["data"], NUMPY_DTYPES[dtype]).reshape(tensor["shape"])
        tensors[name] = (dtype, raw.astype(np.int64 if dtype.startswith("int") else np.float64))
    return said, tensors


def _flags(said: object) -> tuple[str, dict[str, Any]]:
    if not isinstance(said, dict) or said.get("schema") != SCHEMA or isinstance(said.get("schema"), bool):
        seen = said.get("schema") if isinstance(said, dict) else type(said).__name__
        raise ValueError(f"its header has schema {seen!r}; this version reads {SCHEMA}")
    function = said.get("function")
    if not isinstance(function, str):
        raise ValueError(f"its header names the function {function!r}; it must be text")
    given = {n: x for n, x in said.items() if n not in ("schema", "function")}
    unknown = sorted(set(given) - set(FLAGS))
    if unknown:
        raise ValueError(f"its header has the unknown key {unknown[0]!r}; a call has only {', '.join(FLAGS)}")
    for name, value in given.items():
        right = type(value) in FLAGS[name]
        if not right or (isinstance(value, float | int) and not abs(value) <= sys.float_info.max):
            kinds = " or ".join("null" if t is type(None) else t.__name__ for t in FLAGS[name])
            raise ValueError(f"{name} is {value!r}; it must be {kinds}")
    flags = {**DEFAULTS, **given}
    if flags["chunk_size"] not in (16, 32, 64):
        raise ValueError(f"chunk_size is {flags['chunk_size']}; it must be 16, 32 or 64")
    return function, flags


def _call(tensors: Mapping[str, tuple[str, Any]], flags: Mapping[str, Any]) -> Call:
    """The call, in the shapes and orders of `Problem`."""
    missing = [n for n in ("q", "k", "v", "beta") if n not in tensors]
    unknown = sorted(set(tensors) - set(NAMES))
    if missing or unknown:
        what = f"has no {missing[0]}" if missing else f"has the unknown tensor {unknown[0]!r}"
        raise ValueError(
            f"it {what}; a call has q, k, v, beta, and may have {', '.join(n for n in NAMES if len(n) > 1)}"
        )
    for name, (dtype, values) in tensors.items():
        if (name == "cu_seqlens") != dtype.startswith("int"):
            raise ValueError(
                f"{name} is {dtype}; {'offsets are integers' if name == 'cu_seqlens' else 'it is a float'}"
            )
        if name in ("q", "v") and values.ndim != 4:
            raise ValueError(f"{name} has shape {list(values.shape)}; expected [B,T,heads,channels]")
    x: dict[str, Any] = {name: found for name, (_, found) in tensors.items()}
    HV, K = x["v"].shape[2], x["q"].shape[3]
    if "dt_bias" in x:
        if x["dt_bias"].size != HV * K:
            raise ValueError(f"dt_bias has {x['dt_bias'].size} elements; HV K is {HV * K}")
        x["dt_bias"] = x["dt_bias"].reshape(HV, K)
    if "A_log" in x:
        x["A_log"] = x["A_log"].reshape(-1)
    if flags["state_v_first"]:
        x |= {n: x[n].swapaxes(-1, -2) for n in ("h0", "dht") if n in x and x[n].ndim == 4}
    inside = "bounded" if flags["lower_bound"] is not None else "softplus"
    scale = flags["scale"]
    problem = Problem(
        **{"g": None, **x}, scale=float(K**-0.5 if scale is None else scale),
        gate="none" if "g" not in x else inside if flags["gate_in_kernel"] else "log",  # type: ignore[arg-type]
        lower_bound=flags["lower_bound"] if flags["gate_in_kernel"] else None,
        qk_l2norm=flags["qk_l2norm"], beta_sigmoid=flags["beta_sigmoid"], allow_neg_eigval=flags["allow_neg_eigval"],
    )  # fmt: skip
    return Call(
        problem, {name: dtype for name, (dtype, _) in tensors.items()}, backward="do" in x or "dht" in x,
        chunk_size=flags["chunk_size"], safe_gate=flags["safe_gate"], state_v_first=flags["state_v_first"],
        recompute=flags["recompute"],
    )  # fmt: skip
