"""Each primitive against plain loops: exact bits where the primitive is exact, its documented error where it is not.

The same test kernels run on the host twin under three thread orders and, where there is a GPU, on the device.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p

import numpy as np
import pytest
from launching import DTYPES, FORMS, SHAPES, Array, At, backends, launch

from kernels_cuda.modules import Backend

BACKENDS = backends()


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def bits(x: Array) -> Array:
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def assert_same_bits(got: Array, want: Array, what: str) -> None:
    wrong = np.flatnonzero(bits(got).ravel() != bits(want).ravel())
    if wrong.size:
        i = wrong[0]
        raise AssertionError(
            f"{what}: {wrong.size} of {got.size} differ, first at {i}: "
            f"got {got.ravel()[i]!r} ({bits(got).ravel()[i]:#x}), want {want.ravel()[i]!r} ({bits(want).ravel()[i]:#x})"
        )


def special_floats() -> Array:
    """Every boundary of rounding to 16 bits: around each bfloat16 and float16, halves, overflow, subnormals, NaNs."""
    halves = np.arange(0x10000, dtype=np.uint32).astype(np.uint16)
    f16 = halves.view(np.float16).astype(np.float32).view(np.uint32)
    exact = np.concatenate([f16, halves.astype(np.uint32) << 16])
    near = np.concatenate([exact + d for d in (0, 1, 0xFFFFFFFF, 0x1000, 0x0FFF, 0x1001, 0x8000, 0x7FFF, 0x8001)])
    drawn = rng().integers(0, 2**32, 20000, dtype=np.uint32)
    return np.concatenate([near, drawn]).astype(np.uint32).view(np.float32)


def round_to(x: Array, name: str) -> Array:
    """Nearest, ties to even, with the canonical NaN: written with integers, independent of the twin's tricks."""
    if name == "float":
        return x.copy()
    if name == "bf16":
        wide = x.view(np.uint32).astype(np.uint64)
        low, high = wide & 0xFFFF, wide >> 16
        up = (low > 0x8000) | ((low == 0x8000) & (high & 1 == 1))
        out = (high + up).astype(np.uint16)
    else:
        with np.errstate(over="ignore"):
            out = x.astype(np.float16).view(np.uint16).copy()
    out[np.isnan(x)] = 0x7FFF
    return out.view(DTYPES[name])


# ---- position ------------------------------------------------------------------------------------


def test_position(backend: Backend) -> None:
    grid, threads = (3, 2, 2), 96
    (out,) = launch(backend, "position", np.full((2, 2, 3, threads, 12), -1, np.int32), threads=threads, grid=grid)
    for z, y, x, t in np.ndindex(2, 2, 3, threads):
        assert out[z, y, x, t].tolist() == [t, t % 32, t // 32, threads, x, y, z, *grid, 0, 0]


def test_integers(backend: Backend) -> None:
    x = rng().integers(1, 1000, (64, 2)).astype(np.int32)
    _, out = launch(backend, "integers", x, np.zeros((64, 6), np.int32), threads=64)
    for (a, b), row in zip(x.tolist(), out.tolist(), strict=True):
        assert row == [min(a, b), max(a, b), -(-a // b), -(-a // b) * b, min(a, b), max(a, b)]


# ---- conversions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_is_to_nearest_even_and_keeps_nan(backend: Backend, name: str) -> None:
    x = special_floats()
    n = x.size
    _, rounded, back, packed, unpacked = launch(
        backend, f"convert<{name}>", x, np.zeros(n, DTYPES[name]), np.zeros(n, np.float32), np.zeros(n, np.uint32),
        np.zeros(2 * n, np.float32), c_int32(n), threads=256, grid=(8, 1, 1),
    )  # fmt: skip
    want = round_to(x, name)
    assert_same_bits(rounded, want, "from_float")
    number = ~np.isnan(x)
    assert_same_bits(back[number], want[number].astype(np.float32), "to_float")
    assert np.isnan(back[~number]).all()
    if name != "float":
        low, high = bits(want).astype(np.uint32), bits(np.roll(want, -1)).astype(np.uint32)
        assert_same_bits(packed, low | high << 16, "pack2")
        assert_same_bits(unpacked[0::2], back, "unpack2 low")
        assert_same_bits(unpacked[1::2], np.roll(back, -1), "unpack2 high")


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_every_16_bit_pattern_widens_exactly(backend: Backend, name: str) -> None:
    x = np.arange(0x10000, dtype=np.uint32).astype(np.uint16).view(DTYPES[name])
    _, out = launch(backend, f"widen<{name}>", x, np.zeros(x.size, np.float32), c_int32(x.size), threads=256)
    want = x.astype(np.float32)
    number = ~np.isnan(want)
    assert_same_bits(out[number], want[number], "to_float")
    assert np.isnan(out[~number]).all()


# ---- exchange ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("float", np.float32), ("u32", np.uint32), ("i32", np.int32)])
def test_shuffles_with_an_operand_of_each_lane(backend: Backend, name: str, dtype: type) -> None:
    n = 64
    x = rng().integers(-(2**30), 2**30, n).astype(np.int32).view(dtype)
    operand = rng(1).integers(0, 32, n).astype(np.int32)
    _, _, out = launch(backend, f"exchange<{name}>", x, operand, np.zeros((4, n), dtype), threads=n)
    for t in range(n):
        warp, lane, m = x[t // 32 * 32 :][:32], t % 32, operand[t]
        sources = [m, lane ^ m, lane - m if lane >= m else lane, lane + m if lane + m < 32 else lane]
        assert_same_bits(out[:, t].copy(), warp[sources], f"thread {t}, operand {m}")


def test_reductions_are_butterflies(backend: Backend) -> None:
    n = 96
    x = (rng().standard_normal(n) * 10.0 ** rng(1).integers(-6, 6, n)).astype(np.float32)
    x[40] = np.nan  # maxNum drops it
    _, out = launch(backend, "reduce", x, np.zeros((2, n), np.float32), threads=n)
    for w in range(3):
        total = x[32 * w :][:32].copy()
        largest = total.copy()
        for m in (16, 8, 4, 2, 1):
            other = np.arange(32) ^ m
            total, largest = total + total[other], np.fmax(largest, largest[other])
        got = out[:, 32 * w :][:, :32].copy()
        number = ~np.isnan(total)
        assert_same_bits(got[0][number], total[number], "warp_sum")
        assert np.isnan(got[0][~number]).all()
        assert_same_bits(got[1].copy(), largest, "warp_max")


# ---- matrices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(backend: Backend, count: int, transposed: bool) -> None:
    n = 64
    words = rng().integers(0, 2**32, 8 * n, dtype=np.uint32)
    rows = rng(1).integers(0, 2 * n, n).astype(np.int32)  # any 16-byte row, repeats too
    kernel = f"matrices<{count},{str(transposed).lower()}>"
    _, _, out = launch(backend, kernel, words, rows, np.zeros((n, count), np.uint32), threads=n, shared=32 * n)
    halves = words.view(np.uint16).reshape(-1, 8)
    for t, j in np.ndindex(n, count):
        matrix = halves[rows[t // 32 * 32 + 8 * j :][:8]]
        matrix = matrix.T if transposed else matrix
        low, high = matrix[t % 32 // 4, 2 * (t % 4)], matrix[t % 32 // 4, 2 * (t % 4) + 1]
        assert out[t, j] == int(low) | int(high) << 16, f"thread {t}, matrix {j}"


def mma_registers(A: Array, B: Array) -> tuple[Array, Array]:
    """Registers a [32,4], b [32,2] of mma.m16n8k16 for A [16,16] and B [16,8], from the tables of the PTX manual."""
    a, b = np.zeros((32, 8), A.dtype), np.zeros((32, 4), B.dtype)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(8):
            row = g if i < 2 or 4 <= i < 6 else g + 8
            col = 2 * t + (i & 1) + (8 if i >= 4 else 0)
            a[lane, i] = A[row, col]
        for i in range(4):
            b[lane, i] = B[2 * t + (i & 1) + (8 if i >= 2 else 0), g]
    return a.view(np.uint32), b.view(np.uint32)


def mma_result(d: Array) -> Array:
    """D [16,8] from registers d [32,4]."""
    D = np.zeros((16, 8), d.dtype)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(4):
            D[g if i < 2 else g + 8, 2 * t + (i & 1)] = d[lane, i]
    return D


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_mma_is_exact_on_small_integers(backend: Backend, name: str) -> None:
    A, B = (rng(i).integers(-8, 9, (16, n)).astype(DTYPES[name]) for i, n in ((0, 16), (1, 8)))
    a, b = mma_registers(A, B)
    start = rng(2).integers(-99, 99, (32, 4)).astype(np.float32)
    _, _, d = launch(backend, f"multiply<{name}>", a, b, start.copy())
    want = mma_result(start) + A.astype(np.float32) @ B.astype(np.float32)
    assert_same_bits(mma_result(d), want, "mma16816")


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_mma_error_is_that_of_float_accumulation(backend: Backend, name: str) -> None:
    A, B = (rng(i).standard_normal((16, n)).astype(DTYPES[name]) for i, n in ((0, 16), (1, 8)))
    a, b = mma_registers(A, B)
    start = rng(2).standard_normal((32, 4)).astype(np.float32)
    _, _, d = launch(backend, f"multiply<{name}>", a, b, start.copy())
    A, B, C = A.astype(np.float64), B.astype(np.float64), mma_result(start).astype(np.float64)
    # 17 terms, each addition wrong by at most 2^-23 (truncation) of what has been summed.
    bound = 17 * 2.0**-23 * (abs(C) + abs(A) @ abs(B))
    assert (abs(mma_result(d) - (C + A @ B)) <= bound).all()


def test_tf32_mma_reads_eleven_bits_of_each_operand(backend: Backend) -> None:
    A, B = (rng(i).integers(-1024, 1025, (16 if i == 0 else 8, 8)).astype(np.float32) for i in (0, 1))
    lanes = [divmod(lane, 4) for lane in range(32)]
    a = np.array([[A[g + 8 * (i % 2), t + 4 * (i // 2)] for i in range(4)] for g, t in lanes])
    b = np.array([[B[t + 4 * i, g] for i in range(2)] for g, t in lanes])
    start = rng(2).integers(-99, 99, (32, 4)).astype(np.float32)
    want = mma_result(start) + A @ B
    below = rng(3).integers(0, 1 << 13, (32, 6)).astype(np.uint32)  # bits that are not read
    for low in (0 * below, below, np.full_like(below, 0x1FFF)):
        _, _, d = launch(backend, "multiply<tf32>", bits(a) | low[:, :4], bits(b) | low[:, 4:], start.copy())
        assert_same_bits(mma_result(d), want, "mma1688")


def test_tf32_product_of_tiles(backend: Backend) -> None:
    A, B = (rng(i).integers(-99, 99, (n, 32)).astype(np.float32) for i, n in ((0, 16), (1, 8)))
    C0 = rng(2).integers(-50, 50, (16, 8)).astype(np.float32)
    *_, C = launch(
        backend, "product<tf32,16,8,32,NT>", A, B, C0, np.zeros_like(C0), shared=product_bytes("float", 16, 8, 32, "NT")
    )
    assert_same_bits(C, C0 + A @ B.T, "warp_mma of tf32")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_mma_passes_non_finite_values_to_their_row_only(backend: Backend, value: float) -> None:
    A, B = np.ones((16, 16), np.float16), np.ones((16, 8), np.float16)
    A[5, 3] = value
    a, b = mma_registers(A, B)
    _, _, d = launch(backend, "multiply<f16>", a, b, np.zeros((32, 4), np.float32))
    D = mma_result(d)
    assert np.array_equal(D[5], np.full(8, value, np.float32), equal_nan=True)
    assert (np.delete(D, 5, axis=0) == 16).all()


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_elements_touch_only_their_count(backend: Backend, name: str) -> None:
    n, size = 32, DTYPES[name].itemsize
    vec = 16 // size
    x = rng().integers(0, 2 ** (8 * size), (n, vec + 1)).astype(f"u{size}").view(DTYPES[name])
    counts = rng(1).integers(-2, vec + 3, (2, n)).astype(np.int32)
    before = np.full((n, vec + 1), 7, DTYPES[name])
    _, out, _ = launch(backend, f"elements<{name}>", x, before.copy(), counts)
    want = before.copy()
    for t in range(n):
        loaded, stored = (min(max(int(c), 0), vec) for c in counts[:, t])
        row = np.concatenate([x[t, :loaded], np.zeros(vec - loaded, DTYPES[name])])
        want[t, :stored] = row[:stored]
    assert_same_bits(out, want, "ld_elements, st_elements")


def test_vectors(backend: Backend) -> None:
    x = rng().integers(0, 2**32, (64, 4), dtype=np.uint32)
    _, out = launch(backend, "vectors", x, np.zeros_like(x), threads=64)
    assert_same_bits(out, x, "ld128, st128")


def test_copies_land_group_by_group(backend: Backend) -> None:
    n = 64
    x = rng().integers(0, 2**32, (3, n, 4), dtype=np.uint32)
    pred = rng(1).integers(0, 2, (3, n)).astype(np.int32)
    _, _, out = launch(backend, "copies", x, pred, np.zeros_like(x), threads=n, shared=3 * n * 16)
    assert_same_bits(out, np.roll(np.where(pred[..., None] != 0, x, 0), -1, axis=1), "cp_async16")


# ---- math ----------------------------------------------------------------------------------------

# (row, what it computes in float64, limit in ulp of the result): the larger of what the PTX and CUDA manuals and the
# manual of the GNU C library state for the two twins.
MATH = {
    "exp2": (0, np.exp2, 2.0),
    "log2f": (1, np.log2, 1.0),
    "exp": (2, np.exp, 2.0),
    "log1p": (3, np.log1p, 2.0),
    "rsqrtf": (4, lambda x: 1 / np.sqrt(x), 2.0),
    "sqrt_rn": (5, np.sqrt, 0.5),
    "fabs": (9, np.abs, 0.0),
    "exp2_close of a decay": (10, lambda x: np.exp2(-np.abs(x)), 1.0),
    "exp2_close": (11, np.exp2, 2.0),
}


def run_math(backend: Backend, x: Array, y: Array, z: Array) -> Array:
    n = c_int32(x.size)
    return launch(backend, "math", x, y, z, np.zeros((12, x.size), np.float32), n, threads=256, grid=(4, 1, 1))[3]


@pytest.mark.parametrize("name", MATH)
def test_math_error(backend: Backend, name: str) -> None:
    row, reference, limit = MATH[name]
    spread = np.exp2(rng().uniform(-126, 127, 4000))
    x = np.concatenate([spread, -spread, rng(1).uniform(-140, 128, 20000), rng(2).uniform(-1, 2, 20000)])
    x = x.astype(np.float32)
    got = run_math(backend, x, x, x)[row]
    with np.errstate(all="ignore"):
        want = reference(x.astype(np.float64))
        rounded = want.astype(np.float32)
    finite = np.isfinite(rounded)
    assert_same_bits(got[np.isinf(rounded)], rounded[np.isinf(rounded)], "infinities")
    assert np.isnan(got[np.isnan(rounded)]).all()
    ulp = np.spacing(np.abs(rounded[finite])).astype(np.float64)
    error = np.abs(got[finite].astype(np.float64) - want[finite]) / ulp
    worst = int(error.argmax())
    assert error[worst] <= limit, f"{name}({x[finite][worst]!r}) is wrong by {error[worst]:.2f} ulp, allowed {limit}"


def test_exp2_keeps_subnormals_and_limits(backend: Backend) -> None:
    powers = np.arange(-149, 128)
    x = np.concatenate([[-np.inf, np.inf, np.nan, -151.0, 0.0, -0.0], powers]).astype(np.float32)
    got = run_math(backend, x, x, x)[0]
    assert np.array_equal(got[:6], np.array([0, np.inf, np.nan, 0, 1, 1], np.float32), equal_nan=True)
    subnormal = powers < -126
    want = np.ldexp(np.float32(1), powers)
    assert_same_bits(got[6:][~subnormal], want[~subnormal], "exp2 of integers")
    # an H200 gives 2^-127 less the smallest number
    steps = np.abs(got[6:].astype(np.float64) - want)[subnormal] / 2.0**-149
    assert steps.max() <= (1 if backend.name == "cuda" else 0)
    assert np.all(got[6:] > 0)


def test_fma_rounds_once_and_keeps_subnormals(backend: Backend) -> None:
    # 1 + 2^-23 squared is 1 + 2^-22 + 2^-46: minus 1 + 2^-22 leaves 2^-46 only if nothing was rounded in between.
    x = np.array([1 + 2.0**-23, 2.0**-100, 2.0**-75], np.float32)
    y = np.array([1 + 2.0**-23, 2.0**-40, 2.0**-75], np.float32)
    z = np.array([-(1 + 2.0**-22), 2.0**-149, 0], np.float32)
    got = run_math(backend, x, y, z)[6]
    assert got.tolist() == [2.0**-46, 2.0**-140 + 2.0**-149, 0.0]


def test_fmax_and_fmin_drop_nan(backend: Backend) -> None:
    x = np.array([1, np.nan, 2, -np.inf], np.float32)
    y = np.array([np.nan, 1, -3, 5], np.float32)
    got = run_math(backend, x, y, y)
    assert got[7].tolist() == [1, 1, 2, 5]
    assert got[8].tolist() == [1, 1, -3, -np.inf]


# ---- tiles ---------------------------------------------------------------------------------------


def product_bytes(name: str, M: int, N: int, K: int, form: str) -> int:
    size, pad = DTYPES[name].itemsize, 16 // DTYPES[name].itemsize
    a = K * (M + pad) if form[0] == "T" else M * (K + pad)
    b = N * (K + pad) if form[1] == "T" else K * (N + pad)
    return (a + b) * size


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_products_of_tiles(backend: Backend, name: str, form: str, M: int, N: int, K: int) -> None:
    A, B = (rng(i).integers(-4, 5, shape).astype(DTYPES[name]) for i, shape in ((0, (M, K)), (1, (K, N))))
    C0 = rng(2).integers(-50, 50, (M, N)).astype(np.float32)
    stored = [np.ascontiguousarray(X.T if letter == "T" else X) for X, letter in zip((A, B), form, strict=True)]
    shared = product_bytes(name, M, N, K, form)
    *_, C = launch(backend, f"product<{name},{M},{N},{K},{form}>", *stored, C0, np.zeros_like(C0), shared=shared)
    assert_same_bits(C, C0 + A.astype(np.float32) @ B.astype(np.float32), "warp_mma")


def test_float_products_are_true_float32_in_ascending_order(backend: Backend) -> None:
    M, N, K = 16, 8, 16
    A, B = rng().standard_normal((M, K)).astype(np.float32), rng(1).standard_normal((K, N)).astype(np.float32)
    *_, C = launch(
        backend, f"product<float,{M},{N},{K},NN>", A, B, np.zeros((M, N), np.float32), np.zeros((M, N), np.float32),
        shared=product_bytes("float", M, N, K, "NN"),
    )  # fmt: skip
    want = np.zeros((M, N), np.float32)
    for k in range(
        K
    ):  # a product of floats is exact in double, so this rounds once per term, as fma (up to double rounding)
        want = (want.astype(np.float64) + np.outer(A[:, k].astype(np.float64), B[k])).astype(np.float32)
    assert_same_bits(C, want, "float warp_mma")


@pytest.mark.parametrize("name", DTYPES)
def test_chained_products(backend: Backend, name: str) -> None:
    A, B, D = (rng(i).integers(-3, 4, (16, 16)).astype(DTYPES[name]) for i in range(3))
    AB, C = np.zeros((16, 16), DTYPES[name]), np.zeros((16, 16), np.float32)
    launch(backend, f"chain<{name}>", A, B, D, AB, C, shared=4 * 16 * (16 * DTYPES[name].itemsize + 16))
    exact = A.astype(np.float32) @ B.astype(np.float32)
    assert_same_bits(AB, exact.astype(DTYPES[name]), "store_acc")
    assert_same_bits(C, exact @ D.astype(np.float32), "product of a product")


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("stride", [32, 33, 40])
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (0, 32), (7, 32), (16, 1), (3, 17), (16, 0), (20, 40)])
def test_tiles_are_zero_outside(backend: Backend, name: str, offset: int, stride: int, rows: int, columns: int) -> None:
    dtype = DTYPES[name]
    exists = (min(rows, 16), min(columns, 32))
    G = np.full(offset + 16 * stride + 32, np.nan, dtype)  # what must not be read, or must not matter
    for r, c in np.ndindex(*exists):
        G[offset + r * stride + c] = r * 32 + c + 1 if name == "float" else (r * 32 + c) % 200 + 1
    shape = c_int64(stride), c_int32(rows), c_int32(columns)
    out = np.full((16, 32), 5, dtype)
    launch(backend, f"tile<{name}>", At(G, offset), *shape, out, threads=64, shared=16 * (32 * dtype.itemsize + 16))
    want = np.zeros((16, 32), dtype)
    for r, c in np.ndindex(*exists):
        want[r, c] = G[offset + r * stride + c]
    assert_same_bits(out, want, "load_tile")


def test_absent_rows_are_never_read(backend: Backend) -> None:
    out = np.full((16, 32), 5, np.float32)
    null = c_void_p(0)
    launch(backend, "tile<float>", null, c_int64(1 << 40), c_int32(0), c_int32(32), out, threads=64, shared=16 * 144)
    assert (out == 0).all()
