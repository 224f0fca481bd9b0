"""The chunked algorithm in NumPy, rounded to nearest exactly where a contract says, as a target.

It is what a perfect implementation of that contract would answer: its results are judged as any kernel's are,
and its noise floor must accept them. It works on values, so memory conditions do not apply: there is no layout,
and nothing around the inputs that could be read or written.
"""

from __future__ import annotations

from oracles.arithmetic import Nearest
from oracles.chunked import emulate
from oracles.contract import Contract
from verikda.call import Call, Capabilities, Result
from verikda.targets.base import refuse_graph
from verikda.targets.contracts import Declared, check_declared, contract_of


class Emulator:
    """`oracles.chunked.emulate` under a contract.

    Parameters
    ----------
    contract : what to emulate; by default 16-bit storage for 16-bit inputs and float32 for float32 ones.

    Raises
    ------
    TargetError
        When the contract is not known.
    """

    def __init__(self, contract: Declared = "storage16") -> None:
        self._contract = check_declared(contract, "emulator")

    @property
    def name(self) -> str:
        """Always "emulator"."""
        return "emulator"

    @property
    def capabilities(self) -> Capabilities:
        """Everything that a Call can say."""
        return Capabilities(shape_invariant=False)

    def contract(self, call: Call) -> Contract:
        """The contract for the dtype and chunk size of this call."""
        return contract_of(self._contract, call)

    def run(self, call: Call) -> Result:
        """Emulate the call; o has the dtype of q, gradients that of their inputs, states are float32.

        Raises
        ------
        ValueError
            When the problem has no meaning, or the call asks for more than one plain reverse.
        """
        refuse_graph(call, self.name)
        contract = self.contract(call)
        dtypes = call.output_dtypes()
        trace = emulate(call.problem, contract, Nearest(), backward=call.backward, output_dtypes=dtypes)
        return Result(
            outputs=dict(trace.outputs),
            dtypes={n: dtypes[n] for n in trace.outputs},
            ran=f"oracles.chunked.emulate under {contract.name} on cpu",
        )
