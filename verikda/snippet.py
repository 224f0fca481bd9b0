"""A standalone script that makes one call and compares it, for a bug report: needs NumPy and the target only."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

import numpy as np

from oracles.problem import Array
from oracles.recurrence import forward, forward_reverse
from verikda.call import Call
from verikda.targets.base import Target, TargetError

_TEMPLATE = '''"""Standalone reproducer for {name}, written by verikda {version}. Needs numpy, torch and the target."""
import base64, importlib, sys, zlib
import numpy as np
import torch

def array(shape, text):  # little-endian float64, zlib, base64
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8").reshape(shape)

def tensor(dtype, shape, text):
    return torch.from_numpy(array(shape, text).copy()).to(getattr(torch, dtype)).to(DEVICE)

sys.path.insert(0, "")  # a module in the current folder
DEVICE = {device!r}
inputs = {{
{inputs}}}
gradients = {{
{gradients}}}
expected = {{  # float64 token recurrence
{expected}}}

function = getattr(importlib.import_module({module!r}), {attribute!r})
leaves = {{name: x.requires_grad_() for name, x in inputs.items() if x.is_floating_point()}}
answer = function(**inputs, {keywords})
o, ht = answer if isinstance(answer, tuple) else (answer, None)
got = {{"o": o, "ht": ht}}
pairs = [(y, gradients[n]) for n, y in (("do", o), ("dht", ht)) if n in gradients and y is not None]
if pairs:
    grads = torch.autograd.grad([y for y, _ in pairs], list(leaves.values()), [d for _, d in pairs], allow_unused=True)
    names = {names!r}
    got.update({{"d" + names.get(n, n): x for n, x in zip(leaves, grads)}})
for name, want in expected.items():
    if got.get(name) is None:
        print(f"{{name:8s}} missing")
        continue
    have = got[name].detach().to(torch.float64).cpu().numpy().reshape(want.shape)
    error = np.abs(have - want)
    at = np.unravel_index(np.nanargmax(np.where(np.isnan(error), np.inf, error)), want.shape) if want.size else ()
    if want.size:
        print(f"{{name:8s}} worst at {{tuple(map(int, at))}}: expected {{want[at]!r}}, got {{have[at]!r}}")
'''


def _packed(x: Array) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(x, dtype="<f8").tobytes(), 9)).decode()


def write_snippet(path: Path, target: Target, call: Call, name: str) -> None:
    """Write the script for one call of a torch function.

    Raises
    ------
    TargetError
        When the target is not a torch function: then there is nothing to call without verikda.
    """
    from verikda import __version__
    from verikda.targets.signature import STATES, argument_arrays
    from verikda.targets.torch_function import TorchFunction

    if not isinstance(target, TorchFunction):
        raise TargetError(f"a standalone script needs a torch function, and {name} is none; replay the file instead")
    keywords = target.signature.keywords(call)
    inverse = {target.signature.argument(n): n for n in ("q", "k", "v", "g", "beta", "h0", "A_log", "dt_bias")
               if target.signature.has("initial_state" if n == "h0" else n)}  # fmt: skip
    arrays = argument_arrays(call)
    inputs, gradients = [], []
    for argument, values in arrays.items():
        row = f"tensor({call.dtypes[argument]!r}, {values.shape!r}, {_packed(values)!r}),\n"
        if argument in ("do", "dht"):
            gradients.append(f"    {argument!r}: {row}")
        else:
            inputs.append(f"    {target.signature.argument(argument)!r}: {row}")
    truth = forward_reverse(call.problem) if call.backward else forward(call.problem)
    if call.state_v_first:
        truth = {n: np.swapaxes(x, -1, -2) if n in STATES else x for n, x in truth.items()}
    expected = [f"    {n!r}: array({x.shape!r}, {_packed(x)!r}),\n" for n, x in truth.items()]
    path.write_text(
        _TEMPLATE.format(
            name=name,
            version=__version__,
            device=target.device,
            inputs="".join(inputs),
            gradients="".join(gradients),
            expected="".join(expected),
            module=target.function.__module__,
            attribute=target.function.__qualname__,
            keywords=", ".join(f"{k}={v!r}" for k, v in keywords.items()),
            names=inverse,
        ),
        encoding="utf-8",
    )
