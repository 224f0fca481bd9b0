"""`verikda bench`: is each target right on this build, and how long does it take, beside the least it could take?"""

from __future__ import annotations

from verikda.bench.gpu import NoGpuError, cuda_torch
from verikda.bench.rows import REL_LIMIT

__all__ = ["REL_LIMIT", "NoGpuError", "cuda_torch"]
