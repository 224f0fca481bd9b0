"""A standalone script that makes one call and judges it, for a bug report: needs NumPy and the target only.

It ends with status 1 where an output is further from float64 than the limit allows.
"""

from __future__ import annotations

import base64
import functools
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from oracles.contract import Contract
from oracles.problem import Array, Problem
from oracles.recurrence import forward, forward_reverse, growth, is_stable
from verikda.call import Call, Crashed, Malformed, Refused
from verikda.floor import GROWTH_LIMIT, LIMIT, UNDERFLOW
from verikda.noise import Floor, OutputNoise
from verikda.targets.base import Target, TargetError

_TEMPLATE = '''"""Standalone reproducer for {name}, written by verikda {version}. Needs numpy, torch and the target."""
import base64, functools, importlib, sys, zlib
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
LIMIT = {limit!r}
# float64 token recurrence; block of each element; noise of each block: summed squares of what an implementation must
# lose that rounds as "{contract}" does; and 0 for elements that do not count, 2 for those that must be finite
expected = {{
{expected}}}

def filled(make):  # memory that nothing writes holds NaN, not what the allocator left there
    def call(*args, **options):
        x = make(*args, **options)
        return x.fill_(float("nan")) if x.is_floating_point() and not x.requires_grad else x
    return call

for name in {makers!r}:
    owner, name = (torch.Tensor, name[7:]) if name.startswith("Tensor.") else (torch, name)
    setattr(owner, name, filled(getattr(owner, name)))

function = functools.reduce(getattr, {attribute!r}.split("."), importlib.import_module({module!r}))
leaves = {{name: x.requires_grad_() for name, x in inputs.items() if x.is_floating_point()}}
answer = function(**inputs, {keywords})
o, ht, *_ = (*answer, None) if isinstance(answer, (tuple, list)) else (answer, None)
got = {{"o": o, "ht": ht}}
pairs = [(y, gradients[n]) for n, y in (("do", o), ("dht", ht)) if n in gradients and y is not None]
if pairs:
    grads = torch.autograd.grad([y for y, _ in pairs], list(leaves.values()), [d for _, d in pairs], allow_unused=True)
    names = {names!r}
    got.update({{"d" + names.get(n, n): x for n, x in zip(leaves, grads)}})
print({ran!r})
wrong = []
for name, (want, labels, noise, weight) in expected.items():
    if got.get(name) is None or not want.size:
        print(f"     {{name}}: {{'missing' if got.get(name) is None else 'empty'}}")
        continue
    have = got[name].detach().to(torch.float64).cpu().numpy().reshape(want.shape)
    error = np.zeros(want.shape)
    np.subtract(have, want, out=error, where=(weight > 0) & np.isfinite(have))
    squares = (error**2).reshape(*labels.shape, -1).sum(-1)
    squares = np.bincount(labels.astype(int).ravel(), squares.ravel(), minlength=len(noise))
    ratios = np.zeros(len(noise))
    with np.errstate(divide="ignore"):  # a block without noise must be exact
        np.divide(squares, noise, out=ratios, where=squares > {underflow!r})
    block, ratio = int(ratios.argmax()), ratios.max() ** 0.5
    inside = (labels == block).reshape(labels.shape + (1,) * (want.ndim - labels.ndim))
    at = np.unravel_index(np.where(inside, np.abs(error), -1.0).argmax(), want.shape)
    bad = (weight == 2) & ~np.isfinite(have)
    if bad.any():
        at, ratio = np.unravel_index(bad.argmax(), want.shape), np.inf
    if ratio > LIMIT:
        wrong.append(name)
    print(f"{{'FAIL' if ratio > LIMIT else 'PASS' if np.isfinite(noise).any() else '    '}} {{name}}: "
          f"{{have[at]:.9g}} at {{tuple(map(int, at))}}, float64 says {{want[at]:.9g}}; "
          f"error / noise floor of its block = {{ratio:.3g}}, limit {{LIMIT:g}}")
if wrong:
    sys.exit(f"FAIL: {{', '.join(wrong)}}")
print("PASS")
'''


def _noise(
    p: Problem, contract: Contract, truth: dict[str, Array], dtypes: dict[str, str], backward: bool
) -> dict[str, OutputNoise]:
    """The noise of every output, from as many runs as a failure is confirmed by."""
    floor = Floor(p, contract, truth, dtypes, backward, 4, 0)
    while floor.refine(rare=any(noise.owed_to_few.any() for noise in floor.outputs.values())):
        pass
    floor.find_overflow()
    return floor.outputs


def _weight(noise: OutputNoise) -> Array:
    """0 where float64 overflows the output's dtype, 2 where the result must be finite, 1 elsewhere."""
    excused = noise.excuses(np.copysign(np.inf, noise.truth), LIMIT)
    weight: Array = np.where(noise.representable, np.where(excused, 1.0, 2.0), 0.0)
    return weight


def _packed(x: Array) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(x, dtype="<f8").tobytes(), 9)).decode()


def _place(name: str, function: Callable[..., Any]) -> tuple[str, str]:
    """Module and attribute under which a script finds the function of the target `name`.

    Raises
    ------
    TargetError
        When there are none.
    """
    from verikda.targets import registered

    own = (getattr(function, "__module__", ""), getattr(function, "__qualname__", ""))
    for module, attribute in (*registered(name), tuple(name.partition(":")[::2]), own):
        # what the name stands for may be a target that holds the function
        with suppress(AttributeError):
            found: Any = functools.reduce(getattr, attribute.split("."), sys.modules.get(module))
            while found != function:  # a target may run what a decorator wraps
                found, attribute = found.__wrapped__, f"{attribute}.__wrapped__"
            return module, attribute
    raise TargetError(f"a standalone script cannot import the function of {name}; replay the file instead")


def write_snippet(path: Path, target: Target, call: Call, name: str) -> None:
    """Write the script for one call of a torch function.

    Raises
    ------
    TargetError
        When the target is not a torch function: then there is nothing to call without verikda. Or when a script cannot
        import that function.
    """
    from verikda import __version__
    from verikda.targets.fresh_memory import MAKERS
    from verikda.targets.signature import STATES, argument_arrays
    from verikda.targets.torch_function import TorchFunction

    if not isinstance(target, TorchFunction):
        raise TargetError(f"a standalone script needs a torch function, and {name} is none; replay the file instead")
    module, attribute = _place(name, target.function)
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
    truth = {n: x for n, x in truth.items() if n != "ht" or call.final_state}
    dtypes = call.output_dtypes()
    try:
        result = target.run(call)
    except (Refused, Crashed, Malformed):
        ran = ""  # the script shows how it ends
    else:
        truth, ran = {n: x for n, x in truth.items() if n in result.outputs}, result.ran
        dtypes |= result.dtypes
    contract = target.contract(call)
    stable = is_stable(call.problem) or growth(call.problem) <= GROWTH_LIMIT
    expected = []
    for n, noise in _noise(call.problem, contract, truth, dtypes, call.backward).items():
        x, weight = truth[n], _weight(noise)
        if call.state_v_first and n in STATES:
            x, weight = np.swapaxes(x, -1, -2), np.swapaxes(weight, -1, -2)
        known = stable & np.isfinite(noise.per_block)
        parts = (x, noise.blocks.labels.astype(np.float64), np.where(known, noise.per_block, np.inf), weight)
        expected.append(f"    {n!r}: ({', '.join(f'array({y.shape!r}, {_packed(y)!r})' for y in parts)}),\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        _TEMPLATE.format(
            name=name,
            version=__version__,
            device=target.device,
            makers=MAKERS,
            inputs="".join(inputs),
            gradients="".join(gradients),
            expected="".join(expected),
            module=module,
            attribute=attribute,
            keywords=", ".join(f"{k}={v!r}" for k, v in keywords.items()),
            names=inverse,
            limit=LIMIT,
            underflow=UNDERFLOW**2,
            contract=contract.name,
            ran=f"{name}: {ran}" if ran else name,
        ),
        encoding="utf-8",
    )
