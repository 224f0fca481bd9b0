"""Numerical verification of Kimi Delta Attention and DeltaNet kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verikda.capture_calls import capture as capture
    from verikda.case import Case as Case
    from verikda.ops import chunk_delta_rule as chunk_delta_rule
    from verikda.ops import chunk_delta_rule_bwd as chunk_delta_rule_bwd
    from verikda.ops import chunk_delta_rule_fwd as chunk_delta_rule_fwd
    from verikda.ops import chunk_kda as chunk_kda
    from verikda.ops import chunk_kda_bwd as chunk_kda_bwd
    from verikda.ops import chunk_kda_fwd as chunk_kda_fwd
    from verikda.ops import recurrent_kda as recurrent_kda

__version__ = "0.1.0"

_OPS = (
    "chunk_delta_rule",
    "chunk_delta_rule_bwd",
    "chunk_delta_rule_fwd",
    "chunk_kda",
    "chunk_kda_bwd",
    "chunk_kda_fwd",
    "recurrent_kda",
)
_LAZY = {"Case": "verikda.case", "capture": "verikda.capture_calls"} | dict.fromkeys(_OPS, "verikda.ops")
__all__ = ["Case", "__version__", "capture", *_OPS]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import verikda` needs none of the packages behind them."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'verikda' has no attribute {name!r}; it has {', '.join(__all__)}")
