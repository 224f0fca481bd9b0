"""What the zoo holds: every planted fault by name, wherever it is planted, as a target that can be searched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from verikda.targets.base import Target
from verikda.zoo.cuda import MutationTarget
from verikda.zoo.faults import Fault, forget
from verikda.zoo.mutations import MUTATIONS
from verikda.zoo.target import ZooTarget

Where = Literal["python", "boundary", "cuda"]

BOUNDARY = ("flag", "memory", "determinism")
"""Places in `FaultInfo.place` that lie between caller and algorithm: arguments, memory, what is kept between calls."""


@dataclass(frozen=True)
class Specimen:
    """One planted fault.

    Attributes
    ----------
    name : as given to `verikda zoo --fault`, and after "zoo:" as a target.
    where : "python", the algorithm of the chunked NumPy implementation; "boundary", its arguments, its memory or
        what it keeps between calls; "cuda", the CUDA sources.
    place : part of the algorithm.
    what : what is wrong.
    reports : public reports of the kind.
    regime : calls that show it.
    kills : checks that are expected to see it.
    make : the target, as a fresh process would have it.
    """

    name: str
    where: Where
    place: str
    what: str
    reports: tuple[str, ...]
    regime: str
    kills: tuple[str, ...]
    make: Callable[[], Target]


def fresh(fault: Fault) -> Target:
    """The NumPy implementation with one fault, nothing remembered from earlier calls."""
    forget()
    return ZooTarget(fault)


def _specimen(fault: Fault) -> Specimen:
    i = fault.info
    where: Where = "boundary" if i.place in BOUNDARY else "python"
    return Specimen(fault.name, where, i.place, i.what, i.modelled_on, i.regime, i.kills, partial(fresh, fault))


def _mutation(name: str) -> Specimen:
    m = MUTATIONS[name]
    return Specimen(name, "cuda", m.place, m.what, m.modelled_on, m.regime, m.kills, partial(MutationTarget, name))


HEALTHY = _specimen(Fault.NONE)
SPECIMENS = {fault.name: _specimen(fault) for fault in Fault if fault is not Fault.NONE} | {
    name: _mutation(name) for name in MUTATIONS
}
"""Every planted fault by name."""


def specimen(name: str) -> Specimen:
    """The specimen of this name, in any case of letters.

    Raises
    ------
    ValueError
        When the zoo has none.
    """
    from difflib import get_close_matches

    found = SPECIMENS.get(name.upper())
    if found is None:
        near = get_close_matches(name.upper(), SPECIMENS, 3)
        hint = f"did you mean {', '.join(near)}?" if near else "`verikda zoo --list` lists all"
        raise ValueError(f"the zoo has no fault {name!r}; {hint}")
    return found
