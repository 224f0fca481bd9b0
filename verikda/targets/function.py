"""What targets that call a function have in common: a name, a signature, declared capabilities and contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oracles.contract import Contract
from verikda.call import Call, Capabilities
from verikda.targets import signature as sig
from verikda.targets.contracts import DEFAULT, Declared, check_declared, contract_of


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
        self.default_contract = not contract and not hasattr(function, "verikda_contract")
        self._contract = check_declared(contract or getattr(function, "verikda_contract", DEFAULT), name)

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
