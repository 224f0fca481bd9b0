"""What a target does not support is named, with the reason that it gives."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import verikda
from verikda.call import Capabilities
from verikda.case import Case
from verikda.permits import permits


@pytest.mark.parametrize(
    ("capabilities", "case", "text"),
    [
        (Capabilities(), Case(dtype="bfloat16"), None),
        (Capabilities(dtypes=("float16",)), Case(), "dtype float32"),
        (Capabilities(dtypes=("float16",), notes={"dtypes": "no room"}), Case(), "dtype float32: no room"),
        (Capabilities(dtypes=("float16",), notes={"k_sizes": "tiles"}), Case(), "dtype float32"),
        (Capabilities(k_sizes=(128,), notes={"k_sizes": "tiles"}), Case(), "K = 1: tiles"),
        (Capabilities(required=("qk_l2norm",), notes={"qk_l2norm": "built in"}), Case(), "qk_l2norm = False: built in"),
    ],
)
def test_the_first_limit_and_its_note(capabilities: Capabilities, case: Case, text: str | None) -> None:
    assert permits(capabilities, case) == text


def test_every_note_is_about_a_limit() -> None:
    """One under another name would never be read."""
    names = {f.name for f in fields(Capabilities)}
    told = set()
    for path in (Path(verikda.__file__).parent / "targets").glob("*.py"):
        for table in re.findall(r"(?:notes=|LIMITS = |ALWAYS = |notes = )\{(.*?)\}", path.read_text(), re.DOTALL):
            told |= set(re.findall(r'"(\w+)": ', table))
    assert len(told) >= 10
    assert told <= names
