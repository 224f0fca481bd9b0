"""Any function on torch tensors with a public chunk_kda or chunk_delta_rule signature, as a target."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from oracles.contract import Contract
from verikda.call import Call, Capabilities, Crashed, Malformed, Refused, Result
from verikda.targets import signature as sig
from verikda.targets.base import TargetError
from verikda.targets.contracts import contract_by_name
from verikda.targets.loading import describe
from verikda.targets.memory import Block, Buffer, place_call

Declared = str | Contract | Callable[[Call], Contract]
"""A contract by name (`contracts.NAMES`), as it is, or depending on the call."""

REFUSALS = (ValueError, TypeError, NotImplementedError, AssertionError)
"""How functions decline arguments. Other errors are crashes: on arguments within its capabilities a function
must not fail, and an IndexError or a shape mismatch deep inside is a fault."""

UNSUPPORTED = re.compile(
    r"\bunsupported\b(?! operation: more than one element)|\bnot (?:yet |currently )?(?:supported|implemented)"
    r"|\bonly supports?\b|(?:does|do)(?: not|n't) support",
    re.IGNORECASE,
)
"""A RuntimeError with such a text is a refusal too: it is what C++ extensions raise. The exception is torch's
message about writing into an expanded tensor, which means that the function writes into its input."""


class TorchFunction:
    """A target that calls `function` with tensors and takes gradients by autograd.

    Parameters
    ----------
    function : takes q, k, v, (g,) beta and what else its signature names; returns o or (o, final_state, ...).
    name : of the target.
    capabilities : None derives them from the signature, then applies the function's own `verikda_capabilities`.
    contract : None takes the function's own `verikda_contract`, else 16-bit storage for 16-bit inputs.
    device : None is the function's own `verikda_device`, else "cuda" where torch has a GPU and "cpu" elsewhere.
    swallowed : parameters it reads from `**kwargs` without naming them.

    Raises
    ------
    TargetError
        When torch is missing or the signature cannot be used.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        capabilities: Capabilities | None = None,
        contract: Declared | None = None,
        device: str | None = None,
        swallowed: tuple[str, ...] = (),
    ) -> None:
        import_torch(name)
        self.function = function
        self._name = name
        self.signature = sig.read(function, name, swallowed)
        if capabilities is None:
            changes = getattr(function, "verikda_capabilities", {})
            capabilities = sig.declared(self.signature.capabilities(), changes, name)
        self._capabilities = capabilities
        self._contract = contract if contract is not None else getattr(function, "verikda_contract", "storage16")
        if isinstance(self._contract, str):
            contract_by_name(self._contract, "float32", 64)
        self._device = device if device is not None else getattr(function, "verikda_device", None)

    @property
    def name(self) -> str:
        """The name under which it was made."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """What its signature allows, or what it declares."""
        return self._capabilities

    def contract(self, call: Call) -> Contract:
        """The declared contract, for the dtype and chunk size of this call."""
        return pick_contract(self._contract, call)

    def device(self) -> str:
        """Where the tensors are put."""
        torch = import_torch(self._name)
        return self._device or ("cuda" if torch.cuda.is_available() else "cpu")

    def run(self, call: Call) -> Result:
        """Make the call and, where gradients are wanted, the reverse call.

        A gradient that autograd reports as None, or every gradient where `o` carries none, is absent from the
        result.

        Raises
        ------
        Refused, Crashed, Malformed
            See `Target.run`.
        ValueError
            When the call needs what the signature lacks, or its values are not representable in their dtypes.
        """
        torch = import_torch(self._name)
        if call.backward and call.problem.do is None and call.problem.dht is None:
            raise ValueError("a call with backward needs do or dht")
        device = self.device()
        keywords = self.signature.keywords(call)
        blocks = place_call(call, sig.argument_arrays(call))
        buffers = {name: to_torch(block, device) for name, block in blocks.items()}
        views = {n: buffers[n].as_strided(b.shape, b.strides, b.offset).detach() for n, b in blocks.items()}
        leaves = [n for n in sig.DIFFERENTIABLE if n in views] if call.backward else []
        for name in leaves:
            views[name].requires_grad_(True)
        keywords |= {self.signature.argument(n): t for n, t in views.items() if n not in ("do", "dht")}

        answer = guarded(lambda: self.function(**keywords), device)
        o, ht = outputs(answer, call, self.signature.has("output_final_state"), torch)
        found: dict[str, Any] = {"o": o} if ht is None else {"o": o, "ht": ht}
        if call.backward and o.requires_grad:
            found |= gradients(o, ht, {n: views[n] for n in leaves}, views.get("do"), views.get("dht"), device)

        changed: list[str] = []
        for name, block in blocks.items():
            changed += block.changes(to_numpy(buffers[name], block))
        return Result(
            outputs={n: sig.normal_form(n, float64(t), call) for n, t in found.items()},
            dtypes={n: str(t.dtype).removeprefix("torch.") for n, t in found.items()},
            changed=tuple(changed),
            ran=f"{describe(self.function)} on {device_name(device)}",
            layouts={n: b.layout for n, b in blocks.items()},
        )


def pick_contract(declared: Declared, call: Call) -> Contract:
    """The contract that a declaration means for one call."""
    if isinstance(declared, str):
        return contract_by_name(declared, call.dtypes["q"], call.chunk_size)
    return declared if isinstance(declared, Contract) else declared(call)


def guarded(call: Callable[[], Any], device: str, where: str = "") -> Any:
    """The value of `call()`, with its exceptions sorted into refusals, malformed results and crashes."""
    try:
        value = call()
        if device.startswith("cuda"):
            import_torch("").cuda.synchronize()
        return value
    except REFUSALS as error:
        raise Refused(f"{where}{type(error).__name__}: {error}") from error
    except Exception as error:
        text = f"{where}{type(error).__name__}: {error}"
        if type(error) is RuntimeError and UNSUPPORTED.search(str(error)):
            raise Refused(text) from error
        if "returned an invalid gradient" in text or "returned an incorrect number of gradients" in text:
            raise Malformed(text) from error
        raise Crashed(text) from error


def outputs(answer: Any, call: Call, has_state: bool, torch: Any) -> tuple[Any, Any]:
    """(o, final state or None) of what a function returned, checked.

    Raises
    ------
    Malformed
        When it is not a tensor or a tuple that starts with o and the final state, in the shapes and (o) the
        dtype that the public signature promises.
    """
    parts = tuple(answer) if isinstance(answer, tuple | list) else (answer,)
    if not parts:
        raise Malformed("returned an empty tuple; expected o or (o, final_state)")
    o, ht = parts[0], parts[1] if len(parts) > 1 else None
    expected = sig.result_shapes(call)
    if has_state and ht is None:
        raise Malformed("returned no final_state although output_final_state=True was given")
    for name, value in (("o", o), ("final_state", ht if has_state else None)):
        shape = expected["o" if name == "o" else "ht"]
        if value is None and name == "final_state":
            continue
        if not isinstance(value, torch.Tensor):
            raise Malformed(f"{name} is a {type(value).__name__}; expected a tensor of shape {list(shape)}")
        if tuple(value.shape) != shape:
            raise Malformed(f"{name} has shape {list(value.shape)}; expected {list(shape)}")
        if not value.dtype.is_floating_point:
            raise Malformed(f"{name} has dtype {value.dtype}; expected a floating dtype")
    got = str(o.dtype).removeprefix("torch.")
    if got != call.dtypes["q"]:
        raise Malformed(f"o has dtype {got}; expected that of q, {call.dtypes['q']}")
    return o, ht if has_state else None


def gradients(o: Any, ht: Any, leaves: Mapping[str, Any], do: Any, dht: Any, device: str) -> dict[str, Any]:
    """Gradients of <o, do> + <ht, dht> by name; those that autograd does not know are left out."""
    torch = import_torch("")
    pairs = [(o, do)] if do is not None else []
    if dht is not None:
        if ht is None or not ht.requires_grad:
            raise Malformed("final_state carries no gradient, so the gradient that comes from it is lost")
        pairs.append((ht, dht))
    roots, weights = zip(*pairs, strict=True)
    grads = guarded(
        lambda: torch.autograd.grad(roots, tuple(leaves.values()), weights, allow_unused=True), device, "backward: "
    )
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}


def import_torch(name: str) -> Any:
    """The torch module, or a `TargetError` that says how to install it."""
    try:
        import torch
    except ImportError as error:
        raise TargetError(
            f"target {name} needs PyTorch, which cannot be imported ({error}): pip install 'verikda[torch]'"
        ) from error
    return torch


def to_torch(block: Block, device: str) -> Any:
    """A fresh flat tensor with the block's buffer on `device`."""
    torch = import_torch("")
    buffer = block.copy()
    if block.buffer.dtype.name == "bfloat16":
        return torch.from_numpy(buffer.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(buffer).to(device)


def to_numpy(buffer: Any, block: Block) -> Buffer:
    """The flat tensor back as an array of the block's dtype, bit for bit."""
    torch = import_torch("")
    host = buffer.detach().cpu()
    if block.buffer.dtype.name == "bfloat16":
        back: Buffer = host.view(torch.int16).numpy().view(block.buffer.dtype)
        return back
    plain: Buffer = host.numpy()
    return plain


def float64(tensor: Any) -> npt.NDArray[np.float64]:
    """A float64 copy on the host."""
    torch = import_torch("")
    return np.array(tensor.detach().to(device="cpu", dtype=torch.float64).numpy())


def device_name(device: str) -> str:
    """The GPU's own name, or "cpu"."""
    return str(import_torch("").cuda.get_device_name(device)) if device.startswith("cuda") else device
