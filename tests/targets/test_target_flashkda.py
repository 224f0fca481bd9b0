"""The flashkda target, on a stand-in that writes into given tensors as the library does."""

from __future__ import annotations

import sys
import types

import calls
import pytest
from judged import floor

pytest.importorskip("torch", reason="needs PyTorch: pip install 'verikda[torch]'")

import torch
import toy_kda

from verikda.call import Refused
from verikda.targets import TargetError, resolve
from verikda.targets import flashkda as module

ALL = {"qk_l2norm": True, "beta_sigmoid": True}


def fwd(q, k, v, g, beta, scale, out, A_log=None, dt_bias=None, lower_bound=None, initial_state=None,
        final_state=None, cu_seqlens=None):  # fmt: skip
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, A_log, dt_bias))
    assert g.dtype == torch.bfloat16
    assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
    o, state = toy_kda.chunk_kda(
        q, k, v, g, beta, scale, initial_state, True, True, True, True, lower_bound=lower_bound, state_v_first=True,
        A_log=A_log, dt_bias=dt_bias.reshape(-1), cu_seqlens=cu_seqlens,
    )  # fmt: skip
    out.copy_(o)
    if final_state is not None:
        final_state.copy_(state)


@pytest.fixture
def library(monkeypatch):
    made = types.ModuleType("flash_kda")
    made.fwd = fwd
    monkeypatch.setitem(sys.modules, "flash_kda", made)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    return made


def call(**more):
    given = {"gate": "bounded", "params": True, "do": False, "dht": False, "backward": False, "problem": ALL}
    return calls.make("bfloat16", "bfloat16", "bfloat16", **(given | more))


@pytest.mark.parametrize(
    "more",
    [
        {"shape": (2, 21, 2, 2, 5, 4)},
        {"shape": (1, 21, 2, 2, 5, 4), "cu_seqlens": [0, 4, 21], "offsets": "int32"},
        {"shape": (2, 9, 1, 1, 5, 4), "state_v_first": True, "params": False},
    ],
)
def test_right(library, more):
    assert floor(resolve("flashkda"), call(**more)) == "pass"


def test_a_state_the_other_way_round_fails_the_floor(library, monkeypatch):
    def turned(*inputs, final_state, **more):
        fwd(*inputs, final_state=final_state, **more)
        final_state.copy_(final_state.mT.reshape(final_state.shape).clone())

    monkeypatch.setattr(library, "fwd", turned)
    assert floor(resolve("flashkda"), call(shape=(2, 21, 2, 2, 5, 4))) == "ht"


def test_what_it_always_does_is_required(library):
    c = resolve("flashkda").capabilities
    assert c.required == ("qk_l2norm", "beta_sigmoid")
    assert (c.gates, c.dtypes, c.g_dtypes, c.k_sizes) == (("bounded",), ("bfloat16",), ("same",), (128,))
    assert (c.backward, c.grouped, c.allow_neg_eigval) == (False,) * 3
    with pytest.raises(Refused, match="always in the kernel"):
        resolve("flashkda").run(call(shape=(2, 9, 1, 1, 5, 4), problem={}))


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_kda", None)
    with pytest.raises(TargetError, match=r"target flashkda needs FlashKDA, .*: build it from github"):
        resolve("flashkda")
