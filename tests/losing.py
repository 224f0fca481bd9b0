"""A target that loses its CUDA context in one call, or its process: for tests of what is then told and kept."""

from __future__ import annotations

from collections.abc import Callable

from verikda.call import Call, ContextLost, Result
from verikda.targets import Target, TargetError
from verikda.zoo.target import ZooTarget

LOST = "AcceleratorError: CUDA error: an illegal memory access was encountered"


class Losing:
    """Another target until the first call that `ends`; after that one no call can be made.

    Parameters
    ----------
    ends : of a call, and how many there have been with it; it may end the process, too.
    inner : the healthy zoo if None.
    """

    def __init__(self, ends: Callable[[Call, int], bool | None], inner: Target | None = None) -> None:
        self.inner = inner or ZooTarget()
        self.name, self.capabilities, self.contract = self.inner.name, self.inner.capabilities, self.inner.contract
        self.ends, self.calls, self.lost = ends, 0, False

    def run(self, call: Call) -> Result:
        if self.lost:
            raise TargetError("an earlier call has ended the CUDA context")
        self.calls += 1
        if self.ends(call, self.calls):
            self.lost = True
            raise ContextLost(LOST)
        return self.inner.run(call)
