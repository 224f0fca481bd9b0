"""Decode and state pools: does a pool of carried states stay right, whatever is done to it?

A serving engine keeps a state for each request in a slot of a pool, appends tokens to one slot or to many in one packed
call, forks and resets slots and uses them again. `pool_machine` draws such histories with Hypothesis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Never

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oracles.contract import Contract
from oracles.problem import Array
from verikda.call import Call, Capabilities, Crashed, Malformed, Refused, Result
from verikda.case import Case
from verikda.checks import CALL, Failure
from verikda.checks.base import compare
from verikda.checks.transform import TOKENS, revised
from verikda.checks.values import from_judgement
from verikda.floor import Judgement, judge
from verikda.inputs import make_call
from verikda.strategies import cases, describe
from verikda.targets.base import Target, TargetError

SLOTS = 4
ROOM = 96
"""Tokens that a slot's stream has; a full slot takes no more until it is reset."""
_MOST = 20
"""Tokens of one append: more than the smallest chunk."""

Form = Literal["alone", "packed", "batch"]
Entry = tuple[int, int]
"""(slot, tokens to append)."""

_FIXED: dict[str, Any] = {
    **{"packed": False, "lengths": (1,), "h0": "none", "dht": False, "layout": "contiguous", "final_state": True},
    **{"q_exponent": 0, "v_exponent": 0, "do_exponent": 0, "chunk_size": [16, 32, 64]},
    # regimes that draw a row without knowing the length of its sequence, which is not known in decode
    "gate_regime": ["random", "slow", "bound", "mixed", "zero", "heads", "model"],
    "key_regime": ["random", "collinear", "repeated", "alternating", "orthogonal"],
    "query_regime": ["random", "keys"],
    "beta_regime": ["random", "one", "near_one", "tiny"],
    "value_regime": ["random", "constant", "ints"],
}


class PoolError(AssertionError):
    """A step of a pool went wrong.

    Attributes
    ----------
    steps : what was done, the failing step last.
    failures : what is wrong.
    candidates : cases in which one call alone may show it.
    """

    def __init__(self, steps: Sequence[str], failures: Sequence[Failure], candidates: Sequence[Case]) -> None:
        self.steps, self.failures, self.candidates = tuple(steps), tuple(failures), tuple(candidates)
        wrong = [f"  {f.output}: {f.message}" for f in self.failures[:6]]
        super().__init__("\n".join(["the pool is wrong after", *(f"  {s}" for s in self.steps), "because", *wrong]))


@dataclass
class _Slot:
    """One request: its stream of tokens, and what it has read and answered so far."""

    seed: int
    at: int = 0
    read: list[dict[str, Array]] = field(default_factory=list)
    answered: list[Array] = field(default_factory=list)
    forked: bool = False

    @property
    def fresh(self) -> bool:
        return not self.read


class Pool(RuleBasedStateMachine):
    """The rules; `pool_machine` makes the class for one target."""

    target: ClassVar[Target]
    tally: ClassVar[Counter[str]]

    def begin(self, base: Case) -> None:
        """Set up empty slots for calls like `base`."""
        self.base = base
        self.model = make_call(base, backward=False)
        p = self.model.problem
        self.states = np.zeros((SLOTS, p.v.shape[2], p.q.shape[3], p.v.shape[3]))
        self.expected = self.states.copy()
        self.seeds = base.seed
        self.streams: dict[int, Call] = {}
        self.slots = [self._new() for _ in range(SLOTS)]
        self.steps = [f"start: {describe(base)}"]
        self._count("pools")

    @rule(slot=st.integers(0, SLOTS - 1), n=st.integers(1, _MOST))
    def append(self, slot: int, n: int) -> None:
        """Tokens for one slot in a call of its own."""
        self._advance("alone", [(slot, n)])

    @precondition(lambda self: self.target.capabilities.packed)
    @rule(
        entries=st.lists(
            st.tuples(st.integers(0, SLOTS - 1), st.just(0) | st.integers(1, _MOST)),
            min_size=2,
            max_size=SLOTS,
            unique_by=lambda entry: entry[0],
        )
    )
    def append_packed(self, entries: list[Entry]) -> None:
        """Tokens for several slots in one packed call, some of them none."""
        self._advance("packed", entries)

    @rule(
        order=st.lists(st.integers(0, SLOTS - 1), min_size=2, max_size=SLOTS, unique=True),
        n=st.sampled_from([1, 2, 17]),
    )
    def append_batch(self, order: list[int], n: int) -> None:
        """The same number of tokens for several slots in one batch."""
        self._advance("batch", [(slot, n) for slot in order])

    @rule(source=st.integers(0, SLOTS - 1), to=st.integers(0, SLOTS - 1))
    def fork(self, source: int, to: int) -> None:
        """A slot becomes a copy of another, and goes on with tokens of its own."""
        if source == to:
            return
        self.steps.append(f"fork slot {source} to slot {to}")
        old = self.slots[source]
        self.slots[to] = replace(self._new(), read=list(old.read), answered=list(old.answered), forked=not old.fresh)
        self.states[to] = self.expected[to] = self.states[source]

    @rule(slot=st.integers(0, SLOTS - 1))
    def reset(self, slot: int) -> None:
        """A slot forgets everything; the next request uses it."""
        self.steps.append(f"reset slot {slot}")
        self.slots[slot] = self._new()
        self.states[slot] = self.expected[slot] = 0.0

    @rule(slot=st.integers(0, SLOTS - 1))
    def recall(self, slot: int) -> None:
        """The whole history of a slot in one call: it is right, and so is what the steps had answered."""
        s = self.slots[slot]
        if s.fresh:
            return
        self.steps.append(f"the whole history of slot {slot} in one call")
        call = self._call({n: np.concatenate([x[n] for x in s.read], axis=1) for n in s.read[0]}, None)
        result = self._run(call, [slot])
        if result is None:
            return
        answered = {"o": np.concatenate(s.answered, axis=1), "ht": self.states[slot : slot + 1]}
        contract = self.target.contract(call)
        found = self._judge(answered, result, call, contract)
        if found.verdict == "fail":
            # steps are chunks too, of their own length: what their contract costs is no fault
            least = min(x["q"].shape[1] for x in s.read)
            found = self._judge(answered, result, call, contract.with_chunk(least))
        if found.verdict == "fail":
            self._fail(from_judgement("pool", found, "").failures, [slot], "step by step: ")

    @invariant()
    def untouched(self) -> None:
        """No call changes the state of a slot that it was not asked to advance, nor the state that it was given."""
        if not np.array_equal(self.states, self.expected, equal_nan=True):
            slot = int(np.argwhere((self.states != self.expected).any((1, 2, 3)))[0, 0])
            self._fail([Failure("pool", "h0", f"the call wrote into the state of slot {slot}")], [slot])

    def _new(self) -> _Slot:
        self.seeds = (self.seeds + 1) % 2**32
        return _Slot(self.seeds)

    def _next(self, slot: int, n: int) -> dict[str, Array]:
        """The next n tokens of a slot's stream, [1,n,...] each."""
        s = self.slots[slot]
        if s.seed not in self.streams:
            self.streams[s.seed] = make_call(replace(self.base, lengths=(ROOM,), seed=s.seed), backward=False)
        p = self.streams[s.seed].problem
        return {name: getattr(p, name)[:, s.at : s.at + n] for name in TOKENS if getattr(p, name) is not None}

    def _call(self, tokens: dict[str, Array], h0: Array | None, lengths: Sequence[int] | None = None) -> Call:
        offsets = None if lengths is None else np.cumsum([0, *lengths], dtype=np.int64)
        problem = revised(self.model.problem, {**tokens, "h0": h0, "cu_seqlens": offsets})
        dtypes = {**self.model.dtypes, "h0": "float32", "cu_seqlens": self.base.offsets}
        return replace(self.model, problem=problem, dtypes=dtypes)

    def _advance(self, form: Form, wanted: list[Entry]) -> None:
        """One call that appends tokens to slots, and everything that must hold of it."""
        least = 0 if form == "packed" and self.target.capabilities.empty else 1
        entries = [(slot, min(n, ROOM - self.slots[slot].at)) for slot, n in wanted]
        entries = [(slot, n) for slot, n in entries if n >= least]
        if form == "batch":
            n = min((n for _, n in entries), default=0)
            entries = [(slot, n) for slot, _ in entries]
        if not entries or all(n == 0 for _, n in entries):
            return
        order, lengths = [slot for slot, _ in entries], [n for _, n in entries]
        verb = {"alone": "append", "packed": "append in one pack", "batch": "append in one batch"}[form]
        self.steps.append(f"{verb} " + ", ".join(f"{n} tokens to slot {slot}" for slot, n in entries))
        parts = [self._next(slot, n) for slot, n in entries]
        tokens = {name: np.concatenate([x[name] for x in parts], axis=0 if form == "batch" else 1) for name in parts[0]}
        given: Array | None
        if form == "alone":
            (slot,) = order
            given = self.states[slot : slot + 1]
            result = self._run(self._call(tokens, None if self.slots[slot].fresh else given), order)
            if result is not None and self.slots[slot].fresh:
                self._agree(result, self._run(self._call(tokens, given), order), order, "a zero state in place of none")
        else:
            given = None if all(self.slots[slot].fresh for slot in order) else self.states[order]
            result = self._run(self._call(tokens, given, lengths if form == "packed" else None), order)
        if result is None:
            return
        starts = [0, *np.cumsum(lengths)]
        rows = [
            result.outputs["o"][i : i + 1] if form == "batch" else result.outputs["o"][:, starts[i] : starts[i + 1]]
            for i in range(len(order))
        ]
        if form != "alone" and self.target.capabilities.shape_invariant:
            for i, (slot, n) in enumerate(entries):
                if n:
                    alone = self._run(self._call(parts[i], self.states[slot : slot + 1]), [slot])
                    mine = replace(result, outputs={"o": rows[i], "ht": result.outputs["ht"][i : i + 1]})
                    self._agree(mine, alone, order, f"slot {slot} in the {form}, against the same call alone")
        for i, (slot, n) in enumerate(entries):
            self.states[slot] = self.expected[slot] = result.outputs["ht"][i]
            if n:
                s = self.slots[slot]
                s.at += n
                s.read.append(parts[i])
                s.answered.append(rows[i])

    def _run(self, call: Call, order: list[int]) -> Result | None:
        """Make a call and judge it from the states that it was given; None when it was refused."""
        try:
            result = self.target.run(call)
        except Refused as refusal:
            self._count("refused")
            self.steps.append(f"  refused: {refusal}")
            return None
        except (Crashed, Malformed) as error:
            self._fail([Failure("pool", CALL, str(error))], order)
        missing = [name for name in ("o", "ht") if name not in result.outputs]
        if missing:
            self._fail([Failure("pool", missing[0], f"{missing[0]} is missing")], order)
        self.untouched()
        if result.changed:
            self._fail(
                [Failure("pool", name, f"the call changed {name}, or memory beside it") for name in result.changed],
                order,
            )
        found = self._judge(result.outputs, result, call, self.target.contract(call))
        if found.verdict == "fail":
            self._fail(from_judgement("pool", found).failures, order)
        self._count(found.verdict)
        return result

    def _judge(self, outputs: Any, result: Result, call: Call, contract: Contract) -> Judgement:
        return judge(outputs, result.dtypes, call.problem, contract, backward=False)

    def _agree(self, one: Result, other: Result | None, order: list[int], what: str) -> None:
        """Every bit of two results."""
        if other is not None:
            failures = compare("pool", other.outputs, one.outputs, one.dtypes, what, ("o", "ht"))
            if failures:
                self._fail(failures, order)

    def _fail(self, failures: Sequence[Failure], order: list[int], prefix: str = "") -> Never:
        """The one place that raises: Hypothesis tells failures apart by it."""
        self._count("fail")
        named = [replace(f, message=prefix + f.message) for f in failures]
        raise PoolError(self.steps, named, self._candidates(order))

    def _count(self, what: str) -> None:
        """Up to the first failure: what shrinking tries after it is no further evidence."""
        if not self.tally["fail"]:
            self.tally[what] += 1

    def _candidates(self, order: list[int]) -> list[Case]:
        """Cases like the failing call: a slot's stream in one call, this step from random states, and its pack."""
        found, lengths = [], []
        for slot in order:
            s = self.slots[slot]
            lengths.append(max(1, min(_MOST, ROOM - s.at)))
            if not s.forked:
                found.append(replace(self.base, seed=s.seed, lengths=(min(ROOM, s.at + lengths[-1]),)))
            found.append(replace(self.base, seed=s.seed, lengths=(lengths[-1],), h0="random"))
        if self.target.capabilities.packed:
            lengths = [n + i for i, n in enumerate(lengths)]
            with_empty = [0] * self.target.capabilities.empty
            packed = (lengths[0], *with_empty, *lengths[1:], 3)
            found.append(replace(self.base, packed=True, lengths=packed, h0="random"))
        return found


def pool_machine(target: Target) -> type[Pool]:
    """The state machine that uses `target` as a serving engine would, for your own tests.

    ::

        from hypothesis import settings
        from verikda.probes.pool import pool_machine
        from verikda.targets import resolve

        TestPool = pool_machine(resolve("mypackage.ops:chunk_kda")).TestCase
        TestPool.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)

    Rules: append 1 to 20 tokens to a slot, to several in one packed call (some with none) or in one batch; fork a
    slot; reset it; the whole history of a slot in one call. What must hold after each: every call within the noise
    floor from the states that it was really given; the steps of a slot within the floor of its whole history; no state
    written that was only given, and no other slot's; no state and a zero state equal bit for bit, and, where the
    target is `shape_invariant`, so are packed and separate calls. Rules that the capabilities rule out are off.

    Raises
    ------
    TargetError
        When the target takes no initial state.
    """
    c = target.capabilities
    if not c.initial_state:
        raise TargetError(f"{target.name} takes no initial state, so there is no state to carry; leave the pool out")
    bases = _bases(c)

    class PoolMachine(Pool):
        @initialize(base=bases)
        def start(self, base: Case) -> None:
            """Draw the model: sizes, dtypes, flags and regimes of all calls."""
            self.begin(base)

    PoolMachine.target, PoolMachine.tally = target, Counter()
    return PoolMachine


def _bases(c: Capabilities) -> st.SearchStrategy[Case]:
    fixed = {name: value for name, value in _FIXED.items() if name != "chunk_size"}
    fixed["chunk_size"] = [n for n in _FIXED["chunk_size"] if n in c.chunk_sizes] or list(c.chunk_sizes)
    return cases(c, max_channels=8, max_heads=2, overrides=False, **fixed)
