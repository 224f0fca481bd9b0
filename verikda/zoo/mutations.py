"""Faults planted in the CUDA sources: each one changes a line or two, and everything else is compiled as shipped.

A mutation never reads or writes outside the tensors, so that it can be searched in the process of the search.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from verikda.case import Case

Edit = tuple[str, str, str]
"""File of kernels_cuda, its right text, and the wrong one."""


@dataclass(frozen=True)
class Mutation:
    """One planted fault.

    Attributes
    ----------
    place : part of the algorithm.
    what : what the changed kernels do wrong.
    edits : the changes.
    shown_by : a call that shows it.
    kills : names of the checks that see it there.
    modelled_on : public reports of the kind.
    regime : calls that show it, in words.
    races : the result depends on which thread runs first, so that calls in turn run threads in other orders (on the
        CPU, where the order can be chosen).
    """

    place: str
    what: str
    edits: tuple[Edit, ...]
    shown_by: Case
    kills: tuple[str, ...] = ("floor",)
    modelled_on: tuple[str, ...] = ()
    regime: str = "any"
    races: bool = False


def _one(
    place: str, what: str, edit: Edit, shown_by: Case, kills: tuple[str, ...] = ("floor",),
    modelled_on: tuple[str, ...] = (), regime: str = "any", races: bool = False,
) -> Mutation:  # fmt: skip
    return Mutation(place, what, (edit,), shown_by, kills, modelled_on, regime, races)


USUAL = Case(
    lengths=(100,), K=64, V=24, dtype="bfloat16", h0="random", dht=True, gate_magnitude=0.05, key_regime="collinear",
    seed=5,
)  # fmt: skip
PACK = Case(
    lengths=(70, 0, 33), packed=True, tail_padding=5, heads=2, groups=2, K=32, V=24, dtype="bfloat16", h0="random",
    dht=True, gate_magnitude=0.05, seed=6,
)  # fmt: skip
SOFTPLUS = replace(PACK, gate_in_kernel=True, A_log=True, dt_bias=True, qk_l2norm=True, beta_sigmoid=True)
FLOAT = replace(USUAL, dtype="float32")
_LATER = "(s < 8 ? exp(fall[7][0]) : 1.f)"  # in float calls, which keep sums of decays
_DW = "        warp_mma<T, 16, Q_, 64, NT>(acc_a, x2"
_LOWER = "    for_each_acc(acc_a, [&](int r, int col, float& x) { x = sq + col < at.row + r ? x : 0.f; });\n"
_ROWS = "c.rows = i32(min(i64(C), offsets[low + 1] - c.token))"
_ELEMENT = "(v_first ? e * K + d : d * V + e)"

MUTATIONS: dict[str, Mutation] = {
    # gates and decays
    "CUDA_BLOCK_BETWEEN": _one(
        "decay", "the decay of the row blocks between two blocks is left out of Aqk and L",
        ("prepare.cu", "to_operand<T>(exp_decay<T>(after[j]))", "to_operand<T>(1.f)"), USUAL,
        regime="more than 32 tokens"),
    "CUDA_TOTAL_OF_NEIGHBOUR": _one(
        "decay", "a row group's total decay is taken from the neighbouring channel",
        ("prepare.cu", "to[0] = sum[0];", "to[0] = sum[1];"), USUAL),
    "CUDA_ANCHOR_LATER": Mutation(
        "anchor", "differences of decays are split at a row of the future: values stay right, bits follow later tokens",
        (("intra.cuh", " row * ld, q[i], x.value(),", f" row * ld, q[i], x.value() / {_LATER},"),
         ("intra.cuh", "8) * ld, k[i], x.value(),", f"8) * ld, k[i], x.value() / {_LATER},"),
         ("intra.cuh", "16) * ld, k[i], x.value(),", f"16) * ld, k[i], x.value() * {_LATER},")),
        replace(FLOAT, lengths=(20,)), ("prefix",), ("fla #1240",), "float32"),
    "CUDA_RESET_IS_NAN": _one(
        "decay", "a hard reset stays -inf: differences of sums of decays are NaN",
        ("gate.cuh", "return g < strongest_log<T> ? strongest_log<T> : g;", "return g;"),
        replace(USUAL, gate_regime="reset"), modelled_on=("executorch #21417",), regime="g = -inf"),
    "CUDA_DECAY_CLAMPED": _one(
        "decay", "decays are cut at e^-5 per token, as safe gates promise, whatever was promised",
        ("gate.cuh", "constexpr float strongest_decay = -152.f;", "constexpr float strongest_decay = -7.2134752f;"),
        replace(USUAL, gate_magnitude=20.0), regime="gates below -5"),
    "CUDA_PADDING_DECAYS": _one(
        "decay", "rows beyond the sequence decay the state: the gate of 0 is not 0",
        ("prepare.cu", "x.fall[i][0] = i < live ?", "x.fall[i][0] = count > 0 ?"), SOFTPLUS,
        modelled_on=("cuLA #38",), regime="gate in the kernel, a ragged last chunk"),
    # Aqk, L and the inverse
    "CUDA_DIAGONAL_OF_AQK": _one(
        "mask", "a token does not see its own write",
        ("prepare.cu", "products.diagonal += sum_lanes(dot)", "products.diagonal += 0.f * sum_lanes(dot)"), USUAL),
    "CUDA_L_WITHOUT_BETA": _one(
        "rule", "rows of L are not multiplied by beta where they are stored in pairs",
        ("prepare.cu", "pair32{sbeta[i] * x, sbeta[i] * y}", "pair32{x, y}"), USUAL, regime="more than 16 tokens"),
    "CUDA_INVERSE_ONE_TERM": _one(
        "inverse", "blocks of the inverse keep the first term of their sum only",
        ("inverse.cuh", "for (int e = 0; e < d; ++e)", "for (int e = 0; e < 1; ++e)"), USUAL,
        regime="more than 32 tokens, keys alike"),
    "CUDA_INVERSE_SIGN": _one(
        "inverse", "substitution adds where it must subtract",
        ("inverse.cuh", "odd = fma(-as_float(four.w[e])", "odd = fma(as_float(four.w[e])"), USUAL),
    "CUDA_OPERANDS_OF_BFLOAT16": _one(
        "early rounding", "decayed rows of float16 calls keep bfloat16's digits",
        ("intra.cuh", "pair32{u.x * x, u.y * y}",
         "pair32{to_float(from_float<bf16>(u.x * x)), to_float(from_float<bf16>(u.y * y))}"),
        Case(lengths=(100, 63, 2, 100, 31), packed=True, heads=2, groups=3, K=32, V=3, dtype="float16",
             gate_magnitude=0.3, key_regime="zero_rows", query_regime="one_large_row", beta_regime="binary",
             beta_sigmoid=True, value_regime="ints", h0="zero", seed=230038253),
        modelled_on=("fla #646",), regime="float16; most inputs hide it"),
    "CUDA_BETA_IN_A": Mutation(
        "early rounding", "A diag(beta) is rounded as one, while the backward takes A",
        (("prepare.cu", "st128(sAt + i * lda + j, x);",
          "float ab[vec<T>]; for (int e = 0; e < vec<T>; ++e) ab[e] = a[e] * sbeta[j + e]; "
          "st128(sAt + i * lda + j, pack<T>(ab));"),
         ("prepare.cu", "y[i] *= sbeta[r];", "y[i] *= 1.f;"),
         ("prepare.cu", "b * (k0 * e0), b * (k1 * e1)", "k0 * e0, k1 * e1"),
         ("prepare.cu", "round_pair<T>(b * w.x, b * w.y)", "round_pair<T>(w.x, w.y)")),
        Case(lengths=(8,), heads=4, K=3, V=24, dtype="bfloat16", beta_dtype="same", chunk_size=16, gate_magnitude=2.0,
             gate_in_kernel=True, lower_bound=-5.0, key_regime="zero_rows", query_regime="one_large_row",
             value_regime="ints", do_regime="ints", beta_sigmoid=True, allow_neg_eigval=True, seed=246),
        regime="beta of the sigmoid, few keys"),
    "CUDA_VALUES_OF_ONE_ROUNDING": Mutation(
        "early rounding", "dA has beta V unrounded, where U has it rounded: their errors no longer cancel in dg",
        (("backward_local.cu", "scale_rows(at.thread, sv);", ""),
         ("backward_local.cu", "store_fragment<float>(dAqk",
          "for_each_acc(acc_a, [&](int, int col, float& y) { y *= sb[sq + col]; }); store_fragment<float>(dAqk")),
        Case(lengths=(2, 1, 1, 2), packed=True, K=2, V=8, dtype="float16", g_dtype="same", chunk_size=16,
             query_regime="keys", value_regime="constant", do_regime="ints", gate_magnitude=2.0, seed=1),
        regime="16-bit, queries like keys, equal values"),
    "CUDA_DECAY_FROM_SUMS": _one(
        "early rounding", "float calls take the decay of one token as a difference of sums, whose digits are gone",
        ("backward_common.cuh", "if (alone) alone[i * ld] = log;",
         "if (alone) alone[i * ld] = i ? sum - column[(i - 1) * ld] : sum;"),
        Case(lengths=(7,), K=2, gate_regime="reset", key_regime="sparse_int", beta_regime="binary",
             value_regime="ints"),
        regime="float32, a weak gate after a strong one"),
    # norms and strengths
    "CUDA_NORM_WITHOUT_EPS": _one(
        "norm", "no epsilon in the norm of keys: a row of zeros is NaN",
        ("gate.cuh", "constexpr float norm_eps = 1e-6f;", "constexpr float norm_eps = 0.f;"),
        replace(SOFTPLUS, key_regime="zero_rows"), modelled_on=("maxtext #5295",), regime="qk_l2norm, a key of zeros"),
    "CUDA_NORM_GRADIENT": _one(
        "norm", "the gradient through the norm lacks its projection",
        ("backward_gate.cu", "inverse * dot) * inverse", "inverse * 0.f) * inverse"), SOFTPLUS, regime="qk_l2norm"),
    "CUDA_SIGMOID_GRADIENT": _one(
        "beta", "the gradient of sigmoid is s instead of s (1 - s)",
        ("backward_gate.cu", "y *= sigmoid(a) * sigmoid(-a)", "y *= sigmoid(a)"), SOFTPLUS, regime="beta_sigmoid"),
    "CUDA_TWICE_FORGOTTEN": _one(
        "beta", "the gradient of 2 sigmoid lacks its 2",
        ("backward_gate.cu", "(kind == beta_twice_sigmoid ? 2.f : 1.f)", "1.f"),
        replace(SOFTPLUS, allow_neg_eigval=True), regime="allow_neg_eigval"),
    "CUDA_A_LOG_FIRST_TILE": _one(
        "gate gradient", "sums over tokens stop after the first 64",
        ("backward_gate.cu", "for (i64 t = 0; t < tiles; ++t)", "for (i64 t = 0; t < min(tiles, 1ll); ++t)"), SOFTPLUS,
        regime="A_log or dt_bias, more than 64 tokens"),
    "CUDA_GROUP_SUM": _one(
        "grouping", "gradients of q and k of the first value head of a group only",
        ("backward_gate.cu", "for (int g = 0; g < group; ++g) dy +=", "for (int g = 0; g < 1; ++g) dy +="), PACK,
        modelled_on=("flash-linear-attention-npu #106",), regime="grouped values"),
    "CUDA_GROUP_MAP": _one(
        "grouping", "value head i reads query head i mod H in place of i / group",
        ("prepare.cu", "head / share * K", "head % H * K"), PACK, ("floor", "grouped_repeated"),
        ("fla #624",), "grouped values, more than one query head"),
    # the scan
    "CUDA_STATE_NOT_DECAYED": _one(
        "state", "the state keeps its size from chunk to chunk",
        ("state.cu", "fma(x, fall[s][m][i / 2], gain", "fma(x, 1.f, gain"), USUAL, regime="more than one chunk"),
    "CUDA_STATE_TRANSPOSED": _one(
        "state", "[V,K] states are read and written as [K,V]",
        ("state.cu", _ELEMENT, "d * V + e"), replace(USUAL, state_v_first=True), ("floor",),
        ("vllm #41292",), "state_v_first, K != V or a state that is not symmetric"),
    "CUDA_STATE_OFFSET_16": _one(
        "int32 offset", "an offset is kept in 16 bits: the fault of 32 bits at a size that a CPU reaches",
        ("state.cu", "const i64 atV = startV + i64(step) * C * strideV;",
         "const i64 atV = startV + u16(i64(step) * C * strideV);"),
        Case(lengths=(130,), heads=2, groups=4, K=16, V=64, dtype="bfloat16", seed=7),
        modelled_on=("fla #1080",), regime="more than 65,536 elements of a sequence"),
    "CUDA_HT_OF_EMPTY": _one(
        "unwritten output", "the final state of an empty sequence is never written",
        ("state.cu", "    if (ht)\n", "    if (ht && count > 0)\n"), PACK, ("floor", "empty_passthrough"),
        ("FlashKDA #24",), "an empty sequence"),
    "CUDA_OUTPUT_MASK_LATE": _one(
        "dropped term", "the last 16 columns of Aqk that a row block needs are left out",
        ("state.cu", "for (int k = 0; k <= r0; k += 16)", "for (int k = 0; k < r0; k += 16)"), USUAL),
    "CUDA_MISSING_WAIT": _one(
        "missing wait", "tiles are read before their copies have landed",
        ("state.cu", "cp_async_wait<R - 2>();", "cp_async_wait<R - 1>();"), USUAL, modelled_on=("FlashKDA #24",)),
    # packing
    "CUDA_TAIL_ROW_LOST": _one(
        "tail", "the last token of a ragged last chunk is left out",
        ("layout.cu", _ROWS, f"{_ROWS}; c.rows -= c.rows % 16 == 4"), replace(PACK, lengths=(68, 0, 33)),
        modelled_on=("cuLA #43",), regime="tails of 4, 20, 36 or 52 tokens"),
    "CUDA_OFFSETS_AS_INT32": _one(
        "packing", "64-bit offsets are read as 32-bit ones",
        ("layout.cu", "const i64 x = is_64bit ?", "const i64 x = is_64bit > 1 ?"), PACK, regime="int64 cu_seqlens"),
    "CUDA_PADDING_UNWRITTEN": _one(
        "unwritten output", "rows after the last offset are never written",
        ("layout.cu", "end = total * row_bytes, step", "end = 0 * total, step"),
        PACK, ("padding_rows",), ("fla #1070",), "rows after the last offset"),
    # backward
    "CUDA_DS_NOT_DECAYED": _one(
        "state gradient", "the gradient of the state keeps its size from chunk to chunk",
        ("backward_state.cu", "fma(x, fall[16 * m + frag_row(lane(), i)]", "fma(x, 1.f"), USUAL),
    "CUDA_DS_SIGN": _one(
        "state gradient", "W^T dU is added in place of subtracted",
        ("backward_state.cu", "add(dS[s], change, -1.f);", "add(dS[s], change, 1.f);"), USUAL),
    "CUDA_DHT_IGNORED": _one(
        "state gradient", "the gradient of the final state is not read",
        ("backward_state.cu", "if (dht) move", "if (dht && K < 0) move"), USUAL, ("floor", "adjoint"),
        regime="dht given"),
    "CUDA_DH0_OF_EMPTY": _one(
        "unwritten output", "dh0 of an empty sequence is never written",
        ("backward_state.cu", "if (dh0) move", "if (dh0 && count > 0) move"), PACK, ("floor", "empty_passthrough"),
        ("fla #103",), "an empty sequence with an initial state"),
    "CUDA_DU_FROM_OUTPUT": _one(
        "dropped term", "dU lacks the output's part of its own row block",
        ("backward_state.cu", "if (i >= r0)", "if (i > r0)"), USUAL),
    "CUDA_DA_WITHOUT_W": _one(
        "dropped term", "dA lacks its part from W",
        ("backward_local.cu", _DW + " + at.row * ld, ld, x3 + at.square_column * ld, ld, l);\n", ""), USUAL),
    "CUDA_X_SIGN": _one(
        "sign", "the gradient of L has the wrong sign",
        ("backward_local.cu", "at.row + r ? -x : 0.f", "at.row + r ? x : 0.f"), USUAL),
    "CUDA_UNNEEDED_INFINITY": _one(
        "mask", "what X does not need of A^T dA stays in its operand: infinite in float16, and infinity times 0 is NaN",
        ("backward_local.cu", _LOWER + "    store_acc<T>(x1", "    store_acc<T>(x1"),
        Case(lengths=(3,), heads=4, K=8, V=32, dtype="float16", chunk_size=16, gate_regime="tiny_steps",
             gate_magnitude=3.0, key_regime="collinear", beta_regime="up_to_two", do_regime="ints", v_exponent=4,
             do_exponent=3, h0="large", dht=True, seed=8388609), regime="float16, numbers just below its largest"),
    "CUDA_MISSING_BARRIER": _one(
        "missing barrier", "dW is read by warps that did not wait for those who write it",
        ("backward_local.cu", "        sync();\n" + _DW, _DW), USUAL, ("repeat",), ("aiter #4523",), races=True),
    "CUDA_BLOCKS_BETWEEN_BACKWARD": _one(
        "decay", "gradients pass the row blocks between without their decay",
        ("backward_wide.cuh", "acc[e][0][n][i] *= i % 2 ? fall.y : fall.x;",
         "acc[e][0][n][i] *= fall.x > 2.f ? 2.f : 1.f;"), USUAL, regime="more than 32 tokens"),
    "CUDA_DIAGONAL_OF_DK": _one(
        "dropped term", "dk lacks a token's own part of Aqk",
        ("backward_intra.cu", "fma(diagonal, scale * Qc[j], aK[0][n][i + j] + right)", "aK[0][n][i + j] + right"),
        USUAL),
    "CUDA_DG_WITHOUT_STATE": _one(
        "gate gradient", "dg lacks rowsum(S dS) exp gC",
        ("backward_common.cuh", "after = carried[tid()]", "after = 0.f * carried[tid()]"), USUAL,
        modelled_on=("fla #640",), regime="a state across chunks"),
    "CUDA_DG_SIGN": _one(
        "gate gradient", "the part of later rows enters dg with the sign of that of earlier ones",
        ("backward_intra.cu", "(left - right) * Kc[j]", "(left + right) * Kc[j]"), USUAL),
    "CUDA_DBETA_INTRA": _one(
        "beta", "dbeta lacks the part of L",
        ("backward_intra.cu", "db[i / 2] = fma(dK, Kc[j], db[i / 2]);", ""), USUAL),
}  # fmt: skip
"""By name."""
