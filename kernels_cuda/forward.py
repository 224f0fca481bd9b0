"""Launch plan of the forward: which kernels, with which tiles and buffers, over raw addresses.

    sequence_offsets, chunk_table   cu_seqlens -> table of chunks, on the device
    prepare                         per (chunk, value head): Aqk, U, W, Kg, Qg, exp gC (A, Gamma on request)
    chunk_state                     per (sequence, value head, slice of V): Vnew, S, O, ht
    clear_tail                      zeros in rows that belong to no sequence

Nothing is read back, so nothing waits. Budget at B,T,H = 1,8192,32, K = V = 128, bfloat16, float32 g, C = 64, on 132
multiprocessors, 4.3 TB/s and 1.755 GHz; bytes per token and value head, of which there are 262144:

    prepare       reads q k v g 1280 B, writes Aqk U W Kg Qg 1152 B: 2432 B, 148 us
    chunk_state   reads Aqk U W Kg Qg 1152 B, writes O 256 B: 1408 B, 86 us, and reads all but U once more from L2 for
                  each further slice of V; 128 dependent steps of two products, about 1200 clocks each: 90 us
    both          234 us of memory traffic, against 94 us for a kernel that keeps everything on chip
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kernels_cuda.modules import Backend

TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "float"}
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
GATES = {"none": 0, "log": 1, "softplus": 2, "bounded": 3}
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100": 227 * 1024, "sm_120": 99 * 1024}
"""Bytes of dynamic shared memory that one block may have."""
INTERMEDIATES = ("Gamma", "Aqk", "A", "U", "W", "Kg", "Qg", "Vnew", "S", "qn", "kn", "beta")

Allocate = Callable[[str, tuple[int, ...], str], int]
"""(name, shape, dtype) -> address of a new buffer, 16-byte aligned, that lives until the stream is done with it."""


@dataclass(frozen=True)
class Forward:
    """One forward call: sizes, flags and addresses of contiguous inputs (0 where absent).

    Attributes
    ----------
    dtype : of q, k, v and o: "float16" | "bfloat16" | "float32".
    B, T, H, HV, K, V : sizes as in `oracles.problem.Problem`; 1 <= K, V <= 256, HV % H == 0.
    N : sequences; B without cu_seqlens.
    chunk : 16, 32 or 64.
    scale : multiplies q.
    q, k, v, g, beta, A_log, dt_bias, h0, cu_seqlens : addresses. A_log, dt_bias and h0 are float32.
    g_float32, beta_float32 : whether g and beta are float32; otherwise they have `dtype`.
    offsets_int64 : whether cu_seqlens is int64; otherwise int32.
    gate, lower_bound, qk_l2norm, beta_sigmoid, allow_neg_eigval : as in `Problem`.
    state_v_first : h0 and ht are [N,HV,V,K].
    """

    dtype: str
    B: int
    T: int
    N: int
    H: int
    HV: int
    K: int
    V: int
    chunk: int
    scale: float
    q: int
    k: int
    v: int
    beta: int
    g: int = 0
    A_log: int = 0
    dt_bias: int = 0
    h0: int = 0
    cu_seqlens: int = 0
    g_float32: bool = True
    beta_float32: bool = True
    offsets_int64: bool = True
    gate: str = "log"
    lower_bound: float = 0.0
    qk_l2norm: bool = False
    beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False

    @property
    def chunks(self) -> int:
        """Number of chunks; with cu_seqlens an upper bound that needs no offset."""
        if self.cu_seqlens:
            return self.T // self.chunk + self.N
        return self.N * -(-self.T // self.chunk)

    @property
    def tokens(self) -> int:
        """Rows of q over the whole batch."""
        return self.B * self.T

    @property
    def KP(self) -> int:
        """K padded to a tile size."""
        return 64 if self.K <= 64 else 128 if self.K <= 128 else 256

    @property
    def gated(self) -> bool:
        """Whether there is a decay."""
        return self.gate != "none"

    def rows(self, name: str) -> tuple[int, ...]:
        """Shape of an output or intermediate; per token unless it is decay, S or ht."""
        per_token = {
            "o": (self.HV, self.V), "U": (self.HV, self.V), "Vnew": (self.HV, self.V),
            "W": (self.HV, self.K), "Kg": (self.HV, self.K), "Qg": (self.HV, self.K), "Gamma": (self.HV, self.K),
            "qn": (self.H, self.K), "kn": (self.H, self.K),
            "Aqk": (self.HV, self.chunk), "A": (self.HV, self.chunk), "beta": (self.HV,),
        }  # fmt: skip
        if name in per_token:
            return (self.B, self.T, *per_token[name])
        if name == "ht":
            return (self.N, self.HV, self.V, self.K) if self.state_v_first else (self.N, self.HV, self.K, self.V)
        return {"decay": (self.chunks, self.HV, self.K), "S": (self.chunks, self.HV, self.K, self.V)}[name]


@dataclass(frozen=True)
class Table:
    """Addresses of what layout.cu makes: offsets int64 [N+1], first_chunk int32 [N+1], chunks 16 bytes each."""

    offsets: int
    first_chunk: int
    chunks: int


def _p(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address or None)


def _i(value: int) -> ctypes.c_int32:
    return ctypes.c_int32(value)


def chunk_table(backend: Backend, call: Forward, allocate: Allocate, stream: int = 0) -> Table:
    """Build the table of chunks on the device.

    Parameters
    ----------
    allocate : is asked for "offsets", "first_chunk" and "chunks".
    """
    entries = max(1, call.chunks)
    table = Table(
        allocate("offsets", (call.N + 1,), "int64"),
        allocate("first_chunk", (call.N + 1,), "int32"),
        allocate("chunks", (entries, 2), "int64"),
    )
    backend.launch(
        "sequence_offsets", (1, 1, 1), 512, 512 * 8,
        [_p(call.cu_seqlens), _i(call.offsets_int64), ctypes.c_int64(call.T), _i(call.N), _i(call.chunk),
         _p(table.offsets), _p(table.first_chunk)], stream,
    )  # fmt: skip
    backend.launch(
        "chunk_table", (-(-entries // 128), 1, 1), 128, 0,
        [_p(table.offsets), _p(table.first_chunk), _i(call.N), _i(call.chunk), _i(entries), _p(table.chunks)], stream,
    )  # fmt: skip
    return table


def prepare(backend: Backend, call: Forward, table: Table, out: dict[str, int], stream: int = 0) -> None:
    """Launch prepare.cu.

    Parameters
    ----------
    out : addresses by name: Aqk, U, W and, with a gate, Kg, Qg, decay; optional A, Gamma, qn, kn, beta (Kg, Qg).
    """
    beta_kind = 0 if not call.beta_sigmoid else 2 if call.allow_neg_eigval else 1
    whole = whole_pieces(call, (call.q, call.k, call.v, *out.values())) and call.g % 16 == 0
    backend.launch(
        f"prepare<{TYPES[call.dtype]},{call.chunk},{GATES[call.gate]},{str(whole).lower()}>",
        (call.chunks * call.HV, 1, 1), 4 * call.chunk, prepare_shared(call.dtype, call.chunk, call.gated),
        [_p(call.q), _p(call.k), _p(call.v), _p(call.g), _i(call.g_float32), _p(call.beta), _i(call.beta_float32),
         _p(call.A_log), _p(call.dt_bias), ctypes.c_float(call.lower_bound), _i(beta_kind), _i(call.qk_l2norm),
         ctypes.c_float(call.scale), _p(table.chunks), _i(call.H), _i(call.HV), _i(call.K), _i(call.V),
         *(_p(out.get(name, 0)) for name in ("Aqk", "U", "W", "Kg", "Qg", "decay", "A", "Gamma", "qn", "kn", "beta"))],
        stream,
    )  # fmt: skip


def chunk_state(
    backend: Backend,
    call: Forward,
    table: Table,
    out: dict[str, int],
    *,
    shared_limit: int,
    processors: int,
    stream: int = 0,
) -> None:
    """Launch state.cu on what `prepare` left in `out`.

    Parameters
    ----------
    out : also takes addresses of the results, each optional: o, Vnew, S, ht.
    shared_limit : bytes of shared memory that a block may have.
    processors : multiprocessors that should all get work.
    """
    plain = not call.gated
    Kg, Qg = (out.get("kn") or call.k, out.get("qn") or call.q) if plain else (out["Kg"], out["Qg"])
    BV, R, warps = state_tiles(call, shared_limit, processors)
    whole = whole_pieces(call, (Kg, Qg, *out.values()))
    flags = ",".join(str(flag).lower() for flag in (call.gated, bool(out.get("o")), whole))
    backend.launch(
        f"chunk_state<{TYPES[call.dtype]},{call.chunk},{call.KP},{BV},{R},{warps},{flags}>",
        (call.N * call.HV * -(-call.V // BV), 1, 1), 32 * warps,
        state_shared(call.dtype, call.chunk, call.KP, BV, R),
        [_p(out["W"]), _p(out["U"]), _p(Kg), _p(Qg), _p(out["Aqk"]), _p(out.get("decay", 0)), _p(call.h0),
         _p(table.chunks), _p(table.first_chunk), _i(call.H if plain else call.HV), _i(call.HV), _i(call.K), _i(call.V),
         ctypes.c_float(call.scale if plain else 1.0), _i(call.state_v_first),
         *(_p(out.get(name, 0)) for name in ("o", "Vnew", "S", "ht"))],
        stream,
    )  # fmt: skip


def whole_pieces(call: Forward, addresses: Iterable[int]) -> bool:
    """Whether every row is a whole number of aligned 16-byte pieces."""
    size = BYTES[call.dtype]
    return call.K * size % 16 == 0 and call.V * size % 16 == 0 and all(address % 16 == 0 for address in addresses)


def clear_tail(
    backend: Backend, call: Forward, table: Table, name: str, address: int, dtype: str, stream: int = 0
) -> None:
    """Zero the rows of a buffer that lie after the last token, or for S after the last chunk."""
    size = BYTES[dtype]
    for extent in call.rows(name)[1 if name == "S" else 2 :]:
        size *= extent
    index, ends, total = ("i32", table.first_chunk, call.chunks) if name == "S" else ("i64", table.offsets, call.T)
    backend.launch(
        f"clear_tail<{index}>", (min(256, max(1, total * size // 4096)), 1, 1), 128, 0,
        [_p(address), ctypes.c_int64(size), _p(ends), _i(call.N), ctypes.c_int64(total)], stream,
    )  # fmt: skip


def forward(
    backend: Backend,
    call: Forward,
    allocate: Allocate,
    *,
    keep: Collection[str] = (),
    final_state: bool = True,
    shared_limit: int = 227 * 1024,
    processors: int = 132,
    stream: int = 0,
) -> tuple[dict[str, int], Table]:
    """Run the forward.

    Parameters
    ----------
    backend : from `kernels_cuda.modules.load`.
    allocate : is asked for every buffer by name; "o" and "ht" are the results.
    keep : names in INTERMEDIATES that must be complete when this returns: written in every row, zero in rows of no
        sequence. Layouts: Gamma (log2 units), W, Kg, Qg (with scale) [B,T,HV,K]; U, Vnew [B,T,HV,V]; Aqk (with scale),
        A [B,T,HV,chunk]; S [chunks,HV,K,V], the state before each chunk; qn, kn [B,T,H,K]; beta [B,T,HV] float32.
    final_state : whether ht is computed.
    shared_limit, processors : of the device.
    stream : address of the CUDA stream.

    Returns
    -------
    addresses by name, and the table of chunks.

    Raises
    ------
    ValueError
        If a size is beyond what the kernels address, or a name in `keep` is unknown.
    """
    unknown = sorted(set(keep) - set(INTERMEDIATES))
    if unknown:
        raise ValueError(f"keep names {', '.join(unknown)}; known: {', '.join(INTERMEDIATES)}")
    state_tiles(call, shared_limit, processors)
    blocks = call.HV * max(call.chunks, call.N * -(-call.V // 16))
    if blocks >= 2**31:
        sizes = f"T={call.T}, N={call.N}, HV={call.HV}, V={call.V}"
        raise ValueError(f"{sizes} need {blocks} blocks; at most 2**31 - 1, so split the batch or the heads")
    norm = ("qn", "kn") if call.qk_l2norm and not call.gated else ()
    per_chunk = ("Aqk", "U", "W", *(("Kg", "Qg", "decay") if call.gated else norm))
    absent = {*(() if call.gated else ("Gamma",)), *(() if call.qk_l2norm else ("qn", "kn"))}
    results = ("o", "ht") if final_state else ("o",)
    wanted = [name for name in dict.fromkeys((*per_chunk, *keep, *results)) if name not in absent]
    dtypes = {name: "float32" if name in ("Gamma", "beta", "decay", "ht") else call.dtype for name in wanted}
    out = {name: allocate(name, call.rows(name), dtypes[name]) for name in wanted}
    table = chunk_table(backend, call, allocate, stream)
    prepare(backend, call, table, out, stream)
    chunk_state(backend, call, table, out, shared_limit=shared_limit, processors=processors, stream=stream)
    if call.cu_seqlens:
        for name in wanted:
            if name == "o" or name in keep:
                clear_tail(backend, call, table, name, out[name], dtypes[name], stream)
    return out, table


def _slices(dtype: str, KP: int) -> tuple[int, int]:
    KS = 128 if dtype != "float32" and KP == 128 else 64
    return KS, KP // KS


def prepare_shared(dtype: str, chunk: int, gated: bool) -> int:
    """Bytes of PrepareShape in prepare.cu."""
    size, wide = BYTES[dtype], dtype == "float32"
    operands = 3 * chunk * (64 * 4 + 16) if gated else 2 * chunk * (64 * size + 16)
    own = chunk * ((16 if wide else 32) + 16 // size) * size
    return max(operands, 8 * chunk * (chunk + 8) + chunk // 8 * own) + 64 * chunk + 3 * chunk * 4


def state_shared(dtype: str, chunk: int, KP: int, BV: int, R: int) -> int:
    """Bytes of StateShape in state.cu."""
    KS, _ = _slices(dtype, KP)
    pad = 16 // BYTES[dtype]
    elements = R * 2 * chunk * (KS + pad) + 4 * chunk * (BV + pad) + KP * (BV + pad)
    return BYTES[dtype] * elements


def state_tiles(call: Forward, shared_limit: int, processors: int) -> tuple[int, int, int]:
    """Columns of V per block, buffers of the ring, and warps.

    Wide slices read W, Kg and Qg fewer times; narrow ones fill the device when there are few heads. One step of a
    block takes `step`, as measured on an H200 at K = 128 in bfloat16 (16 wide: guessed), and blocks run in waves.
    """
    step = {16: 0.85, 32: 1.0, 64: 1.35, 128: 1.9}
    widest = 128 if call.dtype != "float32" and call.KP <= 128 else 32 if call.KP == 256 else 64
    widths = [BV for BV in step if 512 // call.chunk <= BV <= widest]

    def time(BV: int) -> float:
        return step[BV] * -(-call.N * call.HV * -(-call.V // BV) // processors)

    narrowest = min(widths)
    for BV in sorted(widths, key=time):
        for R in (3, 2, 1) if narrowest == BV else (3, 2):
            if state_shared(call.dtype, call.chunk, call.KP, BV, R) <= shared_limit:
                return BV, R, 8 if BV == 128 else 4
    raise ValueError(f"chunk {call.chunk} with K={call.K} needs more than {shared_limit} bytes of shared memory")
