"""A case is valid or refused with one sentence, and its JSON means the same for ever."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import re
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verikda.case import SCHEMA, TENSORS, Case, parse_json
from verikda.strategies import cases

DEFAULTS = """
lengths (1,) packed False tail_padding 0 heads 1 groups 1 K 1 V 1 dtype 'float32' g_dtype 'float32'
beta_dtype 'float32' offsets 'int64' chunk_size 64 rule 'kda' gate_regime 'random' key_regime 'random'
query_regime 'random' beta_regime 'random' value_regime 'random' do_regime 'random' gate_magnitude 1.0
q_exponent 0 v_exponent 0 do_exponent 0 h0 'none' dht False scale None gate_in_kernel False lower_bound None
A_log False dt_bias False qk_l2norm False beta_sigmoid False allow_neg_eigval False safe_gate False
state_v_first False recompute True final_state True layout 'contiguous' seed 0 overrides ()
"""


def test_defaults_are_frozen() -> None:
    """JSON leaves defaults out, so stored cases rely on them: a change here needs another SCHEMA."""
    assert " ".join(f"{f.name} {f.default!r}" for f in fields(Case)) == " ".join(DEFAULTS.split())
    assert SCHEMA == 1


GATED = {"gate_in_kernel": True, "A_log": True}
FAULTS: list[tuple[dict, str]] = [
    ({"packed": 1}, "packed is 1, but it is a switch; use True or False"),
    (
        {"dht": True, "final_state": False},
        "dht is True, but it is the gradient of a final state that is not asked for; use final_state=True, or False",
    ),
    ({"recompute": "yes"}, "recompute is 'yes', but it is a switch; use True or False"),
    ({"dtype": "float8"}, "dtype is 'float8', but it must be one of float16, bfloat16, float32; choose one of these"),
    ({"g_dtype": "float16"}, "g_dtype is 'float16', but it must be one of same, float32; choose one of these"),
    ({"beta_dtype": None}, "beta_dtype is None, but it must be one of same, float32; choose one of these"),
    ({"offsets": "int16"}, "offsets is 'int16', but it must be one of int32, int64; choose one of these"),
    ({"chunk_size": 48}, "chunk_size is 48, but it must be one of 16, 32, 64; choose one of these"),
    ({"chunk_size": True}, "chunk_size is True, but it must be one of 16, 32, 64; choose one of these"),
    ({"rule": "gdn"}, "rule is 'gdn', but it must be one of kda, delta; choose one of these"),
    ({"h0": "ones"}, "h0 is 'ones', but it must be one of none, zero, random, large; choose one of these"),
    ({"layout": []}, "layout is [], but it must be one of contiguous, sliced, "),
    ({"gate_regime": "fast"}, "gate_regime is 'fast', but it must be one of random, zero, bound, "),
    ({"key_regime": "fast"}, "key_regime is 'fast', but it must be one of random, collinear, "),
    ({"query_regime": "fast"}, "query_regime is 'fast', but it must be one of random, keys, "),
    ({"beta_regime": "fast"}, "beta_regime is 'fast', but it must be one of random, one, "),
    ({"value_regime": "fast"}, "value_regime is 'fast', but it must be one of random, zero, "),
    ({"do_regime": "fast"}, "do_regime is 'fast', but it must be one of random, zero, "),
    ({"K": 0}, "K is 0, but it must be an integer in [1, 256]; use a plain int in that range"),
    ({"V": 257}, "V is 257, but it must be an integer in [1, 256]; use a plain int in that range"),
    ({"heads": 2.0}, "heads is 2.0, but it must be an integer in [1, 4096]; use a plain int in that range"),
    ({"groups": True}, "groups is True, but it must be an integer in [1, 4096]; use a plain int in that range"),
    ({"tail_padding": -1}, "tail_padding is -1, but it must be an integer in [0, 268435456]; use a plain int"),
    ({"q_exponent": 65}, "q_exponent is 65, but it must be an integer in [-64, 64]; use a plain int in that range"),
    ({"v_exponent": -65}, "v_exponent is -65, but it must be an integer in [-64, 64]; use a plain int"),
    ({"do_exponent": "1"}, "do_exponent is '1', but it must be an integer in [-64, 64]; use a plain int"),
    ({"seed": 2**32}, "seed is 4294967296, but it must be an integer in [0, 4294967295]; use a plain int"),
    ({"gate_magnitude": None}, "gate_magnitude is None, but it must be a finite number; use a float"),
    ({"gate_magnitude": -1.0}, "gate_magnitude is -1.0, but it must be in [0, 1000] nats per token; use a size"),
    ({"gate_magnitude": 1001}, "gate_magnitude is 1001.0, but it must be in [0, 1000] nats per token; use a size"),
    ({"scale": math.nan}, "scale is nan, but it must be a finite number; use a float"),
    ({"scale": 10**400}, f"scale is 1{'0' * 96}..., but it must be a finite number; use a float"),
    ({"scale": "1"}, "scale is '1', but it must be a finite number; use a float"),
    ({"lengths": ()}, "lengths is (), but it must be a non-empty tuple of integers >= 0; use (12,) for one sequence"),
    ({"lengths": [3]}, "lengths is [3], but it must be a non-empty tuple of integers >= 0; use (12,)"),
    ({"lengths": (3, -1)}, "lengths is (3, -1), but it must be a non-empty tuple of integers >= 0; use (12,)"),
    ({"lengths": (True,)}, "lengths is (True,), but it must be a non-empty tuple of integers >= 0; use (12,)"),
    ({"lengths": (3, 4)}, "lengths is (3, 4), but sequences of a batch have equal lengths; use packed=True for"),
    ({"lengths": (0,)}, "lengths is (0,), but empty sequences exist only in a pack; use packed=True"),
    ({"tail_padding": 2}, "tail_padding is 2, but only a pack has rows after its last offset; use 0"),
    ({"heads": 100, "groups": 100}, "heads * groups is 10000, but at most 4096 value heads are supported; use fewer"),
    (
        {"lengths": (1 << 21,), "K": 256},
        "the largest tensor is 536870912, but one tensor may have at most 268435456 elements; use fewer tokens",
    ),
    (
        {"lengths": (0,) * 5000, "packed": True, "K": 256, "V": 256},
        "the largest tensor is 327680000, but one tensor may have at most 268435456 elements; use fewer tokens",
    ),
    ({"rule": "delta", **GATED}, 'gate_in_kernel is True, but rule "delta" has no gate; use False, or rule "kda"'),
    ({"rule": "delta", "safe_gate": True}, 'safe_gate is True, but rule "delta" has no gate; use False, or rule'),
    ({"A_log": True}, "A_log is True, but it is read only by a gate in the kernel; use False, or gate_in_kernel=True"),
    ({"dt_bias": True}, "dt_bias is True, but it is read only by a gate in the kernel; use False, or"),
    ({"lower_bound": -5.0}, "lower_bound is -5.0, but it is read only by a gate in the kernel; use None"),
    ({"gate_in_kernel": True}, "A_log is False, but the softplus gate needs it; use A_log=True, or a lower_bound"),
    ({**GATED, "lower_bound": 0.0}, "lower_bound is 0.0, but it must be in [-5, 0); use for example -5.0"),
    ({**GATED, "lower_bound": -5.5}, "lower_bound is -5.5, but it must be in [-5, 0); use for example -5.0"),
    ({**GATED, "safe_gate": True}, "safe_gate is True, but it promises g >= -5, which the softplus gate does not; use"),
    (
        {**GATED, "gate_regime": "positive"},
        "gate_regime is 'positive', but a gate in the kernel is never positive; use",
    ),
    ({"safe_gate": True, "gate_regime": "reset"}, "gate_regime is 'reset', but g = -inf is below any bound; use"),
    ({**GATED, "lower_bound": -1, "gate_regime": "reset"}, "gate_regime is 'reset', but g = -inf is below any bound"),
    ({"allow_neg_eigval": True}, "allow_neg_eigval is True, but it doubles the sigmoid of beta; use beta_sigmoid=True"),
    ({"beta_sigmoid": True, "beta_regime": "up_to_two"}, "beta_regime is 'up_to_two', but a sigmoid ends at 1; use"),
    ({"overrides": [("k", 0, 1.0)]}, "overrides is [('k', 0, 1.0)], but it must be a tuple of at most 8 entries; use"),
    ({"overrides": (("k", 0, 1.0),) * 9}, "overrides is (('k', 0, 1.0), "),
    ({"overrides": (("k", 0),)}, "an override is ('k', 0), but it must be (tensor, flat index, value); write for"),
    ({"overrides": (("k", 0.0, 1.0),)}, "an override is ('k', 0.0, 1.0), but it must be (tensor, flat index, value)"),
    ({"overrides": (("x", 0, 1.0),)}, "the tensor of an override is 'x', but this case has only q, k, v, g, beta, do;"),
    ({"overrides": (("h0", 0, 1.0),)}, "the tensor of an override is 'h0', but this case has only q, k, v, g, beta, "),
    ({"overrides": (("k", 1, 1.0),)}, "the index of an override of k is 1, but k has 1 elements; count from 0"),
    (
        {"overrides": (("k", 0, math.inf),)},
        "the value of an override of k is inf, but only a log gate may be -inf; use",
    ),
    ({"overrides": (("g", 0, math.inf),)}, "the value of an override of g is inf, but only a log gate may be -inf"),
    ({"overrides": (("g", 0, math.nan),)}, "the value of an override of g is nan, but only a log gate may be -inf"),
    ({"overrides": (("k", 0, 1.0), ("k", 0, 2.0))}, "overrides is (('k', 0, 1.0), ('k', 0, 2.0)), but k[0] is written"),
]


@pytest.mark.parametrize(("knobs", "message"), FAULTS)
def test_faults_are_refused_with_one_sentence(knobs: dict, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)) as error:
        Case(**knobs)
    text = str(error.value)
    assert text.count("; ") == 1
    assert "\n" not in text


def test_every_field_has_a_fault_in_the_table() -> None:
    named = {name for knobs, _ in FAULTS for name in knobs}
    assert named >= {f.name for f in fields(Case)} - {"state_v_first", "qk_l2norm", "dht"}  # switches like the others


def test_the_limits_themselves_are_allowed() -> None:
    Case(K=256, V=256, heads=64, groups=64, seed=2**32 - 1, gate_magnitude=1000, q_exponent=-64)
    Case(gate_in_kernel=True, lower_bound=-5, A_log=False, safe_gate=True)
    Case(lengths=(0, 0), packed=True, overrides=())
    Case(overrides=(("g", 0, -math.inf), ("k", 0, 1)))


def test_whole_numbers_serve_as_floats() -> None:
    case = Case(gate_in_kernel=True, lower_bound=-5, scale=1, gate_magnitude=2)
    assert [type(x) for x in (case.lower_bound, case.scale, case.gate_magnitude)] == [float] * 3


def test_cases_are_frozen_hashable_and_picklable() -> None:
    case = Case(lengths=(3,), K=4)
    with pytest.raises(FrozenInstanceError):
        case.K = 5  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(case)) == case
    assert len({case, Case(lengths=(3,), K=4), Case()}) == 2


def test_sizes() -> None:
    pack = Case(lengths=(5, 0, 7), packed=True, tail_padding=3, heads=2, groups=3, K=4, V=6, h0="zero", dht=True)
    assert (pack.N, pack.B, pack.T, pack.HV, pack.gate) == (3, 1, 15, 6, "log")
    assert pack.shapes == {
        "q": (1, 15, 2, 4),
        "k": (1, 15, 2, 4),
        "v": (1, 15, 6, 6),
        "g": (1, 15, 6, 4),
        "beta": (1, 15, 6),
        "h0": (3, 6, 4, 6),
        "do": (1, 15, 6, 6),
        "dht": (3, 6, 4, 6),
    }
    batch = Case(lengths=(5, 5), rule="delta")
    assert (batch.N, batch.B, batch.T, batch.gate) == (2, 2, 5, "none")
    assert "g" not in batch.shapes
    full = Case(gate_in_kernel=True, A_log=True, dt_bias=True, h0="zero", dht=True)
    assert tuple(full.shapes) == TENSORS
    assert full.gate == "softplus"
    assert replace(full, lower_bound=-1.0).gate == "bounded"


def test_dtypes() -> None:
    case = Case(dtype="bfloat16", g_dtype="same")
    assert {name: case.dtype_of(name) for name in TENSORS} == {
        **dict.fromkeys(("q", "k", "v", "do", "g"), "bfloat16"),
        **dict.fromkeys(("beta", "h0", "dht", "A_log", "dt_bias"), "float32"),
    }


# ------------------------------------------------------------------ JSON


def refuse(literal: str) -> float:
    raise AssertionError(f"{literal} is not strict JSON")


@given(cases(unstable=True))
def test_json_round_trip(case: Case) -> None:
    text = case.to_json()
    json.loads(text, parse_constant=refuse)
    assert "\n" not in text
    assert Case.from_json(text) == case
    assert Case.from_dict(case.to_dict()) == case
    assert set(json.loads(text)) == {"schema"} | {f.name for f in fields(Case) if getattr(case, f.name) != f.default}


def test_json_of_known_cases() -> None:
    assert Case().to_json() == '{"schema": 1}'
    case = Case(lengths=(3, 0), packed=True, gate_magnitude=0.1, overrides=(("g", 2, -math.inf), ("k", 0, -0.0)))
    text = (
        '{"schema": 1, "lengths": [3, 0], "packed": true, "gate_magnitude": 0.1,'
        ' "overrides": [["g", 2, "-inf"], ["k", 0, -0.0]]}'
    )
    assert case.to_json() == text
    back = Case.from_json(text)
    assert back == case
    assert math.copysign(1, back.overrides[1][2]) == -1


BAD_JSON: list[tuple[str, str]] = [
    ("", "not JSON: "),
    ('{"schema": 1', "not JSON: "),
    ("[1]", "a case is a JSON object, not a list; write {...} with schema 1"),
    ("{}", "schema is None, only 1 is read here; use the verikda that wrote it"),
    ('{"schema": 2}', "schema is 2, only 1 is read here; use the verikda that wrote it"),
    ('{"schema": true}', "schema is True, only 1 is read here; use the verikda that wrote it"),
    ('{"schema": 1, "kk": 3}', "unknown key 'kk'; a case has only: "),
    ('{"schema": 1, "__class__": "os.system"}', "unknown key '__class__'; a case has only: "),
    ('{"schema": 1, "K": 2, "K": 3}', "key 'K' is given twice; keep one of the two"),
    ('{"schema": 1, "scale": NaN}', "NaN is not JSON; write non-finite numbers as the strings 'inf', '-inf' or 'nan'"),
    ('{"schema": 1, "scale": -Infinity}', "-Infinity is not JSON; "),
    ('{"schema": 1, "scale": "inf"}', "scale is 'inf', but it must be a finite number; use a float"),
    ('{"schema": 1, "lengths": 3}', "lengths is 3, but it must be a non-empty tuple"),
    ('{"schema": 1, "lengths": [[1]]}', "lengths is ([1],), but it must be a non-empty tuple"),
    ('{"schema": 1, "overrides": [["g", 0, "1"]]}', "an override is ('g', 0, '1'), but it must be"),
    ('{"schema": 1, "overrides": {"g": 1}}', "overrides is {'g': 1}, but it must be a tuple"),
    ('{"schema": 1, "gate_regime": {"a": 1}}', "gate_regime is {'a': 1}, but it must be one of "),
    ('{"schema": 1, "rule": ["kda"]}', "rule is ['kda'], but it must be one of kda, delta"),
    ("[" * 200_000, "the JSON is nested too deeply; a case is one object with short lists"),
    (" " * (2**20 + 1), "the text has 1048577 characters, at most 1048576 are read; is this a case file?"),
    ('{"schema": 1, "seed": ' + "9" * 5000 + "}", "a whole number has 5000 digits; none in a case needs more than 20"),
]


@pytest.mark.parametrize(("text", "message"), BAD_JSON, ids=[t[:40] for t, _ in BAD_JSON])
def test_bad_json_is_refused_with_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Case.from_json(text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([f.name for f in fields(Case)]), _JSON, max_size=4))
def test_anything_parsed_is_a_case_or_a_value_error(data: dict) -> None:
    """Never another exception: a file from elsewhere must not crash the reader."""
    try:
        case = Case.from_dict({"schema": SCHEMA, **data})
    except ValueError:
        return
    assert Case.from_json(case.to_json()) == case


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        parse_json(text)
