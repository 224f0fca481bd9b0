"""Public reports of faults in kernels of this family, by kind, and which fault of the zoo stands for each.

A kind is covered by every fault that cites one of its reports in `modelled_on`. A kind that no fault stands for has a
reason. Names are those of the trackers: "fla #99" is issue or pull request 99 of fla-org/flash-linear-attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from verikda.zoo.specimens import SPECIMENS, Specimen


@dataclass(frozen=True)
class Kind:
    """One way in which kernels have gone wrong in public.

    Attributes
    ----------
    group : of kinds.
    text : what went wrong.
    reports : where it was reported.
    reason : why no fault of the zoo stands for it, "" where one does.
    """

    group: str
    text: str
    reports: tuple[str, ...]
    reason: str = ""

    @property
    def specimens(self) -> tuple[Specimen, ...]:
        """Faults of the zoo that are modelled on one of the reports."""
        return tuple(s for s in SPECIMENS.values() if set(s.reports) & set(self.reports))


_NO_SLOTS = "the operator has no slots: states come and go as one array, a pool is its caller's"
_ON_A_GPU = "a fault of one GPU's schedule; neither NumPy nor the CPU run of the CUDA sources has one"
_REFUSAL = "a refusal, not a wrong number: verikda counts and prints refusals"
_DOMAIN = "outside the stable domain, where a result is neither right nor wrong: such cases are inconclusive"

KINDS: tuple[Kind, ...] = (
    Kind("gate size", "one anchor in the middle of 64 rows overflows at the bound", ("cudnn-frontend #1017",)),
    Kind("gate size", "shared anchors overflow in the backward alone", ("flash-linear-attention-npu #448",)),
    Kind("gate size", "factors from the start of the chunk overflow at the bound", ("TIRx-kernels #214",)),
    Kind("gate size", "inverse decays of 16 rows without a bound overflow", ("flashinfer #5032",)),
    Kind("gate size", "dg lost by products through an anchor at the bound", ("fla #1069",)),
    Kind("gate size", "a gate loaded as 0 behind the last row times infinity", ("fla #792", "fla #794")),
    Kind("gate size", "exp before the mask", ("fla #99", "fla #111")),
    Kind("gate size", "a positive exponent in single rows", ("fla #649",)),
    Kind("gate size", "exp before the mask, seen in the gradients alone", ("transformers #48455", "prismaquant #414")),
    Kind("gate size", "decay near 0: exp(-cumsum) is infinite", ("executorch #21417", "executorch #21439")),
    Kind("gate size", "positive gates are not refused", ("cuLA #89",), _DOMAIN),
    Kind("gate size", "first-row anchors of 16 rows", ("attention-gym #394", "attention-gym #370")),
    Kind("gate size", "NaN in float16, which was then declined", ("cudnn-frontend #596",),
         "the cause was not published; overflowing factors are planted as ANCHOR_*, float16 powers as INVERSE_*"),
    Kind("gate size", "NaN with keys that are not normalised", ("fla #736",), _DOMAIN),
    Kind("gate size", "a fused gate and beta kernel gives NaN", ("vllm #28293",), "the cause was not published"),
    Kind("inverse", "powers in float16 grow to thousands and must cancel",
         ("FlashKDA #34", "vllm-project/FlashKDA #10", "local-inference-lab/vllm #638")),
    Kind("inverse", "strongly correlated keys, forward and backward", ("cudnn-frontend #1051",)),
    Kind("inverse", "a doubling product on slow decay and correlated keys",
         ("tt-metal #54813", "tt-metal #54937", "tt-metal #55626")),
    Kind("inverse", "tests that could not see it", ("tt-metal #54839", "tt-metal #56240"),
         "a fault of tests; verikda's own are held to the zoo"),
    Kind("inverse", "products in TF32", ("fla #646",)),
    Kind("causality", "the anchor is a later row", ("fla #1240", "fla #1242", "fla #1244")),
    Kind("causality", "a midpoint anchor depends on the future", ("attention-gym #337",)),
    Kind("causality", "the anchor row of another head", ("fla #1085",)),
    Kind("tails", "the chunk's decay read from a row that holds no token", ("cuLA #38",)),
    Kind("tails", "tail not masked; kernel kept for another dtype", ("cuLA #16", "cuLA #43")),
    Kind("tails", "loads out of range in partial chunks", ("fla #673",)),
    Kind("tails", "reads past the end of a row when K is no power of two", ("fla #1135",)),
    Kind("tails", "scratch sized by tokens, addressed by padded chunks",
         ("vllm-ascend #16087", "vllm-ascend #16180", "vllm-ascend #17109"),
         "the NumPy implementation has no scratch memory to overrun"),
    Kind("tails", "block end taken from a fragment's index", ("flashinfer #4311",)),
    Kind("tails", "rows behind the last offset never written", ("FlashQLA #28", "fla #1070")),
    Kind("tails", "sequences shorter than a chunk", ("ATOM #1750",)),
    Kind("tails", "rows of a 63-row tail remapped", ("aiter #4523",)),
    Kind("tails", "padding updates the state", ("transformers #46190", "transformers #46873")),
    Kind("tails", "64 written where the chunk size belongs", ("fla #876",)),
    Kind("tails", "NaN at one width of the head only", ("cudnn-frontend #994",),
         "the cause was not published; READS_PAST_END is a fault of certain widths"),
    Kind("tails", "documented widths that do not work", ("cuLA #41", "flash-linear-attention-npu #578"), _REFUSAL),
    Kind("packs", "empty sequences read out of bounds", ("fla #103",)),
    Kind("packs", "an empty sequence hangs the pipeline", ("flashinfer #3536",), _ON_A_GPU),
    Kind("packs", "final state of a sequence without tiles", ("FlashKDA #24", "FlashKDA #25")),
    Kind("packs", "state leaks from one packed sample to the next",
         ("slime #1686", "transformers #46851", "transformers #46859")),
    Kind("packs", "the caller's offsets are replaced when a mask is given", ("fla #838", "fla #1088"),
         "the layer above: the operator takes no mask"),
    Kind("packs", "chunk grid cached by the identity of the offsets", ("FlashQLA #23",)),
    Kind("packs", "more sequences than a grid axis holds", ("fla #1077", "fla #1097")),
    Kind("packs", "limits of the host code refuse large packs",
         ("flash-linear-attention-npu #508", "flash-linear-attention-npu #699"), _REFUSAL),
    Kind("packs", "odd lengths truncated", ("Megatron-LM #111", "Megatron-LM #4495")),
    Kind("packs", "32-bit offsets", ("fla #1080", "fla #1082", "fla #911")),
    Kind("packs", "32-bit offsets in long inputs", ("fla #692", "fla #733")),
    Kind("states", "[V,K] read as [K,V]", ("vllm #41292", "vllm #40956")),
    Kind("states", "prefill in windows differs from one pass", ("vllm #52909",)),
    Kind("states", "every window starts from zero", ("sparkinfer #1071",)),
    Kind("states", "handed-on state wrong, outputs right", ("tt-metal #54962",)),
    Kind("states", "a fresh request continues another's state", ("vllm #51483", "vllm #51039")),
    Kind("states", "padding lanes write slot 0",
         ("vllm #39064", "ATOM #1436", "vllm-ascend #12040", "sglang-jax #1072"), _NO_SLOTS),
    Kind("states", "slot 0 read in place of the accepted one",
         ("vllm #39273", "vllm #40875", "vllm #52942", "vllm #56531")),
    Kind("states", "side input of another size read; an input overwritten", ("DGX-Spark #4",)),
    Kind("gradients", "without a gate dk unwritten and dbeta incomplete", ("fla #862", "fla #863")),
    Kind("gradients", "products rounded to 16 bits, then subtracted", ("flash-linear-attention-npu #569",)),
    Kind("gradients", "all heads read the gates of head 0", ("fla #1115", "fla #781")),
    Kind("gradients", "grouped values without their gates", ("fla #624",)),
    Kind("gradients", "dq and dk not summed over the group", ("flash-linear-attention-npu #106",)),
    Kind("gradients", "pairs without decay between them dropped", ("fla #104", "fla #389", "fla #463")),
    Kind("gradients", "wrong rule in one combination of flags", ("fla #623",)),
    Kind("gradients", "paths of the gradient missing", ("TileOPs #632", "TileOPs #472")),
    Kind("gradients", "norm's gradient at a zero row", ("maxtext #5295",)),
    Kind("flags", "clamped gate in place of the bounded one", ("tokenspeed #847",)),
    Kind("flags", "bounded kernel on an unbounded model", ("FlashKDA #3",)),
    Kind("flags", "beta's sigmoid twice when decoding", ("sglang #17508",)),
    Kind("flags", "the norm's flag ignored", ("flashinfer #5255",)),
    Kind("compiler", "wrong gradients at one block width", ("fla #640", "fla #826", "unsloth-zoo #1010")),
    Kind("compiler", "wrong dk and dbeta at one chunk size", ("fla #984", "fla #988")),
    Kind("compiler", "results change from call to call", ("fla #945", "triton #10590", "fla #953")),
    Kind("compiler", "expert routes change between two forwards", ("fla #1228", "fla #1229")),
    Kind("compiler", "NaN, reads out of range or hangs from 1,024 blocks", ("fla #913", "fla #790", "fla #1000"),
         _ON_A_GPU),
    Kind("compiler", "gradients off on one architecture", ("fla #948",), "the cause was not published"),
    Kind("compiler", "illegal access while tuning", ("fla #807", "fla #1109"), _ON_A_GPU),
    Kind("compiler", "tail work lost when other kernels run", ("cudnn-frontend #1032", "cudnn-frontend #1033")),
    Kind("compiler", "unequal repeats from reused flags and missing waits",
         ("flash-linear-attention-npu #236", "flash-linear-attention-npu #300", "flash-linear-attention-npu #575",
          "flash-linear-attention-npu #163")),
    Kind("compiler", "state handed on out of order", ("flashinfer #3742", "flashinfer #3889"), _ON_A_GPU),
    Kind("compiler", "gate given in bfloat16", ("cudnn-frontend #1130",), "open; the cause was not published"),
)  # fmt: skip
"""Every kind, in the order of the algorithm."""
