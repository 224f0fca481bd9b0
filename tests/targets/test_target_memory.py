"""Layouts, guard zones and poison hold what they promise."""

from __future__ import annotations

import calls
import numpy as np
import pytest

from verikda.case import LAYOUTS
from verikda.dtypes import NUMPY_DTYPES
from verikda.targets.memory import ALIGNMENT, GUARD_ROWS, place, place_call, poison_value

VALUES = np.arange(2 * 3 * 4 * 5, dtype=np.float64).reshape(2, 3, 4, 5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["q", "k", "h0"])
def test_every_layout_shows_the_values(name, layout, dtype):
    block = place(name, VALUES, dtype, layout, np.nan)
    view = block.view(block.copy())
    assert view.dtype == NUMPY_DTYPES[dtype]
    assert np.array_equal(view.astype(np.float64), VALUES)
    outside = np.ones(block.buffer.size, bool)
    block.view(outside)[...] = False
    assert outside.sum() == block.buffer.size - VALUES.size
    assert np.isnan(block.buffer[outside].astype(np.float32)).all(), "everything around the input is poison"
    guard = GUARD_ROWS * VALUES.shape[2] * VALUES.shape[3]
    assert outside[:guard].all()
    assert outside[-guard:].all()


@pytest.mark.parametrize("name", ["q", "k", "h0"])
def test_layouts_are_what_they_are_called(name):
    views = {layout: place(name, VALUES, "bfloat16", layout) for layout in LAYOUTS}
    arrays = {layout: block.view(block.copy()) for layout, block in views.items()}
    address = {layout: a.__array_interface__["data"][0] % ALIGNMENT for layout, a in arrays.items()}
    assert arrays["contiguous"].flags.c_contiguous
    assert address["contiguous"] == 0
    assert arrays["misaligned"].flags.c_contiguous
    assert address["misaligned"] == 2
    assert not arrays["sliced"].flags.c_contiguous
    assert views["sliced"].strides[-1] == 1
    assert not arrays["strided"].flags.c_contiguous
    if name == "q":
        assert views["strided"].strides[-1] == 2
    else:
        assert sorted(views["strided"].strides, reverse=True) != list(views["strided"].strides)
    assert views["expanded"].layout == "sliced: no equal values to expand"


def test_expanded_has_stride_zero_where_values_are_equal():
    values = np.repeat(VALUES[:, :, :1], 4, axis=2)
    block = place("k", values, "float32", "expanded", np.nan)
    assert block.layout == "expanded"
    assert block.strides == (15, 5, 0, 1)
    assert np.array_equal(block.view(block.copy()), values)


def test_expanded_tells_zeros_of_different_sign_apart():
    block = place("beta", np.array([[0.0, -0.0]]), "float32", "expanded")
    assert block.layout.startswith("sliced")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 0, 2, 3), (1, 1, 1, 1)])
def test_empty_and_single(layout, shape):
    block = place("k", np.ones(shape), "float16", layout, np.nan)
    assert block.view(block.copy()).shape == shape
    assert block.changes(block.copy()) == ()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_changes_names_what_was_written(layout):
    block = place("q", VALUES, "float32", layout, 0.0)
    first = block.offset - 1
    for where, expected in ((first, ("memory around q",)), (block.buffer.size - 1, ("memory around q",))):
        after = block.copy()
        after[where] = 1.0
        assert block.changes(after) == expected
    after = block.copy()
    block.view(after)[1, 2, 3, 4] = -1.0
    assert block.changes(after) == ("q",)
    after[first] = 1.0
    assert block.changes(after) == ("q", "memory around q")


def test_changes_compares_bits():
    block = place("q", np.zeros((1, 1, 1, 1)), "float32")
    after = block.copy()
    block.view(after)[...] = -0.0
    assert block.changes(after) == ("q",)
    block = place("q", np.zeros((1, 1, 1, 1)), "float32", poison=np.nan)
    assert block.changes(block.copy()) == (), "NaN equals itself here"


def test_poison_outside_the_range_is_the_largest_number():
    assert poison_value(1e30, NUMPY_DTYPES["float16"]) == 65504
    assert float(poison_value(1e30, NUMPY_DTYPES["float32"])) == pytest.approx(1e30)
    assert float(poison_value(-np.inf, NUMPY_DTYPES["float16"])) == -np.inf


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_rows_are_poisoned(layout):
    call = calls.make(shape=(1, 6, 1, 2, 3, 4), cu_seqlens=[0, 3, 4], layout=layout, poison=np.nan)
    p = call.problem
    arrays = {n: getattr(p, n) for n in ("q", "k", "v", "g", "beta", "do", "h0", "dht", "cu_seqlens")}
    blocks = place_call(call, arrays)
    for name, block in blocks.items():
        view = block.view(block.copy()).astype(np.float64)
        rows = name not in ("h0", "dht", "cu_seqlens")
        used = view[:, :4] if rows else view
        assert np.array_equal(used, arrays[name][:, :4] if rows else arrays[name]), name
        assert not rows or np.isnan(view[:, 4:]).all(), name
    offsets = blocks["cu_seqlens"]
    assert set(offsets.buffer.tolist()) == {0, 3, 4, 6}, "around offsets lies the wrong but possible offset T"


def test_without_poison_padding_rows_stay():
    call = calls.make(shape=(1, 6, 1, 2, 3, 4), cu_seqlens=[0, 3, 4])
    block = place_call(call, {"q": call.problem.q})["q"]
    assert np.array_equal(block.view(block.copy()), call.problem.q)


def test_values_must_be_representable():
    with pytest.raises(ValueError, match=r"q\[0, 1\] = .*0\.1.* is not representable in bfloat16"):
        place("q", np.array([[1.0, 0.1]]), "bfloat16")
    with pytest.raises(ValueError, match="not representable in float16"):
        place("q", np.array([1e6]), "float16")
    assert np.isnan(place("q", np.array([np.nan]), "float16").buffer).sum() == 1
    assert np.isneginf(place("g", np.array([-np.inf]), "float16").buffer).sum() == 1


def test_unknown_names():
    with pytest.raises(ValueError, match="dtype 'float8' is not one of"):
        place("q", VALUES, "float8")
    with pytest.raises(ValueError, match="layout 'diagonal' is not one of"):
        place("q", VALUES, "float32", "diagonal")
