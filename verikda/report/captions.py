"""Titles of the sections of a report, and what is to be seen in each."""

from __future__ import annotations

CAPTIONS: dict[str, tuple[str, str]] = {
    "gates": (
        "Error against gate strength",
        "All gates equal. A band runs from the noise floor of a dtype to four times that, the limit; a red ring is a "
        "failed case, at the upper edge if nothing of the output is right. Dashed lines: ln(max)/C, from where on "
        "naive kernels, which form exp(-Gamma), overflow (bf16 has the range of fp32). Where a band lies above 1, no "
        "implementation of this contract can have any digit right.",
    ),
    "frontier": (
        "Overflow frontier",
        "Worst ratio of all outputs by chunk size C and gate in nats per token. The thick line is ln(max)/C, where "
        "naive exponentials leave the range of the dtype; the last columns say up to which gate this target was finite "
        "and within the limit.",
    ),
    "keys": (
        "Error against key correlation",
        "Slow gates, beta just below 1. Bars run from the noise floor to four times that. The more keys agree, the "
        "more the rows of a chunk depend on each other.",
    ),
    "ulp": (
        "Distribution of the error in ulp",
        "Each element in spacings of its own dtype at its true value. Left of the dashed line an element is as good as "
        "one rounding of the exact result. Elements that cancel to nearly 0 make the right tail.",
    ),
    "position": (
        "Error along the sequence",
        "Slow gates, which keep the state for hundreds of tokens. A line that leaves its band upwards would be drift. "
        "Gradients travel from right to left. The table has the worst ratio of all outputs by length.",
    ),
    "stages": (
        "Where precision is lost",
        "Each intermediate of the algorithm, from top to bottom, against the same algorithm in float64. Left of its "
        "line an intermediate lost less than one rounding of its dtype; a dot that jumps to the right is where "
        "precision went.",
    ),
    "bias": (
        "Bias",
        "Mean signed error of independent heads and seeds in units of its standard error. Inside the band it is "
        "compatible with 0; a bias adds up along a sequence where random errors would not.",
    ),
    "safe": (
        "Safe gate against the default path",
        "The same inputs, all gates at least -5, with and without the promise safe_gate=True. A target that ignores "
        "the flag has equal rows; one that does not know it has only the default.",
    ),
    "contracts": (
        "The same results under other contracts",
        "A contract says where an implementation rounds; each has its own noise floor. Read down: how far a result is "
        "from what float32 intermediates, or a float32 token recurrence, would give. Only the declared contract was "
        "promised: grey is beyond 4 of another one, and no failure.",
    ),
    "flags": (
        "Compiler flags",
        "verikda's kernels built with other flags, on cases of their own: the worst ratio of any output, and of each "
        "output the largest share of values in one case that are others than the shipped build's. One case divides "
        "and takes roots, one gives subnormal gradients.",
    ),
}
