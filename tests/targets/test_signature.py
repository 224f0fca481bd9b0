"""Only what a signature names is asked for."""

from __future__ import annotations

import functools
import re

import calls
import numpy as np
import pytest

from verikda.targets.base import TargetError
from verikda.targets.numpy_function import NumpyFunction
from verikda.targets.signature import attribute, declared_capabilities, normal_form, read

FLAGS = ("qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "safe_gate", "state_v_first", "recompute")


def public(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=64):
    pass


def swallows(q, k, v, g, beta, **kwargs):
    pass


def gated(q, k, v, g, beta, use_gate_in_kernel=False, A_log=None, dt_bias=None, lower_bound=None):
    pass


def delta(q, k, v, beta, scale=None, state_v_first=False, transpose_state_layout=None):
    pass


def transformers_names(query, key, value, g, beta, initial_state, output_final_state, **kwargs):
    pass


def test_capabilities_are_the_named_parameters():
    c = read(public, "f").capabilities()
    for field in ("packed", "empty", "tail_padding", "initial_state", "dht", "scale"):
        assert getattr(c, field), field
    assert c.chunk_sizes == (16, 32, 64)
    assert c.gates == ("log",)
    for field in FLAGS:
        assert not getattr(c, field), field


def test_keywords_swallowed_by_kwargs_do_not_count():
    c = read(swallows, "f").capabilities()
    for field in ("packed", "initial_state", "dht", "scale", *FLAGS):
        assert not getattr(c, field), field
    assert c.chunk_sizes == (64,)


def test_kwargs_count_where_the_function_says_so():
    def f(q, k, v, g, beta, **kwargs):
        pass

    f.verikda_parameters = ("cu_seqlens",)
    assert read(f, "f").capabilities().packed
    assert read(f, "f", swallowed=("scale",)).capabilities().scale


def test_gates():
    assert read(gated, "f").capabilities().gates == ("log", "softplus", "bounded")


def test_delta_rule_has_no_gate():
    s = read(delta, "f")
    assert s.capabilities().rules == ("delta",)
    assert not s.capabilities().grouped
    assert s.names["state_v_first"] == "state_v_first"


def test_old_name_of_the_transposed_state():
    def old(q, k, v, g, beta, transpose_state_layout=False):
        pass

    s = read(old, "f")
    assert s.capabilities().state_v_first
    call = calls.make(h0=False, dht=False, state_v_first=True)
    assert s.keywords(call) == {"transpose_state_layout": True}


def test_other_convention():
    s = read(transformers_names, "f")
    assert s.argument("q") == "query"
    assert s.argument("h0") == "initial_state"
    assert s.keywords(calls.make(h0=False)) == {"output_final_state": True, "initial_state": None}


def test_default_scale_is_left_to_the_function():
    s = read(public, "f")
    for scale in (5**-0.5, 1 / 5**0.5, np.nextafter(5**-0.5, 1)):
        call = calls.make(shape=(1, 2, 1, 1, 5, 4))
        object.__setattr__(call.problem, "scale", scale)
        assert s.keywords(call)["scale"] is None
    other = calls.make()
    object.__setattr__(other.problem, "scale", 0.25)
    assert s.keywords(other)["scale"] == 0.25


def test_a_call_beyond_the_signature_is_an_error():
    s = read(swallows, "thing")
    with pytest.raises(ValueError, match="thing has no parameter output_final_state, initial_state, which"):
        s.keywords(calls.make())
    with pytest.raises(ValueError, match="no parameter safe_gate"):
        s.keywords(calls.make(h0=False, dht=False, safe_gate=True))
    call = calls.make(h0=False, dht=False)
    object.__setattr__(call.problem, "scale", 1.0)
    with pytest.raises(ValueError, match="no parameter scale"):
        s.keywords(call)
    with pytest.raises(ValueError, match="no parameter g"):
        read(delta, "f").keywords(calls.make(h0=False, dht=False))
    with pytest.raises(ValueError, match="no parameter use_gate_in_kernel, lower_bound, A_log, dt_bias"):
        s.keywords(calls.make(h0=False, dht=False, gate="bounded", params=True))


def test_signatures_that_cannot_be_called():
    def no_key(q, v, beta):
        pass

    def positional(q, k, v, /, beta):
        pass

    def anything(*args, **kwargs):
        pass

    def extra(q, k, v, g, beta, workspace):
        pass

    for f in (no_key, positional, anything):
        with pytest.raises(TargetError, match="by keyword: expected"):
            read(f, "f")
    with pytest.raises(TargetError, match="f requires workspace, which a call cannot supply"):
        read(extra, "f")
    with pytest.raises(TargetError, match="its signature cannot be read"):
        read(dict, "f")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rules": ("kda", "deltanet")}, "has 'deltanet' among its rules; allowed: kda, delta"),
        ({"gates": ["log", "soft-plus"]}, "'soft-plus' among its gates; allowed: log, softplus, bounded"),
        ({"dtypes": ("bfloat16", "fp32")}, "'fp32' among its dtypes; allowed: float16, bfloat16, float32"),
        ({"layouts": ("contigous",)}, "'contigous' among its layouts; allowed: contiguous, "),
        ({"k_sizes": (64, 512)}, "512 among its k_sizes; allowed: 1 to 256"),
        ({"chunk_sizes": (128,)}, "128 among its chunk_sizes; allowed: 16, 32, 64"),
        ({"required": ("use_qk_l2norm_in_kernel",)}, "among its required; allowed: qk_l2norm, beta_sigmoid"),
    ],
)
def test_what_a_declared_capability_holds_is_known(given, says):
    def f(q, k, v, g, beta):
        pass

    f.verikda_capabilities = given
    with pytest.raises(TargetError, match=re.escape(says)):
        declared_capabilities(f, read(f, "f"))


def test_declared_capabilities():
    def f(q, k, v, g, beta):
        pass

    f.verikda_capabilities = {"dtypes": ("bfloat16",), "backward": False}
    c = declared_capabilities(f, read(f, "f"))
    assert c.dtypes == ("bfloat16",)
    assert not c.backward
    assert not c.packed
    f.verikda_capabilities = {"dtype": "bfloat16"}
    with pytest.raises(TargetError, match="no field dtype; fields are"):
        declared_capabilities(f, read(f, "f"))


def test_a_partial_declares_what_its_function_does():
    """Else it would be judged under another contract without anyone having said so."""
    seen = attribute(functools.partial(functools.partial(declares, scale=None), cu_seqlens=None), "verikda_contract")
    assert seen == "recurrent32"
    assert attribute(declares, "verikda_device", "cpu") == "cpu"
    own = functools.partial(declares)
    own.verikda_contract = "float32"
    assert attribute(own, "verikda_contract") == "float32"
    target = NumpyFunction(functools.partial(declares, scale=None), "toy")
    assert (target.default_contract, target.capabilities.backward) == (False, False)
    assert target.contract(calls.make()).name == "float32-recurrent"
    assert NumpyFunction(functools.partial(plain), "toy").default_contract


def declares(q, k, v, g, beta, scale=None, cu_seqlens=None):
    pass


declares.verikda_contract = "recurrent32"
declares.verikda_capabilities = {"backward": False}


def plain(q, k, v, g, beta):
    pass


def test_normal_form_undoes_the_public_shapes():
    call = calls.make(gate="softplus", params=True, state_v_first=True)
    p = call.problem
    assert (normal_form("ht", p.h0.swapaxes(-1, -2), call) == p.h0).all()
    assert (normal_form("ddt_bias", p.dt_bias.reshape(-1), call) == p.dt_bias).all()
