"""The operators: KDA and the delta rule on torch tensors, NumPy arrays and CuPy arrays."""

from verikda.ops.delta import chunk_delta_rule, chunk_delta_rule_bwd, chunk_delta_rule_fwd
from verikda.ops.kda import chunk_kda, chunk_kda_bwd, chunk_kda_fwd, recurrent_kda

__all__ = [
    "chunk_delta_rule",
    "chunk_delta_rule_bwd",
    "chunk_delta_rule_fwd",
    "chunk_kda",
    "chunk_kda_bwd",
    "chunk_kda_fwd",
    "recurrent_kda",
]
