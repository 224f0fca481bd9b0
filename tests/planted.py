"""A target with a change in what it answers or promises: for tests that plant one fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from verikda.call import Call, Result
from verikda.targets import Target


class Planted:
    """Another target, with each result changed.

    Parameters
    ----------
    inner : the target behind it.
    change : of a call and the result of `inner`; it may raise.
    capabilities : fields in which its capabilities differ from those of `inner`.
    """

    def __init__(self, inner: Target, change: Callable[[Call, Result], Result], **capabilities: Any) -> None:
        self.inner, self.name, self.contract, self.change = inner, inner.name, inner.contract, change
        self.capabilities = replace(inner.capabilities, **capabilities)

    def run(self, call: Call) -> Result:
        return self.change(call, self.inner.run(call))
