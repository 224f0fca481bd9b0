"""One case on one target, through the checks: the straight path that every command takes."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from verikda.call import Call, ContextLost, Crashed, Malformed, Refused
from verikda.case import Case
from verikda.checks import CALL, CHECKS, FREE, Check, Context, Failure, Outcome
from verikda.floor import LIMIT
from verikda.inputs import make_call
from verikda.targets.base import Target


@dataclass(frozen=True)
class CaseReport:
    """What every check said of one case.

    Attributes
    ----------
    case : the case.
    outcomes : one per check that ran.
    skipped : reason per check that could not run on this case.
    ran : what the target says it ran.
    contract : what it was judged under, without the chunk size; "" where nothing was told.
    calls : calls of the target.
    seconds : wall time, oracle and floor included.
    """

    case: Case
    outcomes: tuple[Outcome, ...]
    skipped: dict[str, str]
    ran: str
    calls: int
    seconds: float
    contract: str = ""

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(f for outcome in self.outcomes for f in outcome.failures)

    @property
    def lost(self) -> bool:
        """Whether a call ended the CUDA context: no later case can be run in this process."""
        return any(outcome.lost for outcome in self.outcomes)

    @property
    def verdict(self) -> str:
        """Fail if any check failed; refused or inconclusive if the values could not be judged; else pass."""
        return verdict_of(self.outcomes)


def verdict_of(outcomes: tuple[Outcome, ...]) -> str:
    """Fail if any check failed; refused or inconclusive if the values could not be judged; else pass."""
    verdicts = {outcome.verdict for outcome in outcomes}
    if "fail" in verdicts:
        return "fail"
    judged = next((o.verdict for o in outcomes if o.check == "floor"), None)
    if judged in ("inconclusive", "refused"):
        return judged
    for verdict in ("pass", "inconclusive", "refused"):
        if verdict in verdicts:
            return verdict
    return "inconclusive"


def run_check(check: Check, ctx: Context) -> Outcome | str:
    """One check, or why it does not apply; a refusal, a crash and a malformed answer become outcomes."""
    try:
        reason = check.applies(ctx)
        return check.run(ctx) if reason is None else reason
    except Refused as refusal:
        return Outcome(check.name, "refused", detail=str(refusal))
    except (Crashed, Malformed) as error:
        lost = isinstance(error, ContextLost)
        crash = "the call ended the CUDA context" if lost else "the call crashed"
        text = f"{crash if isinstance(error, Crashed) else 'the answer is malformed'}: {error}"
        return Outcome(check.name, "fail", (Failure(check.name, CALL, text),), lost=lost)


def run_call(
    target: Target,
    call: Call,
    checks: tuple[Check, ...] = CHECKS,
    limit: float = LIMIT,
    turns: int | None = None,
) -> tuple[tuple[Outcome, ...], dict[str, str], Context]:
    """Run the checks that apply to a call.

    Parameters
    ----------
    turns : runs the free checks and so many of the others that apply, in the order of `checks`; None runs them all.
    """
    ctx = Context(target, call, limit)
    outcomes: list[Outcome] = []
    skipped: dict[str, str] = {}
    free = [c for c in checks if c.name in FREE]
    others = [c for c in checks if c.name not in FREE]
    left = len(others) if turns is None else turns
    for check in (*free, *others):
        if check.name not in FREE and left == 0:
            break
        said = run_check(check, ctx)
        if isinstance(said, str):
            skipped[check.name] = said
            continue
        if ctx.written:
            said = replace(said, verdict="fail", failures=(*said.failures, *_written(check.name, ctx)))
        outcomes.append(said)
        if check.name not in FREE:
            left -= 1
        if said.lost or ctx.failed:
            break  # nothing can be run any more, or every check would say the same
    return tuple(outcomes), skipped, ctx


def _written(name: str, ctx: Context) -> list[Failure]:
    """The inputs that other calls of a check have changed, which are taken off the list."""
    names = list(dict.fromkeys(ctx.written))
    ctx.written.clear()
    return [Failure(name, n, f"a call that this check makes changed {n}, or memory beside it") for n in names]


def run_case(
    target: Target,
    case: Case,
    checks: tuple[Check, ...] = CHECKS,
    *,
    limit: float = LIMIT,
    turns: int | None = None,
) -> CaseReport:
    """Make the inputs of a case, run it on a target, and judge it by the checks."""
    started = time.perf_counter()
    call = make_call(case, backward=target.capabilities.backward)
    outcomes, skipped, ctx = run_call(target, call, checks, limit, turns)
    told = any(o.verdict in ("pass", "fail") for o in outcomes)
    return CaseReport(
        case,
        outcomes,
        skipped,
        ctx.ran if told else "",
        ctx.runs,
        time.perf_counter() - started,
        ctx.contract.family if told else "",
    )
