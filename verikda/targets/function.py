"""What targets that call a function have in common: what they declare, and how a call of it can end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from oracles.contract import Contract
from verikda.call import Call, Capabilities, ContextLost
from verikda.targets import signature as sig
from verikda.targets.answer import context_ended, sort_error
from verikda.targets.base import TargetError, told
from verikda.targets.contracts import DEFAULT, Declared, check_declared, contract_of


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """A target that changes the folder, or what NumPy does about overflow, does not change verikda's."""
    folder = os.getcwd()
    try:
        with np.errstate():
            yield
    finally:
        os.chdir(folder)


class FunctionTarget:
    """Name, signature, capabilities and contract of a function.

    Parameters
    ----------
    function : what is called.
    name : of the target.
    signature : of the function, as `signature.read` found it.
    capabilities : None derives them from the signature, then applies the function's own `verikda_capabilities`.
    contract : None takes the function's own `verikda_contract`, else 16-bit storage for 16-bit inputs.

    Attributes
    ----------
    default_contract : whether nothing is declared, so that it is judged under `contracts.DEFAULT`.

    Raises
    ------
    TargetError
        When a declaration cannot be used.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        signature: sig.Signature,
        capabilities: Capabilities | None,
        contract: Declared | None,
    ) -> None:
        self.function = function
        self.signature = signature
        self._name = name
        self._capabilities = capabilities or sig.declared_capabilities(function, signature)
        declared = contract or sig.attribute(function, "verikda_contract")
        self.default_contract = declared is None
        self._contract = check_declared(DEFAULT if declared is None else declared, name)

    @property
    def name(self) -> str:
        """The name under which it was made."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """What its signature allows, or what it declares."""
        return self._capabilities

    def contract(self, call: Call) -> Contract:
        """The declared contract, for the dtype and chunk size of this call."""
        return contract_of(self._contract, call)

    def synchronize(self) -> None:
        """Wait for the device that the function runs on, where that is not the CPU.

        Raises
        ------
        RuntimeError
            Of the device's library, when a call has failed; any call's, when one has ended the CUDA context.
        """

    def check_context(self) -> None:
        """Refuse to make a call that could only fail.

        Raises
        ------
        TargetError
            When an earlier call has ended the CUDA context.
        """
        if context_ended(self.synchronize):
            raise TargetError(
                f"an earlier call has ended the CUDA context of this process, so target {self._name} cannot be called "
                "any more; start it again without the call that did"
            )

    def guarded(self, call: Callable[[], Any], where: str = "") -> Any:
        """The value of `call()`, with its exceptions sorted into refusals, malformed results and crashes.

        Raises
        ------
        Refused, Crashed, Malformed
            See `answer.sort_error`.
        ContextLost
            When the device answers no more after the call, whatever the call raised.
        """
        try:
            with _process_as_it_was():
                value = call()
            self.synchronize()  # kernels run later; an error of theirs belongs to this call
            return value
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit in a target must not end a search as if it had passed
            if context_ended(self.synchronize):
                raise ContextLost(f"{where}{told(error)}") from error
            raise sort_error(error, where) from error
