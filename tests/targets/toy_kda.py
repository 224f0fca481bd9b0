"""The token recurrence in torch with the whole public signature: what the adapter's tests call and break."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional


def chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    state_v_first=False,
    cu_seqlens=None,
    A_log=None,
    dt_bias=None,
    chunk_size=64,
):
    dtype = q.dtype
    T, H, K = q.shape[1:]
    HV, V = v.shape[2:]
    q, k, v, beta = (x.double() for x in (q, k, v, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    if g is not None:
        g = g.double()
    if use_gate_in_kernel:
        x = g if dt_bias is None else g + dt_bias.double().view(HV, K)
        rate = 1.0 if A_log is None else A_log.double().exp()[:, None]
        g = -rate * functional.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    q = q * (K**-0.5 if scale is None else scale)
    spans = [(b, 0, T) for b in range(q.shape[0])]
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        spans = [(0, a, b) for a, b in pairwise(ends)]
    o = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    states = []
    for n, (b, first, last) in enumerate(spans):
        S = torch.zeros(HV, K, V, dtype=torch.float64, device=v.device)
        if initial_state is not None:
            S = initial_state[n].double()
            S = S.mT if state_v_first else S
        for t in range(first, last):
            if g is not None:
                S = S * g[b, t].exp()[..., None]
            r = v[b, t] - torch.einsum("hkv,hk->hv", S, k[b, t])
            S = S + torch.einsum("hk,hv->hkv", k[b, t], beta[b, t][:, None] * r)
            o[b, t] = torch.einsum("hkv,hk->hv", S, q[b, t])
        states.append(S.mT if state_v_first else S)
    ht = torch.stack(states).float() if output_final_state else None
    return o.to(dtype), ht


def chunk_delta_rule(q, k, v, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    return chunk_kda(q, k, v, None, beta, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def long_names(query, key, value, g, beta, initial_state, output_final_state, **kwargs):
    return chunk_kda(query, key, value, g, beta, None, initial_state, output_final_state)


def forward_only(q, k, v, g, beta, initial_state=None, output_final_state=False):
    with torch.no_grad():
        return chunk_kda(q, k, v, g, beta, None, initial_state, output_final_state)
