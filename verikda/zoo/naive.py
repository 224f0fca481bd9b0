"""The token recurrence as a test would write it: torch, one dtype throughout, gradients by autograd."""

from __future__ import annotations

from typing import Any

import numpy as np

from oracles.problem import Array, Problem


def naive(p: Problem, dtype: str) -> dict[str, Array]:
    """Outputs and gradients of a problem, every number in `dtype`.

    Parameters
    ----------
    p : the problem; `do` and `dht` are both given.
    dtype : "float64", "float32", "float16" or "bfloat16".

    Returns
    -------
    dict
        o, ht and the gradients of what is given, as float64 arrays.

    Raises
    ------
    ValueError
        When torch is missing.
    """
    try:
        import torch
    except ImportError:
        raise ValueError("the comparison needs torch, which is not installed: pip install 'verikda[torch]'") from None
    kind = getattr(torch, dtype)
    names = [n for n in ("q", "k", "v", "g", "beta", "h0", "A_log", "dt_bias") if getattr(p, n) is not None]
    x = {n: torch.tensor(getattr(p, n)).to(kind).requires_grad_() for n in names}
    q, k, beta = x["q"], x["k"], x["beta"]
    if p.qk_l2norm:
        q, k = (a / torch.sqrt((a * a).sum(-1, keepdim=True) + 1e-6) for a in (q, k))
    if p.beta_sigmoid:
        beta = torch.sigmoid(beta) * (2 if p.allow_neg_eigval else 1)
    groups = p.v.shape[2] // p.q.shape[2]
    q, k = (a.repeat_interleave(groups, dim=2) for a in (q, k))
    q = q * p.scale
    decay = _decay(p, x, torch)
    outputs, states = [], []
    for n, (b, start, stop) in enumerate(p.spans):
        S = x["h0"][n] if "h0" in x else torch.zeros(p.v.shape[2], q.shape[3], p.v.shape[3], dtype=kind)
        for t in range(start, stop):
            if decay is not None:
                S = S * decay[b, t, :, :, None]
            residual = x["v"][b, t] - (k[b, t, :, :, None] * S).sum(-2)
            S = S + k[b, t, :, :, None] * (beta[b, t, :, None] * residual)[:, None]
            # the reverse of all tokens is one call into torch: Python, and so Ctrl-C, gets its turn at each of them
            S.register_hook(lambda gradient: None)
            outputs.append((q[b, t, :, :, None] * S).sum(-2))
        states.append(S)
    o, ht = torch.stack(outputs).reshape(p.v.shape), torch.stack(states)
    cotangents = [torch.tensor(a).to(kind) for a in (p.do, p.dht)]
    gradients = torch.autograd.grad([o, ht], [x[n] for n in names], cotangents)
    results: dict[str, Any] = {"o": o, "ht": ht} | {f"d{n}": d for n, d in zip(names, gradients, strict=True)}
    return {n: np.asarray(a.detach().double().numpy()) for n, a in results.items()}


def _decay(p: Problem, x: dict[str, Any], torch: Any) -> Any:
    """Exp of the log decay [B,T,HV,K], None for the delta rule."""
    if p.gate == "none":
        return None
    if p.gate == "log":
        return x["g"].exp()
    z = x["g"] + x["dt_bias"]
    rate = x["A_log"].exp()[:, None]
    if p.gate == "softplus":
        return (-rate * torch.nn.functional.softplus(z)).exp()
    return (p.lower_bound * torch.sigmoid(rate * z)).exp()
