"""Evidence that the floor raises no false alarm: healthy emulators judged under their own contract.

python -m verikda.false_alarm --dtype bfloat16 --cases 300
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from oracles.arithmetic import Nearest
from oracles.chunked import emulate
from oracles.contract import Contract, Dtype, chunked32, recurrent32, storage16
from oracles.recurrence import forward_reverse
from verikda.call import Call, Capabilities
from verikda.case import Case
from verikda.floor import LIMIT, Judgement, judge
from verikda.inputs import make_call
from verikda.knobs import OPTIONS, Limits, Space


def draw_case(rng: np.random.Generator, space: Space) -> Case:
    """One case, every knob drawn uniformly from its options."""
    known: dict[str, Any] = {}
    for name in OPTIONS:
        options = space.options(name, known)
        known[name] = int(rng.integers(1 << 32)) if name == "seed" else options[int(rng.integers(len(options)))]
    return Case(**known)


def output_dtypes(call: Call) -> dict[str, str]:
    """Dtype of each output: gradients have that of their argument, states and parameters float32."""
    d = call.dtypes
    own = {"o": d["q"], "dq": d["q"], "dk": d["k"], "dv": d["v"], "dbeta": d["beta"], "dg": d.get("g", "float32")}
    return own | dict.fromkeys(("ht", "dh0", "dA_log", "ddt_bias"), "float32")


def contracts(call: Call) -> list[Contract]:
    """Contracts that an implementation of a call might declare."""
    dtype = cast(Dtype, call.dtypes["q"])
    if dtype == "float32":
        return [chunked32(call.chunk_size), recurrent32()]
    return [storage16(dtype, call.chunk_size)]


@dataclass
class Tally:
    """Results so far.

    Attributes
    ----------
    verdicts, runs : counts of verdicts, and of stochastic runs that they took.
    worst : (ratio, case as JSON) per (contract family, output).
    failures : (case as JSON, contract, output, message).
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    runs: Counter[int] = field(default_factory=Counter)
    worst: dict[tuple[str, str], tuple[float, str]] = field(default_factory=dict)
    failures: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, case: Case, contract: Contract, judgement: Judgement) -> None:
        """Count one judgement."""
        self.verdicts[judgement.verdict] += 1
        self.runs[judgement.runs] += 1
        family = contract.name.rsplit("-c", 1)[0]
        for name, j in judgement.outputs.items():
            if j.ratio is not None and j.ratio > self.worst.get((family, name), (0.0, ""))[0]:
                self.worst[family, name] = (j.ratio, case.to_json())
            if j.verdict == "fail":
                self.failures.append((case.to_json(), contract.name, name, j.message))


def judge_healthy(case: Case, tally: Tally, limit: float = LIMIT) -> None:
    """Judge the emulator rounded to nearest under its own contract."""
    call = make_call(case)
    truth = forward_reverse(call.problem)
    dtypes = output_dtypes(call)
    for contract in contracts(call):
        result = emulate(call.problem, contract, Nearest(), output_dtypes=dtypes).outputs
        tally.add(case, contract, judge(result, dtypes, call.problem, contract, truth=truth, limit=limit))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    tally = Tally()
    space = Space(Capabilities(), Limits(), {"dtype": args.dtype})
    for _ in range(args.cases):
        judge_healthy(draw_case(rng, space), tally)
    print(dict(tally.verdicts), "runs", dict(tally.runs))
    for (family, name), (ratio, text) in sorted(tally.worst.items()):
        print(f"{family:20s} {name:9s} {ratio:8.3f}  {text}")
    for failure in tally.failures:
        print("FAIL", *failure)


if __name__ == "__main__":
    main()
