"""Probes: questions that no single case answers.

Where does overflow start, does the error grow along a long sequence, and does a pool of carried states stay right?
Each module asks one of them of any target; `verikda.probes.command` is what `verikda probe` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from verikda.call import Capabilities
from verikda.case import Case
from verikda.permits import permits
from verikda.starts import wished_case

_PLAIN = {f.name: f.default for f in fields(Case)}
_SMALL: dict[str, Any] = {"rule": "kda", "K": 4, "V": 4, "h0": "random", "dht": True}


def plain_case(capabilities: Capabilities, fixed: Mapping[str, Any], wishes: Mapping[str, Any]) -> Case:
    """The plainest small case with states on both sides that has the fixed knobs, and the wishes that it may have.

    Raises
    ------
    ValueError
        If the capabilities allow no case with the fixed knobs.
    """
    special = {**_SMALL, **wishes}
    case = Case(**{**special, **fixed})
    if permits(capabilities, case) is None:
        return case
    return wished_case(capabilities, fixed, special | {n: v for n, v in _PLAIN.items() if n not in special})
