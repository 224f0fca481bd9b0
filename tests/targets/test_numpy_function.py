"""The NumPy adapter, on the float64 recurrence behind the public signature."""

from __future__ import annotations

from dataclasses import replace

import calls
import ml_dtypes
import numpy as np
import pytest

from oracles.problem import Problem
from oracles.recurrence import forward, forward_reverse
from verikda.call import Crashed, Malformed, Refused
from verikda.case import LAYOUTS, Case
from verikda.run_case import run_case
from verikda.targets.numpy_function import NumpyFunction


def kda(
    q,
    k,
    v,
    g,
    beta,
    do,
    dht,
    scale=None,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    state_v_first=False,
    use_gate_in_kernel=False,
    A_log=None,
    dt_bias=None,
    lower_bound=None,
):
    def f64(x):
        return None if x is None else np.array(x, np.float64)

    def turned(x):
        return x.swapaxes(-1, -2) if state_v_first and x is not None else x

    gate = "log" if not use_gate_in_kernel else "softplus" if lower_bound is None else "bounded"
    p = Problem(
        *map(f64, (q, k, v, g, beta)),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        h0=f64(turned(initial_state)),
        cu_seqlens=cu_seqlens,
        gate=gate,
        lower_bound=lower_bound,
        A_log=f64(A_log),
        dt_bias=None if dt_bias is None else f64(dt_bias).reshape(v.shape[2], -1),
        do=f64(do),
        dht=f64(turned(dht)),
    )
    found = forward(p) if do is None and dht is None else forward_reverse(p)
    types = {"o": q, "dq": q, "dk": k, "dv": v, "dg": g, "dbeta": beta}
    out = {n: x.astype(types[n].dtype if n in types else np.float32) for n, x in found.items()}
    out["final_state"] = turned(out.pop("ht"))
    if "dh0" in out:
        out["dh0"] = turned(out["dh0"])
    if "ddt_bias" in out:
        out["ddt_bias"] = out["ddt_bias"].reshape(-1)
    return out


CALLS = {
    "states": calls.make(),
    "no gradient of the state": calls.make(dht=False),
    "v first": calls.make(state_v_first=True),
    "bounded": calls.make(gate="bounded", params=True),
    "packed": calls.make("float16", shape=(1, 7, 1, 2, 3, 4), cu_seqlens=[0, 2, 2, 6], offsets="int32"),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_arrives(name):
    call = CALLS[name]
    result = NumpyFunction(kda_with_defaults, "kda").run(call)
    expected = forward_reverse(call.problem)
    assert set(result.outputs) == set(expected)
    tolerance = 1e-3 if call.dtypes["q"] == "float16" else 1e-6
    for n, value in expected.items():
        assert np.abs(result.outputs[n] - value).max() <= tolerance * (np.abs(value).max() + 1), n
    assert result.dtypes["o"] == call.dtypes["q"]
    assert result.changed == ()


def kda_with_defaults(q, k, v, g, beta, do=None, dht=None, **options):
    return kda(q, k, v, g, beta, do, dht, **options)


kda_with_defaults.verikda_parameters = tuple(kda.__code__.co_varnames[7 : kda.__code__.co_argcount])


def test_no_backward():
    assert set(NumpyFunction(kda_with_defaults, "kda").run(calls.make(backward=False)).outputs) == {"o", "ht"}


@pytest.mark.parametrize("poison", [None, np.nan, 1e30])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_changes_nothing(layout, poison):
    call = calls.make("bfloat16", shape=(1, 7, 1, 2, 3, 4), cu_seqlens=[0, 2, 2, 6])
    target = NumpyFunction(kda_with_defaults, "kda")
    plain, other = target.run(call), target.run(replace(call, layout=layout, poison=poison))
    assert other.changed == ()
    assert all(np.array_equal(plain.outputs[n], other.outputs[n]) for n in plain.outputs)


def test_writes_are_seen():
    def f(q, k, v, g, beta, do=None, dht=None):
        q[0, 0, 0, 0] += 1
        np.lib.stride_tricks.as_strided(k, (k.size + 1,), (k.itemsize,), writeable=True)[-1] = 5
        return {"o": np.zeros_like(v)}

    assert NumpyFunction(f, "f").run(calls.make(h0=False, dht=False)).changed == ("q", "memory around k")


def answering(answer):
    def f(q, k, v, g, beta, do=None, dht=None):
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return NumpyFunction(f, "f"), calls.make(h0=False, dht=False)


O = np.zeros((2, 5, 2, 4), np.float32)  # noqa: E741


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((O,), "returned a tuple; expected a dictionary"),
        ({"dq": O}, "returned dq; expected at least o"),
        ({}, "returned nothing"),
        ({"o": O.tolist()}, "o is a list; expected an array"),
        ({"o": O[:1]}, r"o has shape \[1, 5, 2, 4\]; expected \[2, 5, 2, 4\]"),
        ({"o": O.astype(np.float64)}, "o has dtype float64; expected float32"),
        ({"o": O, "dv": O.astype(np.float16)}, "dv has dtype float16; expected float32"),
        ({"o": O, "dh0": O}, "returned dh0, which this call has no input for"),
    ],
)
def test_malformed(answer, message):
    target, call = answering(answer)
    with pytest.raises(Malformed, match=message):
        target.run(call)


def test_none_is_absent():
    target, call = answering({"o": O, "dq": None})
    assert set(target.run(call).outputs) == {"o"}


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("K > 4"), Refused), (IndexError("5"), Crashed), (SystemExit("0"), Crashed)]
)
def test_errors(error, kind):
    target, call = answering(error)
    with pytest.raises(kind, match=str(error)):
        target.run(call)


@pytest.mark.parametrize(("base", "kind"), [(RuntimeError, Crashed), (TypeError, Refused)])
@pytest.mark.parametrize("fails", [lambda self: self.nothing, lambda self: 3], ids=["raises", "no text"])
def test_an_error_without_a_text_counts_as_one_with_a_text(base, kind, fails):
    target, call = answering(type("BadShape", (base,), {"__str__": fails})())
    with pytest.raises(kind, match=r"^BadShape, whose text cannot be shown"):
        target.run(call)


def test_a_runtime_error_about_an_object_without_a_text_is_a_crash():
    target, call = answering(RuntimeError(type("Shape", (), {"__str__": lambda self: self.nothing})()))
    with pytest.raises(Crashed, match=r"^RuntimeError, whose text cannot be shown: making it raises AttributeError"):
        target.run(call)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bad", ["inf", "-inf", "nan", "signalling nan", "largest"])
def test_any_answer_is_judged_without_a_warning(dtype: str, bad: str) -> None:
    """Infinite times 0, infinite less infinite, and bits that are garbage: a failure of the target, no news of ours."""
    number = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    garbage = np.array({"float16": 0x7D00, "bfloat16": 0x7F81, "float32": 0x7F800001}[dtype], f"u{number.itemsize}")
    value = {"signalling nan": garbage.view(number), "largest": ml_dtypes.finfo(number).max}.get(bad) or float(bad)

    def broken(q, k, v, g, beta, do=None, dht=None, scale=None, initial_state=None, output_final_state=False):
        out = kda(q, k, v, g, beta, do, dht, scale, initial_state, output_final_state)
        for name in {"o", "dv"} & set(out):
            out[name][...] = value
        return out

    for options in ({"do_regime": "zero"}, {"h0": "random", "dht": True}):
        report = run_case(NumpyFunction(broken, "broken"), Case(lengths=(5,), K=3, V=2, dtype=dtype, **options))
        assert report.verdict == "fail", report.outcomes
