"""Faults that can be switched on in the zoo's chunked implementation."""

from __future__ import annotations

from enum import Enum


class Fault(Enum):
    """One planted fault."""

    NONE = ""
