"""Who is timed, and how each is called: the same operators as the targets of the same names, without their copies.

A `Peer` says which workloads it takes; its `Runner` turns the torch tensors of a workload into what it works on, once,
and then answers forward, backward, or both. Functions on torch tensors are timed by events and in a CUDA graph. JAX has
streams of its own, which neither reaches: its calls are queued and their time is taken from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from verikda.bench import workloads as shapes
from verikda.bench.workloads import MODES, Gates, Mode, Workload
from verikda.choose import choose


class Runner(Protocol):
    """One peer on one workload."""

    queued: bool
    """Whether calls are queued on streams that torch does not know."""

    def take(self, given: Mapping[str, Any]) -> Any:
        """The inputs as the peer works on them."""
        ...

    def forward(self, x: Any) -> dict[str, Any]:
        """{"o"}, without keeping anything for a backward."""
        ...

    def both(self, x: Any) -> dict[str, Any]:
        """O and the gradients of <o, do>, by name."""
        ...

    def backward(self, x: Any) -> Callable[[], Any]:
        """A forward now, and the backward alone as often as it is called."""
        ...

    def wait(self) -> None:
        """Until all that was asked for is done."""
        ...


class TorchRunner:
    """A function with the public signature.

    Parameters
    ----------
    function : on torch tensors.
    more : further keywords, such as offsets of a pack.
    """

    queued = False

    def __init__(self, torch: Any, function: Callable[..., Any], more: Mapping[str, Any]) -> None:
        self._torch, self._function, self._more = torch, function, more

    def take(self, given: Mapping[str, Any]) -> Any:
        return given

    def forward(self, x: Any) -> dict[str, Any]:
        return shapes.forward_only(self._torch, self._function, x, **self._more)

    def both(self, x: Any) -> dict[str, Any]:
        return shapes.both_ways(self._torch, self._function, x, **self._more)

    def backward(self, x: Any) -> Callable[[], Any]:
        o = self._function(**shapes.keywords(x), **self._more)[0]
        inputs = list(shapes.leaves(x).values())
        return lambda: self._torch.autograd.grad([o], inputs, [x["do"]], retain_graph=True)

    def wait(self) -> None:
        self._torch.cuda.synchronize()


class JaxRunner:
    """jax-linear-attention's operator, compiled as a whole for forward, backward and both."""

    queued = True

    def __init__(self, operator: Callable[..., Any], kernels: str, kind: str) -> None:
        import jax

        def forward(x: Mapping[str, Any]) -> Any:
            rest = {n: x[n] for n in ("g", "beta") if n in x}
            return operator(kind, x["q"], x["k"], x["v"], impl=kernels, **rest)[0]

        def both(x: Mapping[str, Any], do: Any) -> Any:
            o, pull = jax.vjp(forward, x)
            return o, pull(do)[0]

        self._jax = jax
        self._forward, self._both = jax.jit(forward), jax.jit(both)
        self._keep, self._pull = jax.jit(lambda x: jax.vjp(forward, x)), jax.jit(lambda pull, do: pull(do)[0])
        self._last: Any = None

    def take(self, given: Mapping[str, Any]) -> Any:
        made = {n: self._jax.dlpack.from_dlpack(x.detach()) for n, x in given.items()}
        return {n: x for n, x in made.items() if n != "do"}, made["do"]

    def forward(self, x: Any) -> dict[str, Any]:
        self._last = self._forward(x[0])
        return {"o": self._last}

    def both(self, x: Any) -> dict[str, Any]:
        self._last = o, gradients = self._both(*x)
        return {"o": o, **{f"d{n}": g for n, g in gradients.items()}}

    def backward(self, x: Any) -> Callable[[], Any]:
        _, pull = self._keep(x[0])

        def run() -> None:
            self._last = self._pull(pull, x[1])

        return run

    def wait(self) -> None:
        self._jax.block_until_ready(self._last)


@dataclass(frozen=True)
class Peer:
    """One implementation.

    Attributes
    ----------
    judged : target by kind of gates, whose contract and verdict on a small call stand for this peer; kinds that are not
        named are not supported.
    make : the runner for a workload.
    safe_gate : flag given where the function has it, None where it has not.
    packs : whether packed sequences are taken.
    forward_only : kinds without a backward.
    """

    name: str
    judged: Mapping[Gates, str]
    make: Callable[[Any, Workload], Runner]
    safe_gate: bool | None = None
    packs: bool = True
    forward_only: tuple[Gates, ...] = ()

    def refuses(self, w: Workload) -> str:
        """Why this workload is not supported; empty where it is."""
        if w.gates not in self.judged:
            return f"not supported: {w.title}"
        return "not supported: packed sequences" if w.lengths and not self.packs else ""

    def modes(self, w: Workload) -> tuple[Mode, ...]:
        """What it can do on a workload."""
        return MODES[:1] if w.gates in self.forward_only else MODES


def offsets(torch: Any, w: Workload, host_too: bool) -> dict[str, Any]:
    """`cu_seqlens` of a pack, the same tensor for every call, so that nobody has to look at its values again."""
    if not w.lengths:
        return {}
    host = torch.tensor([0, *w.lengths]).cumsum(0)
    on_gpu = {"cu_seqlens": host.to(shapes.DEVICE)}
    return on_gpu | ({"cu_seqlens_cpu": host} if host_too else {})


def _own(torch: Any, w: Workload) -> Runner:
    import verikda

    function = verikda.chunk_delta_rule if w.rule == "delta" else verikda.chunk_kda
    return TorchRunner(torch, function, offsets(torch, w, host_too=True))


def _fla(safe: bool) -> Callable[[Any, Workload], Runner]:
    def make(torch: Any, w: Workload) -> Runner:
        from verikda.targets.fla import library_function

        if w.rule == "delta":
            function, more = library_function("delta_rule", "chunk_delta_rule", "fla:delta"), {}
        else:
            function, more = library_function("kda", "chunk_kda", "fla"), {"safe_gate": safe}
        return TorchRunner(torch, function, offsets(torch, w, host_too=True) | more)

    return make


def _cudnn(torch: Any, w: Workload) -> Runner:
    from verikda.targets import cudnn

    operator, _, no_engine = cudnn.operator("cudnn")
    more = {n: x.int() for n, x in offsets(torch, w, host_too=False).items()}  # others it would convert in every call
    return TorchRunner(torch, cudnn.fused(operator, no_engine), more)


def _jla(torch: Any, w: Workload) -> Runner:
    from verikda.targets import jla

    operator, _ = jla.library("jla")
    return JaxRunner(operator, jla.KERNELS, "deltanet" if w.rule == "delta" else "kda")


def _flashkda(torch: Any, w: Workload) -> Runner:
    from flash_kda import fwd

    from verikda.targets.flashkda import public

    return TorchRunner(torch, public(fwd), offsets(torch, w, host_too=False))


def _judged(kda: str, delta: str = "") -> dict[Gates, str]:
    found: dict[Gates, str] = {"fast": kda, "slow": kda, "fused": kda}
    return found | ({"none": delta} if delta else {})


PEERS: Mapping[str, Peer] = {
    p.name: p
    for p in (
        Peer("verikda", _judged("verikda:cuda", "verikda:cuda"), _own),
        Peer("fla", _judged("fla", "fla:delta"), _fla(safe=False), safe_gate=False),
        Peer("fla:safe", _judged("fla"), _fla(safe=True), safe_gate=True),
        Peer("cudnn", {**_judged("cudnn"), "fused": "cudnn:forward"}, _cudnn, forward_only=("fused",)),
        Peer("jla", {"fast": "jla", "slow": "jla", "none": "jla:delta"}, _jla, packs=False),
        Peer("flashkda", {"fused": "flashkda"}, _flashkda, forward_only=("fused",)),
    )
}


def chosen(names: tuple[str, ...]) -> tuple[Peer, ...]:
    """The peers of these names; all of them for none.

    Raises
    ------
    ValueError
        For a name that is not one of `PEERS`.
    """
    choose("bench target", PEERS, names)
    return tuple(PEERS[name] for name in names or PEERS)
