"""transformers' chunked function with the diagonal taken out of the exponent: same values, no rounding in dg.

Made from the installed source at run time, as evidence for transformers.md; nothing of it is stored here.
"""

import inspect

import torch
from transformers.models.kimi_linear import modeling_kimi_linear

from verikda.targets.transformers import torch_path

_EXPONENT = "(g.unsqueeze(-2) - g.unsqueeze(-3))"
_NAME = "chunk_kimi_delta_attention"

source = inspect.getsource(torch_path(_NAME))
source = source[source.index("def ") :]
if source.count(_EXPONENT) != 1:
    raise ImportError(f"{_NAME} of this transformers release no longer holds {_EXPONENT} once; written for 5.24")
diagonal = "torch.eye(chunk_size, dtype=torch.bool)[..., None]"
scope = {**vars(modeling_kimi_linear), "torch": torch}
exec(source.replace(_EXPONENT, f"{_EXPONENT}.masked_fill({diagonal}, 0.0)"), scope)

chunk = scope[_NAME]
chunk.verikda_contract = "float32"
chunk.verikda_capabilities = {"hard_reset": False, "grouped": False}
