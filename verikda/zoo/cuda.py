"""The CUDA kernels with one planted fault, as a target: on a GPU if there is one, else the same sources on the CPU."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kernels_cuda import sources
from kernels_cuda.modules import Backend, Dims, load
from oracles.contract import Contract
from verikda.call import Call, Capabilities, Result
from verikda.targets import own
from verikda.zoo.mutations import MUTATIONS, Edit, Mutation

Where = Literal["cuda", "host"]


class Changed:
    """Kernels of changed sources; those of files that no edit reaches are the shipped ones.

    Parameters
    ----------
    edits : what is changed.
    where : "cuda" or "host".
    options : of the backend.

    Raises
    ------
    ValueError
        When a file no longer has the text that an edit replaces.
    """

    def __init__(self, edits: Sequence[Edit], where: Where = "host", **options: Any) -> None:
        self.name: Where = where
        self._folder = tempfile.TemporaryDirectory(prefix="verikda-zoo-")
        self.root = Path(self._folder.name)
        for path in (*sources.ROOT.glob("*.cuh"), *sources.kernel_files()):
            shutil.copy(path, self.root)
        for file, right, wrong in edits:
            text = (self.root / file).read_text(encoding="utf-8")
            if right not in text:
                raise ValueError(f"{file} no longer has {right!r}; write the edit anew for the source as it is")
            (self.root / file).write_text(text.replace(right, wrong), encoding="utf-8")
        self._options = options
        self._files: dict[str, Backend] = {}

    def launch(self, kernel: str, grid: Dims, block: int, shared: int, args: Sequence[Any], stream: int = 0) -> None:
        """See `kernels_cuda.modules.Backend.launch`."""
        file = sources.source_of(kernel).name
        if file not in self._files:
            self._files[file] = load(self.name, source=self.root / file, **self._options)
        self._files[file].launch(kernel, grid, block, shared, args, stream)

    @property
    def ready(self) -> frozenset[str]:
        """See `kernels_cuda.modules.Backend.ready`."""
        return frozenset().union(*(backend.ready for backend in self._files.values()))


class MutationTarget:
    """The kernels with one mutation.

    Parameters
    ----------
    name : of the mutation.
    where : "cuda" or "host"; None takes the GPU where there is one.
    """

    def __init__(self, name: str, where: Where | None = None) -> None:
        self.name = f"zoo:{name}"
        self.mutation: Mutation = MUTATIONS[name]
        self._where: Where = where or ("host" if own.gpu_missing() else "cuda")
        self._calls = 0

    @property
    def capabilities(self) -> Capabilities:
        """Few dtypes, chunks and channels, so that few kernels are compiled: those of the case that shows the fault."""
        case = self.mutation.shown_by
        return replace(
            own.EVERYTHING, dtypes=(case.dtype,), chunk_sizes=(case.chunk_size,), rules=(case.rule,),
            max_k=64, max_v=64,
            gates=(case.gate,) if case.rule == "kda" else (), layouts=("contiguous",),
            notes={"dtypes": "a mutation is compiled for the calls that can show it"},
        )  # fmt: skip

    @cached_property
    def _orders(self) -> tuple[own.Own, ...]:
        options: tuple[dict[str, Any], ...] = ({},)
        if self._where == "host" and self.mutation.races:
            options = ({"order": "forward"}, {"order": "reverse"})
        return tuple(
            own.on(Changed(self.mutation.edits, self._where, **o), self.name, self.capabilities) for o in options
        )

    def contract(self, call: Call) -> Contract:
        """That of the kernels."""
        return self._orders[0].contract(call)

    def run(self, call: Call) -> Result:
        """Make the call. See `verikda.targets.base.Target.run`."""
        self._calls += 1
        return self._orders[self._calls % len(self._orders)].run(call)
