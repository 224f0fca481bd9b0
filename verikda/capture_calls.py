"""Real calls of a delta-rule operator, kept as files while a model trains or answers.

    with verikda.capture("captured"):              # the operators of the models that are imported
        loss(model(batch)).backward()

    kda = verikda.capture("captured")(chunk_kda)   # one function; as a decorator too

Inputs are copied before the call, output gradients by hooks when the backward reaches them. The operator gets the very
arguments that it was given, and its answer is passed on as it is.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verikda.capture_file import DEFAULTS, FLAGS, header
from verikda.targets.signature import Signature, read

KNOWN = (
    "transformers.models.kimi_linear.modeling_kimi_linear:chunk_kimi_delta_attention",
    "fla.layers.kda:chunk_kda",
    "fla.ops.kda:chunk_kda",
    "fla.layers.delta_net:chunk_delta_rule",
    "fla.ops.delta_rule:chunk_delta_rule",
    "verikda.ops:chunk_kda",
    "verikda.ops:chunk_delta_rule",
)
"""Where models find their operators by name, at the time of the call."""

PARAMETERS = {
    "gate_in_kernel": "use_gate_in_kernel",
    "qk_l2norm": "use_qk_l2norm_in_kernel",
    "beta_sigmoid": "use_beta_sigmoid_in_kernel",
    "recompute": "disable_recompute",
}
"""Parameters of the public signature whose names differ from those of `Call`."""

FROM_KWARGS = ("A_log", "dt_bias", "chunk_size")
"""Parameters that functions are known to read from their `**kwargs`."""


class Capture:
    """Keeps calls as files, as a context or around one function.

    Parameters
    ----------
    folder : where the files go; made if missing.
    functions : "module:function" of operators that are looked up by that name when they are called; None means those of
        `KNOWN` whose module is imported.
    limit : calls that are kept; the others just run.
    warn : whether a context in which no call was made warns when it ends. Only calls by the module's attribute are
        seen, not those by a name that `from module import function` had bound before.

    Raises
    ------
    ValueError
        For a limit below 1. On entering, for a name that cannot be found, or when no known operator is imported.
    """

    def __init__(
        self, folder: str | Path, functions: Sequence[str] | None = None, limit: int = 8, *, warn: bool = True
    ) -> None:
        if limit < 1:
            raise ValueError(f"limit is {limit}; it must be at least 1")
        self.folder, self.limit, self.count = Path(folder), limit, 0
        self._number = 0
        self._functions = functions
        self._warn = warn
        self._patched: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Capture:
        """Put a wrapper in the place of each operator."""
        names = self._functions
        if names is None:
            names = [n for n in KNOWN if n.partition(":")[0] in sys.modules and self._is_there(n)]
        if not names:
            raise ValueError(
                "no known operator is imported yet: import the model first, or name functions=('module:function',)"
            )
        found = [(*self._find(name), name) for name in names]
        for module, attribute, name in found:
            original = getattr(module, attribute)
            self._patched.append((module, attribute, vars(module).get(attribute)))
            setattr(module, attribute, self._wrapped(original, name))
        return self

    def __exit__(self, *error: object) -> None:
        """Put the operators back; warn if the context ended as it should and no call was seen."""
        names = [f"{module.__name__}:{attribute}" for module, attribute, _ in self._patched]
        while self._patched:
            module, attribute, original = self._patched.pop()
            if original is None:  # it had come from the module's __getattr__
                delattr(module, attribute)
            else:
                setattr(module, attribute, original)
        if not self.count and error[:1] in ((), (None,)) and self._warn:
            warnings.warn(
                f"verikda.capture kept nothing in {self.folder}: nobody called {', '.join(names)} by those names while "
                "it was active. A name that `from module import function` had bound before is not seen: give "
                "functions=('module_that_calls_it:function',), or wrap the function itself",
                stacklevel=2,
            )

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, every call of which is kept until the limit is reached."""
        return self._wrapped(function, f"{function.__module__}:{getattr(function, '__qualname__', 'function')}")

    @staticmethod
    def _is_there(name: str) -> bool:
        module, _, attribute = name.partition(":")
        return hasattr(sys.modules[module], attribute)

    @staticmethod
    def _find(name: str) -> tuple[Any, str]:
        module, _, attribute = name.partition(":")
        try:
            found = importlib.import_module(module)
            getattr(found, attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{name!r} cannot be found ({error}); write module:function") from error
        return found, attribute

    def _wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        signature = read(function, name, FROM_KWARGS)
        parameters = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.count >= self.limit:
                return function(*args, **kwargs)
            kept = _Kept(self._path(name), name, _given(signature, parameters, args, kwargs))
            answer = function(*args, **kwargs)
            kept.watch(answer)
            return answer

        return call

    def _path(self, name: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.count += 1
        while True:  # calls of earlier runs stay
            self._number += 1
            path = self.folder / f"{name.rpartition(':')[2].replace('.', '-')}-{self._number:03d}.safetensors"
            if not path.exists():
                return path


def capture(folder: str | Path, functions: Sequence[str] | None = None, limit: int = 8) -> Capture:
    """A context, or a decorator of one operator, that keeps real calls as files. See `Capture`."""
    return Capture(folder, functions, limit)


def _given(
    signature: Signature, parameters: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by the names of the public signature; those that were not given have their default."""
    bound = parameters.bind(*args, **kwargs)
    bound.apply_defaults()
    swallowed = [n for n, p in parameters.parameters.items() if p.kind is p.VAR_KEYWORD]
    values = {**bound.arguments, **(bound.arguments[swallowed[0]] if swallowed else {})}
    return {known: values.get(name) for known, name in signature.names.items()}


class _Kept:
    """One call: written when it is made, and again whenever an output gradient arrives."""

    def __init__(self, path: Path, function: str, given: dict[str, Any]) -> None:
        self._path = path
        flags = {}
        for name, default in DEFAULTS.items():
            value = given.get(PARAMETERS.get(name, name))
            kind = FLAGS[name][0]
            flags[name] = default if value is None else not value if name == "recompute" else kind(value)
        self._header = header(function, flags)
        names = {"initial_state": "h0"}
        tensors = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias", "cu_seqlens")
        self._tensors = {names.get(n, n): _copy(given[n]) for n in tensors if given.get(n) is not None}

    def watch(self, answer: Any) -> None:
        """Write the call; and again with the gradient of each output of the answer that gets one."""
        parts = answer if isinstance(answer, tuple | list) else (answer,)
        for name, output in zip(("do", "dht"), parts, strict=False):
            if getattr(output, "requires_grad", False):
                output.register_hook(functools.partial(self._arrived, name))
        self._write()

    def _arrived(self, name: str, gradient: Any) -> None:
        self._tensors[name] = _copy(gradient)
        self._write()

    def _write(self) -> None:
        from safetensors.torch import save_file

        part = self._path.with_suffix(".part")  # a run that is killed while it writes leaves the whole file before
        save_file(self._tensors, str(part), metadata=self._header)
        part.replace(self._path)


def _copy(tensor: Any) -> Any:
    """A compact copy on the host, as a tensor; of NumPy and CuPy arrays too."""
    if not hasattr(tensor, "detach"):
        import numpy as np

        from verikda.targets.torch_function import from_numpy

        return from_numpy(np.array(tensor.get() if hasattr(tensor, "get") else tensor, order="C"))
    import torch

    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
