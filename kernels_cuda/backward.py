"""Launch plan of the backward: which kernels, with which tiles and buffers, over raw addresses.

    prepare, chunk_state   recompute what the forward did not keep: A, Aqk, W, Kg, Qg, exp gC, Vnew, S
    backward_state         reverse scan per (sequence, value head, slice of V): dU, dS, dh0
    backward_local         per (chunk, value head): dAqk, X, dW, dv, part of dbeta
    backward_intra         per (chunk, value head): dq, dk, dg, dbeta
    backward_qk, backward_gate, backward_beta, sum_tiles
                           where there is a group, a norm, a raw gate or a sigmoid: gradients of the caller's arguments
    clear_tail             zeros in rows that belong to no sequence

Nothing is read back, so nothing waits, and no sum uses atomics: the same call gives the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping

from kernels_cuda.forward import (
    BYTES,
    GATES,
    TYPES,
    Allocate,
    Forward,
    Table,
    chunk_state,
    chunk_table,
    prepare,
    whole_pieces,
)
from kernels_cuda.modules import Backend

INTERMEDIATES = ("dU", "dS", "dAqk", "X", "dW", "dA")
"""X = -(A^T dA A^T) * M1, so that dL = diag(beta) X."""
_GATE_TILE = 64  # gate_tile of backward_gate.cu


class _Gate(ctypes.Structure):
    """Gate of gate.cuh."""

    _fields_ = (
        ("g", ctypes.c_void_p),
        ("A_log", ctypes.c_void_p),
        ("dt_bias", ctypes.c_void_p),
        ("lower_bound", ctypes.c_float),
        ("kind", ctypes.c_int32),
        ("g_is_float", ctypes.c_int32),
    )


def needed(call: Forward) -> tuple[str, ...]:
    """Names of the forward's intermediates that the backward reads; what is not given is computed again."""
    gated = ("Kg", "Qg", "decay") if call.gated else ()
    norm = ("qn", "kn") if call.qk_l2norm else ()
    return ("Aqk", "A", "W", "Vnew", "S", *gated, *norm, *(("beta",) if _beta_changes(call) else ()))


def backward(
    backend: Backend,
    call: Forward,
    allocate: Allocate,
    *,
    do: int,
    dht: int = 0,
    saved: Mapping[str, int] | None = None,
    table: Table | None = None,
    keep: Collection[str] = (),
    shared_limit: int = 227 * 1024,
    processors: int = 132,
    stream: int = 0,
) -> dict[str, int]:
    """Run the backward.

    Parameters
    ----------
    backend : from `kernels_cuda.modules.load`.
    call : the forward call whose gradients are wanted.
    allocate : is asked for every buffer by name. Results, each of its argument's shape: dq, dk, dv in `call.dtype`,
        dg and dbeta in the dtypes of g and beta, dh0 float32 if h0 is given, dA_log [HV] and ddt_bias [HV,K] float32 if
        those are. Rows of no sequence are zero in all of them.
    do : address of the gradient of o, [B,T,HV,V] of `call.dtype`.
    dht : address of the gradient of ht, of its shape, float32; 0 for none.
    saved : addresses of what the forward kept; used if it holds every name of `needed(call)`, else all are computed
        again (to the same bits).
    table : the forward's table of chunks; built again if None.
    keep : names in INTERMEDIATES that must be complete when this returns, zero in rows of no sequence. Layouts: dU
        [B,T,HV,V], dS [chunks,HV,K,V] (after each chunk), dW [B,T,HV,K], dA [B,T,HV,chunk], all of `call.dtype`; dAqk,
        X [B,T,HV,chunk] float32.
    shared_limit, processors : of the device.
    stream : address of the CUDA stream.

    Returns
    -------
    addresses by name of results and intermediates.

    Raises
    ------
    ValueError
        If a size is beyond what the kernels address, or a name in `keep` is unknown.
    """
    unknown = sorted(set(keep) - set(INTERMEDIATES))
    if unknown:
        raise ValueError(f"keep names {', '.join(unknown)}; known: {', '.join(INTERMEDIATES)}")
    if table is None:
        table = chunk_table(backend, call, allocate, stream)
    inner = dict(saved or {})
    if not set(needed(call)) <= set(inner):
        inner = _recompute(backend, call, table, allocate, shared_limit, processors, stream)
    plan = _Plan(backend, call, table, inner, allocate, shared_limit, processors, stream)
    plan.state(do, dht)
    plan.local(do, "dA" in keep)
    plan.gradients(do)
    plan.arguments()
    if call.cu_seqlens:
        plan.clear(keep)
    return plan.out


def backward_tiles(call: Forward, shared_limit: int, processors: int) -> tuple[int, int]:
    """Columns of V per block of the reverse scan, and buffers of its ring.

    Raises
    ------
    ValueError
        If not even the smallest fits.
    """
    widths = [BV for BV in (64, 32, 16) if BV * call.chunk >= 512 and not (BV == 64 and call.KP == 256)]
    full = [BV for BV in widths if 3 * processors <= 4 * call.N * call.HV * -(-call.V // BV) and BV // 2 < call.V]
    for BV in dict.fromkeys([full[0] if full else widths[-1], widths[-1]]):
        for R in (3, 2, 1):
            if reverse_shared(call.dtype, call.chunk, call.KP, BV, R) <= shared_limit:
                return BV, R
    raise ValueError(f"chunk {call.chunk} with K={call.K} needs more than {shared_limit} bytes of shared memory")


def reverse_shared(dtype: str, chunk: int, KP: int, BV: int, R: int) -> int:
    """Bytes of ReverseShape in backward_state.cu."""
    KS = 128 if dtype != "float32" and KP == 128 else 64
    pad = 16 // BYTES[dtype]
    elements = R * 2 * chunk * (KS + pad) + 3 * chunk * (BV + pad) + KP * (BV + pad)
    return BYTES[dtype] * elements + R * KS * 4


def local_shared(dtype: str, chunk: int) -> int:
    """Bytes of LocalShared in backward_local.cu."""
    size, stages = BYTES[dtype], 2 if dtype != "float32" else 1
    pad = 16 // size
    return size * (4 * stages * 64 * (64 + pad) + chunk * (chunk + pad)) + 4 * 3 * chunk


def gradient_shared(dtype: str, chunk: int) -> int:
    """Bytes of GradientShape in backward_intra.cu."""
    size, blocks = BYTES[dtype], chunk // 16
    parts, pad = (2, 8) if size == 2 else (1, 4)  # 16-bit calls: hi and lo, two stages, tiles of q and k
    tile = (64 + pad) * size
    triangle = parts * 16 * blocks * (8 * (blocks + 1) + pad) * size
    region = max(2 * parts * chunk * tile, chunk // 8 * 16 * 40 * 4, parts * 2 * 64 * tile)
    inputs = 2 * chunk * tile if size == 2 else 0
    sums = chunk * 68 * (1 if size == 2 else 2)  # float calls keep single log decays too
    return 2 * triangle + region + inputs + 4 * (sums + 3 * blocks * 64 + 64 + chunk + 16)


def _beta_changes(call: Forward) -> bool:
    return call.beta_sigmoid or not call.beta_float32


def _recompute(
    backend: Backend, call: Forward, table: Table, allocate: Allocate, shared_limit: int, processors: int, stream: int
) -> dict[str, int]:
    names = dict.fromkeys((*needed(call), "U"))
    dtypes = {name: "float32" if name in ("beta", "decay") else call.dtype for name in names}
    inner = {name: allocate(name, call.rows(name), dtypes[name]) for name in names}
    before = {name: address for name, address in inner.items() if name not in ("Vnew", "S")}
    prepare(backend, call, table, before, stream)
    chunk_state(backend, call, table, inner, shared_limit=shared_limit, processors=processors, stream=stream)
    return inner


def _p(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address or None)


def _i(value: int) -> ctypes.c_int32:
    return ctypes.c_int32(value)


class _Plan:
    """One backward call on its way: launches in order, buffers by name in `out`."""

    def __init__(
        self,
        backend: Backend,
        call: Forward,
        table: Table,
        inner: Mapping[str, int],
        allocate: Allocate,
        shared_limit: int,
        processors: int,
        stream: int,
    ) -> None:
        self.backend, self.call, self.table, self.inner, self.allocate = backend, call, table, inner, allocate
        self.limits, self.stream = (shared_limit, processors), stream
        self.out: dict[str, int] = {}
        self.dtypes: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.q, self.k = (inner["qn"], inner["kn"]) if call.qk_l2norm else (call.q, call.k)
        self.beta = inner["beta"] if _beta_changes(call) else call.beta
        self.gate = _Gate(
            call.g or None, call.A_log or None, call.dt_bias or None, call.lower_bound, GATES[call.gate], call.g_float32
        )

    def new(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        self.out[name] = self.allocate(name, shape, dtype)
        self.shapes[name], self.dtypes[name] = shape, dtype
        return self.out[name]

    def launch(
        self, kernel: str, arguments: str, blocks: int, shared: int, args: list[object], threads: int = 128
    ) -> None:
        if blocks >= 2**31:
            raise ValueError(f"{blocks} blocks of {kernel}; at most 2**31 - 1, so split the batch or the heads")
        name = f"{kernel}<{arguments}>" if arguments else kernel
        self.backend.launch(name, (blocks, 1, 1), threads, shared, args, self.stream)

    def tile_arguments(self, do: int) -> str:
        """Template arguments of the kernels that read tiles of everything."""
        c = self.call
        tiles = (self.q, self.k, c.v, c.g, do, *self.inner.values(), self.out["dU"], self.out["dS"])
        flags = (c.gated, whole_pieces(c, tiles))
        return ",".join((TYPES[c.dtype], str(c.chunk), *(str(flag).lower() for flag in flags)))

    def state(self, do: int, dht: int) -> None:
        """dU, dS, dh0."""
        c, inner = self.call, self.inner
        plain = not c.gated
        Kg, Qg = (self.k, self.q) if plain else (inner["Kg"], inner["Qg"])
        BV, R = backward_tiles(c, *self.limits)
        dU = self.new("dU", (c.B, c.T, c.HV, c.V), c.dtype)
        dS = self.new("dS", (c.chunks, c.HV, c.K, c.V), c.dtype)
        dh0 = self.new("dh0", c.rows("ht"), "float32") if c.h0 else 0
        self.launch(
            "backward_state", f"{TYPES[c.dtype]},{c.chunk},{c.KP},{BV},{R},{str(c.gated).lower()}",
            c.N * c.HV * -(-c.V // BV), reverse_shared(c.dtype, c.chunk, c.KP, BV, R),
            [_p(Kg), _p(inner["W"]), _p(Qg), _p(inner["Aqk"]), _p(do), _p(inner.get("decay", 0)), _p(dht),
             _p(self.table.chunks), _p(self.table.first_chunk), _p(dU), _p(dS), _p(dh0),
             _i(c.H if plain else c.HV), _i(c.HV), _i(c.K), _i(c.V), ctypes.c_float(c.scale if plain else 1.0),
             _i(c.state_v_first)],
            threads=32 * min(8, c.chunk * BV // 128) + 128,
        )  # fmt: skip

    def local(self, do: int, want_dA: bool) -> None:
        """dAqk, X, dW, dv."""
        c, inner = self.call, self.inner
        rows, square = (c.B, c.T, c.HV), (c.B, c.T, c.HV, c.chunk)
        dAqk, X = self.new("dAqk", square, "float32"), self.new("X", square, "float32")
        dW, dv = self.new("dW", (*rows, c.K), c.dtype), self.new("dv", (*rows, c.V), c.dtype)
        dbeta_v = self.new("dbeta_v", rows, "float32")
        dA = self.new("dA", square, c.dtype) if want_dA else 0
        self.launch(
            "backward_local", self.tile_arguments(do),
            c.chunks * c.HV, local_shared(c.dtype, c.chunk),
            [_p(inner["A"]), _p(self.out["dU"]), _p(inner["Vnew"]), _p(do), _p(c.v), _p(self.k), _p(inner["S"]),
             _p(self.beta), _p(self.table.chunks), self.gate, _p(dAqk), _p(X), _p(dW), _p(dv), _p(dbeta_v), _p(dA),
             _i(c.H), _i(c.HV), _i(c.K), _i(c.V)],
            threads=4 * c.chunk,
        )  # fmt: skip

    def gradients(self, do: int) -> None:
        """dq, dk, dg, dbeta per value head; straight into the results where nothing is left to do."""
        c, inner, out = self.call, self.inner, self.out
        wide = (c.B, c.T, c.HV, c.K)
        to = dict.fromkeys(("dq", "dq_wide", "dk", "dk_wide", "dg", "dg_wide"), 0)
        for name in ("dq", "dk"):
            result = self.new(name, (c.B, c.T, c.H, c.K), c.dtype)
            if c.qk_l2norm or c.HV != c.H:
                to[f"{name}_wide"] = self.new(f"{name}_wide", wide, "float32")
            else:
                to[name] = result
        if c.gated:
            result = self.new("dg", wide, "float32" if c.g_float32 else c.dtype)
            if c.gate != "log":
                to["dg_wide"] = self.new("dg_wide", wide, "float32")
            else:
                to["dg_wide" if c.g_float32 else "dg"] = result
        dbeta = self.new("dbeta_wide", (c.B, c.T, c.HV), "float32")
        self.launch(
            "backward_intra", self.tile_arguments(do),
            c.chunks * c.HV, gradient_shared(c.dtype, c.chunk),
            [_p(self.q), _p(self.k), _p(self.beta), _p(inner["A"]), _p(out["dW"]), _p(do), _p(inner["Vnew"]),
             _p(inner["S"]), _p(out["dS"]), _p(out["dAqk"]), _p(out["X"]), _p(out["dbeta_v"]), _p(self.table.chunks),
             self.gate, *(_p(address) for address in to.values()), _p(dbeta), ctypes.c_float(c.scale),
             _i(c.H), _i(c.HV), _i(c.K), _i(c.V)],
            threads=4 * c.chunk,
        )  # fmt: skip

    def arguments(self) -> None:
        """Groups, norm, raw gate and sigmoid."""
        c, out = self.call, self.out
        kind = TYPES[c.dtype]
        tokens = ctypes.c_int64(c.tokens)
        # Dense batches use every token; packed ones end at offsets[N].
        offsets, N = _p(self.table.offsets), _i(c.N)
        for name, x in (("dq", c.q), ("dk", c.k)):
            if f"{name}_wide" in out:
                self.launch(
                    "backward_qk", kind, -(-c.tokens * c.H // 4), 0,
                    [_p(out[f"{name}_wide"]), _p(x), _p(out[name]), offsets, N, tokens, _i(c.H), _i(c.HV), _i(c.K),
                     _i(c.qk_l2norm)],
                )  # fmt: skip
        dbeta = self.new("dbeta", (c.B, c.T, c.HV), "float32" if c.beta_float32 else c.dtype)
        beta_kind = 0 if not c.beta_sigmoid else 2 if c.allow_neg_eigval else 1
        self.launch(
            "backward_beta", kind, -(-c.tokens * c.HV // 128), 0,
            [_p(out["dbeta_wide"]), _p(c.beta), _p(dbeta), offsets, N, tokens, _i(c.HV), _i(beta_kind),
             _i(c.beta_float32)],
        )  # fmt: skip
        if c.gate not in ("softplus", "bounded"):
            return
        tiles = -(-c.tokens // _GATE_TILE)
        bias_part = self.new("bias_part", (tiles, c.HV, c.K), "float32")
        log_part = self.new("log_part", (tiles, c.HV), "float32")
        self.launch(
            "backward_gate", kind, tiles * c.HV, 16,
            [_p(out["dg_wide"]), _p(out["dg"]), _p(c.g), _p(c.A_log), _p(c.dt_bias), ctypes.c_float(c.lower_bound),
             _i(GATES[c.gate]), _i(c.g_float32), offsets, N, tokens, _i(c.HV), _i(c.K), _p(bias_part), _p(log_part)],
        )  # fmt: skip
        for name, given, part, shape in (
            ("dA_log", c.A_log, log_part, (c.HV,)),
            ("ddt_bias", c.dt_bias, bias_part, (c.HV, c.K)),
        ):
            if given:
                columns = c.HV if len(shape) == 1 else c.HV * c.K
                self.launch(
                    "sum_tiles", "", -(-columns // 128), 0,
                    [_p(part), _p(self.new(name, shape, "float32")), ctypes.c_int64(tiles), ctypes.c_int64(columns)],
                )  # fmt: skip

    def clear(self, keep: Collection[str]) -> None:
        """Zero what no kernel wrote: results written chunk by chunk, and kept intermediates."""
        for name in ("dq", "dk", "dv", "dg", *keep):
            if name not in self.out or f"{name}_wide" in self.out:
                continue
            per_chunk = name == "dS"
            shape = self.shapes[name]
            rows, size = (shape[0] if per_chunk else self.call.T), BYTES[self.dtypes[name]]
            for extent in shape[1 if per_chunk else 2 :]:
                size *= extent
            index, ends = ("i32", self.table.first_chunk) if per_chunk else ("i64", self.table.offsets)
            self.launch(
                "clear_tail", index, min(256, max(1, rows * size // 4096)), 0,
                [_p(self.out[name]), ctypes.c_int64(size), _p(ends), _i(self.call.N), ctypes.c_int64(rows)],
            )  # fmt: skip
