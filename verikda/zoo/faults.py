"""Faults that can be switched on in the zoo's chunked implementation, one enum member each.

Every fault is one small condition at the place where the kind of fault lives. `modelled_on` cites public reports of
the kind; `kills` names the checks that are expected to see it, in `regime`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True)
class FaultInfo:
    """What is planted.

    Attributes
    ----------
    place : part of the algorithm.
    what : what the implementation does wrong.
    modelled_on : public reports of the kind.
    regime : calls that show it.
    kills : names of the checks that see it, each on some call of the regime.
    """

    place: str
    what: str
    modelled_on: tuple[str, ...] = ()
    regime: str = "any"
    kills: tuple[str, ...] = ("floor",)


@dataclass
class History:
    """What faults that reach from one call into the next remember."""

    calls: Counter[str] = field(default_factory=Counter)
    dtype: str = ""
    offsets: dict[int, list[int]] = field(default_factory=dict)


HISTORY = History()


def forget() -> None:
    """Start over, as a fresh process would."""
    HISTORY.calls.clear()
    HISTORY.dtype = ""
    HISTORY.offsets.clear()


_I = FaultInfo


class Fault(Enum):
    """One planted fault; its value says what and where."""

    NONE = _I("none", "healthy", kills=())

    # The rule
    RULE_RESIDUAL_UNDECAYED = _I("rule", "residual v - S^T k from the state before its decay", ("fla #623",))
    RULE_DECAY_AFTER_UPDATE = _I("rule", "state decayed after the update instead of before")
    RULE_OUTPUT_BEFORE_UPDATE = _I("rule", "output read from the state before decay and update")
    RULE_BETA_ON_COLUMNS = _I("rule", "L diag(beta) in place of diag(beta) L", regime="two tokens with unequal beta")
    RULE_BETA_MISSING_IN_W = _I("rule", "W = A exp(Gamma) K without beta", regime="a state before the chunk")
    RULE_BETA_TWICE = _I("rule", "beta^2 in U and W")
    RULE_WRITES_NOT_DECAYED = _I("rule", "Kg = K: a write keeps its size to the end of the chunk")
    RULE_UNGATED_LINEAR = _I("rule", "no error term when g is absent (linear attention)", ("fla #623",), "rule delta")

    # Masks
    MASK_AQK_STRICT = _I(
        "mask", "Aqk with M1 in place of M: a token does not see its own write", kills=("floor", "integers")
    )
    MASK_AQK_FUTURE = _I("mask", "Aqk reaches one token into the future", ("fla #1240",), kills=("floor", "prefix"))
    MASK_L_INCLUSIVE = _I("mask", "L with M in place of M1")
    MASK_L_SKIPS_NEIGHBOUR = _I("mask", "L starts two tokens back", regime="neighbouring keys not orthogonal")
    MASK_AFTER_EXP = _I(
        "mask",
        "exp of the whole square, then the mask: 0 * inf",
        ("fla #99", "fla #111", "fla #649"),
        "a chunk spans > 88 nats",
    )
    MASK_AFTER_EXP_BACKWARD = _I(
        "mask", "backward: exp of the whole square, then the mask", ("transformers #48455",), "a chunk spans > 88 nats"
    )

    # Anchors of the decay between two rows
    ANCHOR_CHUNK_START = _I(
        "anchor",
        "exp(Gamma_i - Gamma_0) exp(Gamma_0 - Gamma_j)",
        ("TIRx-kernels #214", "flash-linear-attention-npu #448", "flashinfer #5032", "attention-gym #394"),
        "a chunk spans > 88 nats",
    )
    ANCHOR_MID = _I(
        "anchor",
        "exp(Gamma_i - Gamma_m) exp(Gamma_m - Gamma_j), m the middle row",
        ("cudnn-frontend #1017",),
        "gates at -5, chunk 64",
    )
    ANCHOR_CLAMPED = _I(
        "anchor", "the growing factor clamped at exp(60)", ("cudnn-frontend #1017",), "a chunk spans > 60 nats"
    )
    ANCHOR_FUTURE = _I(
        "anchor",
        "16-row blocks anchored at row min(8, T-i-1)",
        ("fla #1240", "attention-gym #337"),
        "prefix ends in a block",
        kills=("prefix", "length"),
    )
    ANCHOR_OF_HEAD_0 = _I(
        "anchor",
        "one factor takes the anchor row of head 0",
        ("fla #1085",),
        "two heads, unlike gates",
        ("floor", "permute_heads"),
    )

    # Cumulative sums
    CUMSUM_EXCLUSIVE = _I("cumsum", "Gamma leaves out a row's own gate")
    CUMSUM_ACROSS_CHUNKS = _I("cumsum", "Gamma is not restarted at a chunk", regime="two chunks")
    CUMSUM_PER_16 = _I(
        "cumsum",
        "Gamma restarts at every 16 rows of a longer chunk",
        regime="T > 16, chunk 32 or 64",
        kills=("floor", "chunk_sizes"),
    )
    CUMSUM_TOTAL_MINUS_PREFIX = _I(
        "cumsum", "suffix sum of dGamma as total minus prefix", (), "do large early and small late", kills=("prefix",)
    )

    # Tails
    TAIL_GLAST_FROM_PADDING = _I(
        "tail", "gC read from row C-1, which holds no token", ("cuLA #38",), "T % C > 0 with gates"
    )
    TAIL_ROWS_UNMASKED = _I(
        "tail", "rows behind the last token repeat it", ("cuLA #16", "fla #792", "transformers #46190"), "T % C > 0"
    )
    TAIL_SKIPPED = _I("tail", "partial last chunk not computed when T > C", (), "T > C, T % C > 0")
    TAIL_SHORT_SEQUENCE = _I("tail", "T < C: output without h0", ("ATOM #1750",), "T < C with h0")
    TAIL_OF_17 = _I("tail", "tail of 17 rows: gC taken from row 15", ("flashinfer #4311",), "T % C = 17")
    # 2.2e-3 is about half a spacing of bfloat16, and 8 of a block's 63 rows are off: alone that is 0.3 noise floors in
    # bfloat16 and 1.6 in float16, no more than honest rounding, but over 2000 in float32. Only relations on bits see it
    # in 16-bit types: the same rows in a longer call are others.
    TAIL_OF_63_ROW_REMAP = _I(
        "tail",
        "63 rows: state part of rows 4..11 off by 2.2e-3",
        ("aiter #4523",),
        "T = 63 with h0; by value in float32 only",
        kills=("floor", "length", "integers"),
    )
    TAIL_OF_13_LAST_TOKEN = _I("tail", "tail of 13 rows: last token's output without its chunk", (), "T % C = 13")

    # Packs
    PACK_STATE_LEAKS = _I(
        "pack",
        "a sequence starts from the last one's final state",
        ("slime #1686", "transformers #46851", "vllm #51483"),
        "two sequences",
        kills=("floor", "packed_separate", "permute_batch"),
    )
    PACK_GRID_NOT_RESTARTED = _I(
        "pack",
        "chunks start at multiples of C of the pack, not of the sequence",
        ("FlashQLA #23",),
        "first length % C > 0",
        kills=("packed_separate", "permute_batch"),
    )
    PACK_EMPTY_RESETS = _I(
        "pack",
        "final state of an empty sequence is 0",
        ("FlashKDA #24", "fla #103"),
        "an empty sequence with h0",
        ("floor", "empty_passthrough"),
    )
    PACK_EMPTY_UNWRITTEN = _I(
        "pack",
        "final state of an empty sequence is never written",
        ("FlashKDA #24",),
        "an empty sequence",
        ("floor", "empty_passthrough"),
    )
    PACK_EMPTY_SHIFTS_SLOTS = _I(
        "pack",
        "empty sequences do not count in the state index",
        ("fla #103",),
        "an empty sequence before another",
        ("floor", "empty_passthrough"),
    )
    PACK_EMPTY_DH0 = _I(
        "pack",
        "dh0 of an empty sequence is 0 instead of dht",
        (),
        "an empty sequence with dht",
        ("floor", "empty_passthrough"),
    )
    PACK_AFTER_EMPTY = _I("pack", "the sequence after an empty one loses h0", (), "an empty sequence before another")
    PACK_ROWS_BEHIND_STALE = _I(
        "pack",
        "rows behind the last offset are not zeroed",
        ("FlashQLA #28", "fla #1070"),
        "tail padding",
        ("floor", "padding_rows"),
    )
    PACK_OFFSETS_CACHED = _I(
        "pack",
        "offsets of the first call with as many sequences are used again",
        ("FlashQLA #23",),
        "two calls, unlike offsets",
        kills=("call_order",),
    )
    PACK_LENGTHS_EVEN = _I(
        "pack", "odd lengths lose their last token", ("Megatron-LM #111",), "an odd length in a pack"
    )
    PACK_MANY_SEQUENCES = _I(
        "pack",
        "sequence n reads h0 of n % 32",
        ("fla #1077",),
        "more than 32 sequences",
        kills=("floor", "packed_separate"),
    )

    # The state
    STATE_TRANSPOSED = _I("state", "final state stored transposed", ("vllm #41292",))
    STATE_LAST_DECAY_MISSING = _I("state", "final state without the last chunk's decay", (), "T > C or h0")
    STATE_H0_IGNORED = _I("state", "initial state never read", ("sparkinfer #1071",), "h0", ("floor", "split_aligned"))
    STATE_H0_FIRST_CHUNK_ONLY = _I("state", "initial state lost after the first chunk", (), "h0")
    STATE_CARRY_DROPPED = _I(
        "state", "each chunk forgets the state before it", ("tt-metal #54962",), "two chunks or h0"
    )
    STATE_SLOT_ZERO = _I("state", "every sequence reads h0 of slot 0", ("vllm #39273",), "two sequences with h0")
    STATE_WINDOW_RESTARTS = _I(
        "state",
        "state restarts at every 512 tokens",
        ("sparkinfer #1071", "vllm #52909"),
        "T > 512",
        kills=("floor", "split_aligned"),
    )
    STATE_IN_BF16 = _I(
        "state", "running state rounded to bfloat16 between chunks", (), "slow gates", kills=("floor", "split_aligned")
    )
    STATE_V_FIRST_NOT_READ = _I(
        "state",
        "state_v_first ignored when h0 is read",
        ("vllm #40956",),
        "state_v_first with h0",
        ("floor", "v_first"),
    )
    STATE_V_FIRST_NOT_WRITTEN = _I(
        "state", "state_v_first ignored when ht is written", ("vllm #40956",), "state_v_first", ("floor", "v_first")
    )
    STATE_DHT_IGNORED = _I("state", "gradient of the final state never read", (), "dht", ("floor", "adjoint"))
    STATE_DH0_NEEDS_DHT = _I("state", "dh0 is 0 when dht is not given", (), "h0 without dht", ("floor", "adjoint"))

    # The triangular inverse
    INVERSE_FIRST_ORDER = _I("inverse", "A = I - diag(beta) L")
    INVERSE_TRUNCATED = _I(
        "inverse", "Neumann series up to the 7th power", ("FlashKDA #34",), "correlated keys, slow gates"
    )
    INVERSE_FP16_NEUMANN = _I(
        "inverse",
        "Neumann product with powers in float16",
        ("FlashKDA #34", "cudnn-frontend #1051", "tt-metal #54813"),
        "repeated keys",
    )
    INVERSE_BLOCKS_NOT_MERGED = _I("inverse", "16x16 blocks inverted, never merged", (), "T > 16, chunk > 16")
    INVERSE_LAST_MERGE_DROPPED = _I(
        "inverse", "halves of 32 rows not merged", (), "T > 32, chunk 64", ("floor", "chunk_sizes")
    )
    INVERSE_TF32 = _I("inverse", "products of the inverse in TF32", ("fla #646",), "float32")

    # Gradients
    DQ_OFF = _I("gradient", "dq off by a relative 1e-3", regime="float32")
    DK_OFF = _I("gradient", "dk off by a relative 1e-3", regime="float32")
    DV_OFF = _I("gradient", "dv off by a relative 1e-3", regime="float32", kills=("floor", "adjoint"))
    DG_OFF = _I("gradient", "dg off by a relative 1e-3", regime="float32")
    DBETA_OFF = _I("gradient", "dbeta off by a relative 1e-3")
    DH0_OFF = _I("gradient", "dh0 off by a relative 1e-3", kills=("floor", "adjoint"))
    DA_LOG_OFF = _I("gradient", "dA_log off by a relative 1e-3", regime="raw gate with A_log")
    DDT_BIAS_OFF = _I("gradient", "ddt_bias off by a relative 1e-3", regime="raw gate with dt_bias")
    STATE_LOSS_ALONE = _I("gradient", "dht is not read where there is no do", (), "no do", ("state_loss",))
    DQ_SCALE_MISSING = _I("gradient", "dq without scale")
    DQ_DIAGONAL_MISSING = _I("gradient", "a token's own pair left out of dq and dk")
    DK_LEFT_MISSING = _I("gradient", "dk without the left term of L", regime="two tokens")
    DK_RIGHT_MISSING = _I("gradient", "dk without the right term of L", ("TileOPs #632",), "two tokens")
    DK_STATE_MISSING = _I("gradient", "dk without remaining * dKg", ("TileOPs #632",), "dht or two chunks")
    DK_CHUNK_64 = _I(
        "gradient",
        "chunk 64: right term of dk misses its last 16 rows",
        ("fla #640", "fla #984"),
        "T > 48, chunk 64",
        ("floor", "chunk_sizes"),
    )
    DU_STATE_MISSING = _I("gradient", "dU without Kg dS", ("TileOPs #632",), "dht or two chunks", ("floor", "adjoint"))
    DW_SIGN = _I("gradient", "dW = dU S^T", (), "a state before the chunk")
    DA_W_MISSING = _I("gradient", "dA without dW (beta exp(Gamma) K)^T", ("TileOPs #632",), "a state before the chunk")
    DA_NOT_TRANSPOSED = _I("gradient", "X = -(A dA A) * M1", ("TileOPs #472",), "two tokens")
    DV_A_NOT_TRANSPOSED = _I("gradient", "dv = beta A dU", (), "two tokens", ("floor", "adjoint"))
    DS_W_MISSING = _I(
        "gradient", "dS_prev without -W^T dU", ("TileOPs #632",), "h0 or two chunks", ("floor", "adjoint")
    )
    DH0_LAST_DECAY_MISSING = _I(
        "gradient", "dh0 without the first chunk's decay", (), "h0 and dht", ("floor", "adjoint")
    )
    DG_STATE_MISSING = _I(
        "gradient", "dg without rowsum(S * dS) exp(gC)", (), "a state before the chunk, dht or two chunks"
    )
    DG_KG_MISSING = _I("gradient", "dg's last row without the sum of dKg * Kg", (), "dht or two chunks")
    DG_NOT_SUMMED = _I("gradient", "dGamma returned as dg")
    DG_DIAGONAL_KEPT = _I(
        "gradient",
        "equal terms of the diagonal, rounded to TF32, left to cancel",
        ("fla #1069",),
        "gates at -5, float32",
    )
    DG_EARLY_ROUNDING = _I(
        "gradient", "two products rounded to bfloat16, then subtracted", ("flash-linear-attention-npu #569",), "float32"
    )
    DBETA_XL_MISSING = _I("gradient", "dbeta without rowsum(X * L)", ("fla #862",), "two tokens")
    DBETA_BY_DIVISION = _I("gradient", "dbeta from dv / beta", (), "a beta that is 0")
    DBETA_UNGATED_INCOMPLETE = _I(
        "gradient", "g absent: dbeta without its W term", ("fla #862",), "rule delta with a state"
    )
    DA_LOG_FIRST_BLOCK = _I("gradient", "dA_log summed over the first 64 tokens", (), "A_log, T > 64")
    DDT_BIAS_HEADS_MIXED = _I("gradient", "ddt_bias summed over heads", (), "dt_bias, two heads")
    RECOMPUTE_WITHOUT_H0 = _I(
        "gradient", "recomputed states start from zero", (), "h0, recompute", ("floor", "recompute")
    )
    SAVED_STATE_AFTER_CHUNK = _I(
        "gradient", "saved states are those after the chunk", (), "recompute off", ("floor", "recompute")
    )

    # Heads and batch
    GROUP_MODULO = _I(
        "heads",
        "value head i reads key head i % H",
        ("fla #624",),
        "two key heads, grouped",
        ("floor", "grouped_repeated"),
    )
    GROUP_DQ_NOT_SUMMED = _I(
        "heads", "dq of the group's last head only", ("flash-linear-attention-npu #106",), "grouped"
    )
    HEADS_GATE_OF_HEAD_0 = _I(
        "heads",
        "backward takes head 0's gates for all",
        ("fla #1115", "fla #781"),
        "two heads, unlike gates",
        ("floor", "permute_heads"),
    )
    HEADS_BETA_OF_HEAD_0 = _I(
        "heads", "all heads take beta of head 0", ("fla #1115", "fla #781"), "two heads", ("floor", "permute_heads")
    )
    BATCH_GATE_OF_ROW_0 = _I(
        "heads", "all batch rows take the gates of row 0", ("fla #1080",), "two batch rows", ("floor", "permute_batch")
    )
    BATCH_STATE_OF_ROW_0 = _I(
        "heads", "grouped heads of all batch rows start with the state of row 0", (), "two batch rows, grouped, h0",
        ("floor", "permute_batch"),
    )  # fmt: skip

    # Flags
    L2NORM_IGNORED = _I("flag", "use_qk_l2norm_in_kernel ignored", ("flashinfer #5255",), "l2norm")
    L2NORM_EPS_OUTSIDE = _I("flag", "x / (|x| + eps) in place of x / sqrt(|x|^2 + eps)", (), "l2norm of short q or k")
    L2NORM_GRADIENT_MISSING = _I("flag", "dq and dk of the normalised q and k", (), "l2norm")
    L2NORM_ZERO_ROW = _I(
        "flag", "gradient divides by |x|: NaN at a zero row", ("maxtext #5295",), "l2norm of a zero row"
    )
    SIGMOID_TWICE = _I("flag", "beta sigmoid applied twice", ("sglang #17508",), "beta_sigmoid")
    SIGMOID_TWICE_IN_DECODE = _I(
        "flag",
        "beta sigmoid applied twice in calls of one token",
        ("sglang #17508",),
        "T = 1 with beta_sigmoid",
        kills=("floor", "split_anywhere"),
    )
    NEG_EIGVAL_IGNORED = _I("flag", "allow_neg_eigval ignored", (), "allow_neg_eigval")
    LOWER_BOUND_IGNORED = _I("flag", "bounded gate computed as the softplus gate", ("FlashKDA #3",), "bounded gate")
    BOUNDED_BY_CLAMP = _I("flag", "max(softplus gate, lower_bound)", ("tokenspeed #847",), "bounded gate")
    A_LOG_NOT_EXP = _I("flag", "A_log used as the multiplier", (), "A_log")
    DT_BIAS_PER_HEAD = _I("flag", "dt_bias of channel 0 for the whole head", ("DGX-Spark #4",), "dt_bias, K > 1")
    GATE_GRADIENT_MISSING = _I("flag", "dg of the log decay returned for the raw gate", (), "raw gate")
    SOFTPLUS_THRESHOLD = _I("flag", "softplus(x) = x already above 3", (), "raw gate above 3")
    SCALE_IGNORED = _I("flag", "scale is always K^-1/2", (), "another scale")
    SAFE_GATE_CLAMPS = _I("flag", "safe_gate clamps given gates at -5", (), "safe_gate, gates below -5", ("safe_gate",))
    FINAL_STATE_UNASKED = _I("flag", "without output_final_state h0 is not read", (), "h0, no final state")
    GRADIENT_UNASKED = _I("flag", "without gradients q is not scaled", (), "inference", ("split_anywhere",))
    FROZEN_HALF = _I("flag", "where beta needs no gradient dk stays 0", (), "an input without gradient", ("frozen",))
    CHUNK_STEP_64 = _I(
        "flag",
        "chunks step by 64 whatever their size",
        ("fla #876",),
        "chunk 16 or 32, T > chunk",
        ("floor", "chunk_sizes"),
    )

    # Memory
    BACKWARD_ONCE = _I("memory", "the reverse writes dv over the saved v", (), "a second reverse", ("second_backward",))
    INPUT_OVERWRITTEN = _I("memory", "Vnew written into v", ("DGX-Spark #4",), kills=("inputs_unchanged",))
    STATE_IN_PLACE = _I(
        "memory", "final state written into initial_state and returned", (), "h0", ("inputs_unchanged",)
    )
    STRIDES_IGNORED = _I("memory", "q read as if contiguous", (), "a strided layout", ("views",))
    READS_ROWS_BEHIND = _I(
        "memory",
        "rows behind the last offset enter with weight 1e-30",
        ("cuLA #38", "fla #673"),
        "tail padding",
        kills=("poison",),
    )
    READS_PAST_END = _I(
        "memory",
        "memory behind g enters with weight 1e-30 when K is no power of two",
        ("fla #1135",),
        "K = 3, 5, 6, ...",
        ("poison",),
    )
    OUTPUT_TILE_UNWRITTEN = _I(
        "memory",
        "dv of the fifth chunk never written",
        ("cudnn-frontend #1032",),
        "T > 4 C",
        kills=("floor", "adjoint"),
    )

    # Determinism and what is kept between calls
    ORDER_OF_SUM_VARIES = _I(
        "determinism",
        "order of the sum over a chunk's tokens changes from call to call",
        ("fla #945", "fla #1228"),
        "two calls",
        ("repeat",),
    )
    SECOND_CALL = _I(
        "determinism",
        "every second call: first output off by 1/8",
        ("fla #945", "flash-linear-attention-npu #236"),
        "two calls",
        ("repeat",),
    )
    DTYPE_CACHED = _I(
        "determinism",
        "q, k, v are loaded in the dtype of the process's first call",
        ("cuLA #43",),
        "16-bit, then float32",
        kills=("call_order",),
    )

    # Precision
    DECAY_BF16 = _I("precision", "exp(gC) rounded to bfloat16", (), "slow gates")
    GAMMA_BF16 = _I("precision", "Gamma rounded to bfloat16", (), "|Gamma| > 1")
    RESIDUAL_BF16 = _I("precision", "W S rounded to bfloat16 before the subtraction", (), "float32 or float16, a state")
    OUTPUT_PART_BF16 = _I("precision", "Qg S rounded to bfloat16 before the sum", (), "float32 or float16, a state")
    BETA_BF16 = _I("precision", "beta rounded to bfloat16", (), "float32 beta")
    H0_BF16 = _I("precision", "initial state rounded to bfloat16", (), "h0")
    VALUE_EPSILON = _I("precision", "1e-6 added to Vnew", (), "small v", ("floor", "power_of_two"))
    VALUE_CLAMPED = _I("precision", "Vnew clamped to 256", (), "v_exponent > 8", ("floor", "power_of_two"))
    SMALL_FLUSHED = _I(
        "precision", "stored numbers below 2^-14 flushed to 0", (), "v_exponent < -14", ("floor", "power_of_two")
    )

    # Late and narrow
    LATE_2048 = _I(
        "late", "after 2,048 tokens of a row, keys are read 2,048 tokens back", ("fla #1080", "fla #692"), "T > 2048"
    )
    LATE_K_NOT_V = _I(
        "late", "K != V: channels beyond the smaller are left out of Qg S", ("vllm #41292",), "K != V, a state"
    )
    LATE_BETA_ZERO = _I("late", "beta = 0 taken as not given: 1", (), "a beta that is 0")
    LATE_BETA_ONE = _I("late", "beta = 1: the row does not read the state", (), "a beta that is 1, a state")
    LATE_WIDE_CHANNELS = _I("late", "channels from the 65th on are left out of Qg S", (), "K > 64, a state")
    LATE_STATE_BF16 = _I(
        "late", "after 16 chunks of a row the state is kept in bfloat16", (), "T > 16 C, small changes of a large state"
    )
    ZERO_GATE_DROPPED = _I(
        "late", "pairs with no decay between them are dropped", ("fla #104", "fla #389"), "gates that are 0"
    )
    HARD_RESET_NAN = _I("late", "g = -inf: -inf - -inf", ("executorch #21439",), "a hard reset")

    @property
    def info(self) -> FaultInfo:
        """What is planted, and where."""
        return self.value
