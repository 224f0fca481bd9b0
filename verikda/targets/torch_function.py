"""Any function on torch tensors with a public chunk_kda or chunk_delta_rule signature, as a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from verikda.call import Call, Capabilities, Malformed, Result
from verikda.targets import signature as sig
from verikda.targets.answer import check_array, judged_as
from verikda.targets.base import TargetError
from verikda.targets.contracts import Declared
from verikda.targets.fresh_memory import poisoned
from verikda.targets.function import FunctionTarget
from verikda.targets.loading import describe
from verikda.targets.memory import Block, Buffer, place_call


class TorchFunction(FunctionTarget):
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
        torch = import_torch(name)
        super().__init__(function, name, sig.read(function, name, swallowed), capabilities, contract)
        self.device = str(device or sig.attribute(function, "verikda_device") or _default_device(torch))
        try:
            torch.device(self.device)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise TargetError(f"target {name} asks for device {self.device!r}: {first}; use 'cpu' or 'cuda'") from None
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise TargetError(f"target {name} asks for device {self.device!r}, but torch finds no GPU; use 'cpu'")

    def run(self, call: Call) -> Result:
        """Make the call and, where gradients are wanted, the reverse call.

        A gradient that autograd reports as None, or every gradient where `o` carries none, is absent from the
        result, unless the loss cannot depend on that input (`independent`): there None is right and means 0.

        Raises
        ------
        Refused, Crashed, Malformed
            See `Target.run`.
        ValueError
            When the call needs what the signature lacks, or its values are not representable in their dtypes.
        TargetError
            When an earlier call has ended the CUDA context.
        """
        torch = import_torch(self._name)
        self.check_context()
        if call.backward and call.problem.do is None and call.problem.dht is None:
            raise ValueError("a call with backward needs do or dht")
        device = self.device
        keywords = self.signature.keywords(call)
        blocks = place_call(call, sig.argument_arrays(call))
        buffers = {name: to_torch(block, device) for name, block in blocks.items()}
        views = {n: buffers[n].as_strided(b.shape, b.strides, b.offset).detach() for n, b in blocks.items()}
        for name in sig.DIFFERENTIABLE:
            if call.backward and name in views and name not in call.frozen:
                views[name].requires_grad_(True)
        keywords |= {self.signature.argument(n): t for n, t in views.items() if n not in ("do", "dht")}

        # Without a backward the call is one of inference, where dispatchers may choose other kernels.
        with torch.set_grad_enabled(call.backward), poisoned():
            answer = self.guarded(lambda: self.function(**keywords))
            o, ht = outputs(answer, call, self.signature.has("output_final_state") and call.final_state)
            found: dict[str, Any] = {"o": o} if ht is None else {"o": o, "ht": ht}
            if call.backward and (o.requires_grad or not has_tokens(call)):
                found |= gradients(call, o, ht, views, self.guarded)

        changed: list[str] = []
        for name, block in blocks.items():
            changed += block.changes(to_numpy(buffers[name], block))
        return Result(
            outputs={n: sig.normal_form(n, float64(t), call) for n, t in found.items()},
            dtypes={n: judged_as(dtype_name(t)) for n, t in found.items()},
            changed=tuple(changed),
            ran=f"{describe(self.function)}, torch {torch.__version__} on {device_name(device)}",
            layouts={n: b.layout for n, b in blocks.items()},
        )

    def synchronize(self) -> None:
        """See `FunctionTarget`."""
        if self.device.startswith("cuda"):
            import_torch(self._name).cuda.synchronize(self.device)


def outputs(answer: Any, call: Call, has_state: bool) -> tuple[Any, Any]:
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
    o, ht = parts[0], parts[1] if len(parts) > 1 and has_state else None
    if has_state and ht is None:
        raise Malformed("returned no final_state although output_final_state=True was given")
    check_tensor("o", o, call)
    if has_state:
        check_tensor("ht", ht, call)
    return o, ht


def check_tensor(name: str, value: Any, call: Call) -> None:
    """Check that `value` is a tensor with the promised shape and dtype."""
    if not isinstance(value, import_torch("").Tensor):
        raise Malformed(f"{name} is a {type(value).__name__}; expected a tensor")
    check_memory({"ht": "final_state"}.get(name, name), value)
    check_array(name, tuple(value.shape), dtype_name(value), call)


def check_memory(label: str, tensor: Any) -> None:
    """Check that a tensor has elements in memory that can be read one by one: it is not sparse, nor on "meta"."""
    if tensor.layout is not import_torch("").strided:
        raise Malformed(f"{label} has layout {tensor.layout}; expected torch.strided")
    if tensor.is_meta:
        raise Malformed(f"{label} is on device meta, which holds no values")


def gradients(
    call: Call, o: Any, ht: Any, views: Mapping[str, Any], guarded: Callable[[Callable[[], Any], str], Any]
) -> dict[str, Any]:
    """Gradients of <o, do> + <ht, dht> by name; those that autograd does not know are left out."""
    torch = import_torch("")
    roots = {"do": o, "dht": ht}
    if "dht" in views and has_tokens(call) and not (ht is not None and ht.requires_grad):
        raise Malformed("final_state carries no gradient, so the gradient that comes from it is lost")
    used = [n for n, root in roots.items() if n in views and root.requires_grad]
    leaves = {n: views[n] for n in sig.DIFFERENTIABLE if n in views and n not in call.frozen}
    grads: tuple[Any, ...] = (None,) * len(leaves)
    incoming = [views[n] for n in used]
    reverse = partial(torch.autograd.grad, [roots[n] for n in used], [*leaves.values()], incoming, allow_unused=True)
    for left in reversed(range(call.backwards if used else 0)):
        grads = guarded(partial(reverse, retain_graph=left > 0), "backward: ")
    found = {}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        if grad is not None:
            check_memory(f"d{name}", grad)
            found[f"d{name}"] = grad
        elif independent(name, call):
            found[f"d{name}"] = torch.zeros_like(leaf)
    return found


def has_tokens(call: Call) -> bool:
    """Whether any token belongs to a sequence."""
    return any(last > first for _, first, last in call.problem.spans)


def independent(name: str, call: Call) -> bool:
    """Whether the loss <o, do> + <ht, dht> cannot depend on an input, whatever the values."""
    p = call.problem
    if not has_tokens(call):
        return name != "h0" or p.dht is None
    return name == "q" and p.do is None


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
    return from_numpy(block.copy()).to(device)


def from_numpy(array: Any) -> Any:
    """A tensor on the same memory; of bfloat16 too, which torch does not know from NumPy."""
    torch = import_torch("")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


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


def _default_device(torch: Any) -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype_name(tensor: Any) -> str:
    """The dtype's name, as NumPy writes it."""
    return str(tensor.dtype).removeprefix("torch.")


def device_name(device: str) -> str:
    """The GPU's own name, or "cpu"."""
    return str(import_torch("").cuda.get_device_name(device)) if device.startswith("cuda") else device
