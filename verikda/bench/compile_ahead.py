"""Compile what Triton's tuners will try, in several processes.

A tuner compiles and times one config after another, in the process that makes the call: for flash-linear-attention's
operators that is minutes on one core before anything is timed. Compiled code stays in Triton's cache folder. So each of
N processes makes the calls of the bench with its share of the configs, once, and the bench then finds all of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from typing import Any

from verikda.bench import workloads as shapes
from verikda.bench.check import small_call
from verikda.bench.gpu import cuda_torch
from verikda.bench.peers import PEERS
from verikda.bench.run import failure
from verikda.bench.workloads import Workload
from verikda.interrupts import ALONE, processes
from verikda.targets import resolve
from verikda.targets.base import told

TUNED = ("fla", "fla:safe")
"""Targets whose kernels Triton tunes."""


def compile_ahead(names: Sequence[str], todo: Sequence[Workload], jobs: int, say: Callable[[str], None]) -> None:
    """Compile for every workload of the targets among `TUNED`.

    What fails is told and left to the bench, whose rows say how.

    Parameters
    ----------
    names : of targets; others than `TUNED` are left out.
    jobs : processes, each with a CUDA context of its own.
    """
    tuned = [name for name in names if name in TUNED]
    if not tuned:
        return
    say(f"compiling what the tuners of {', '.join(tuned)} try, in {jobs} processes")
    found: set[str] = set()
    try:
        with processes(jobs) as pool:
            for done in as_completed([pool.submit(_compile_share, tuned, todo, i, jobs) for i in range(jobs)]):
                found.update(done.result())
    except ChildProcessError as error:
        found.add(str(error).removesuffix(f"; {ALONE}"))
    except Exception as error:  # no Triton, or one that tunes in another way
        found.add(told(error).splitlines()[0])
    for text in sorted(found):
        say(f"not compiled ahead: {text}")


def _compile_share(names: Sequence[str], todo: Sequence[Workload], part: int, parts: int) -> list[str]:
    """Make every call with one share of the configs; what failed, a line for each."""
    # The choice of a config would be kept on disk for later processes, and here it means nothing.
    os.environ |= {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0"}
    torch = cuda_torch()
    from triton.runtime import autotuner

    autotuner.Autotuner._bench = only_share(autotuner.Autotuner._bench, part, parts)
    found = []
    for w in todo:
        for peer in (PEERS[name] for name in names):
            if peer.refuses(w):
                continue
            try:
                torch.cuda.empty_cache()  # fails for good once a call has ended the context
                target = resolve(peer.judged[w.gates])
                target.run(small_call(w.gates, bool(peer.safe_gate), w.H, target.capabilities.backward))
                runner = peer.make(torch, w)
                x = runner.take(shapes.draw(torch, w, 0))
                runner.forward(x)
                if "backward" in peer.modes(w):
                    runner.both(x)
                runner.wait()
            except Exception as error:  # a library may fail in any way
                found.append(failure(f"{peer.name}, {w.title} {w.shape}", error))
    return found


def only_share(timed: Callable[..., Any], part: int, parts: int) -> Callable[..., Any]:
    """A method in place of `Autotuner._bench`, which is `timed`, that runs only every `parts`-th config, once.

    The others count as infinitely slow. A tuner with fewer configs than there are processes has one for each process
    still, so that every process has something to go on with.
    """

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        if self.configs.index(config) % parts != part % min(parts, len(self.configs)):
            return [math.inf] * 3
        self._do_bench = _once
        self.__dict__.pop("do_bench", None)  # which `_do_bench` is behind, once asked
        return timed(self, *args, config=config, **meta)

    return bench


def _once(call: Callable[[], Any], quantiles: Sequence[float] = ()) -> list[float]:
    """Triton's timing of a call, which makes it for 100 ms: here one call is enough."""
    call()
    return [0.0] * 3
