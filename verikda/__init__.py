"""Numerical verification of Kimi Delta Attention and DeltaNet kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verikda.case import Case as Case

__version__ = "0.1.0"

_LAZY = {"Case": "verikda.case"}
__all__ = ["Case", "__version__"]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import verikda` needs none of the packages behind them."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'verikda' has no attribute {name!r}; it has {', '.join(__all__)}")
