"""What gates a trained model makes: a small Kimi-Linear, trained on Python's own documentation, its calls captured.

    python -m verikda.capture_example

trains on the CPU (seconds), keeps the calls of one training step in float32 and in bfloat16, and writes
`reports/cpu/captured.md`: how gates, beta and keys are distributed before and after, and what `verikda replay` says of
several targets on the kept calls. Another processor rounds otherwise, and training gives other calls there: `--again`
judges those that are kept.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from oracles.problem import Array
from verikda.call import Call
from verikda.capture_calls import capture
from verikda.capture_file import load_call
from verikda.checking import forward_only
from verikda.checks import named
from verikda.environment import versions
from verikda.run_case import run_call, verdict_of
from verikda.targets import TargetError, resolve
from verikda.targets.transformers import MODULE, torch_path

DESCRIPTION = """Train a small Kimi-Linear on the CPU (seconds), capture the calls of its delta rule in one training
step, and report their gates, beta and keys, and what the checks say of several targets on them. Needs torch and
transformers."""
TOKENS, BATCH, STEPS = 128, 2, 40
RATE = 3e-3
NAME = "chunk_kimi_delta_attention"
OPERATOR = f"{MODULE}:{NAME}"
CHECKED = named(("floor", "prefix", "length", "split_anywhere", "repeat"))
TARGETS = ("transformers", "emulator", "verikda:host")
VERDICTS = "## Verdicts on the trained model's calls"


def text() -> bytes:
    """The topics of Python's `help`, about 460,000 bytes that every Python has."""
    from pydoc_data.topics import topics

    return "".join(topics.values()).encode()


def model() -> Any:
    """A Kimi-Linear of 170,000 parameters: two layers of the delta rule around one of attention, bytes as tokens.

    Raises
    ------
    TargetError
        When torch or transformers is missing.
    """
    try:
        import torch
        from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
        from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM
    except ImportError as error:
        raise TargetError(f"this needs torch and transformers ({error}): pip install 'verikda[peers]'") from error
    torch.manual_seed(0)
    return KimiLinearForCausalLM(
        KimiLinearConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
            v_head_dim=32, num_local_experts=4, num_experts_per_tok=2, linear_head_dim=32, linear_num_heads=2,
            mlp_layer_types=["dense"] * 3, layer_types=["linear_attention", "full_attention", "linear_attention"],
            pad_token_id=None, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def train(net: Any, steps: int, say: Callable[[str], None]) -> list[float]:
    """The loss (nats per byte) of every step of AdamW on random stretches of the text."""
    import torch

    data = torch.tensor(list(text()))
    optimizer = torch.optim.AdamW(net.parameters(), RATE)
    losses = []
    for step in range(steps):
        loss = _loss(net, data, BATCH)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % 10 == 0 or step == steps - 1:
            say(f"step {step}: {losses[-1]:.2f} nats per byte")
    return losses


def _loss(net: Any, data: Any, batch: int) -> Any:
    import torch

    starts = torch.randint(0, len(data) - TOKENS, (batch,))
    rows = torch.stack([data[i : i + TOKENS] for i in starts])
    return net(input_ids=rows, labels=rows).loss


def keep(net: Any, folder: Path, kind: str) -> list[Path]:
    """The calls of one step on one stretch, one file for each layer of the delta rule, named by `kind`."""
    import torch

    torch.manual_seed(1)
    with capture(folder / "new", [OPERATOR]):
        _loss(net, torch.tensor(list(text())), 1).backward()
    net.zero_grad()
    found = []
    for i, path in enumerate(sorted((folder / "new").iterdir())):
        found.append(folder / f"{kind}-layer{i + 1}.safetensors")
        path.replace(found[-1])
    (folder / "new").rmdir()
    return found


def distribution(call: Call) -> dict[str, Array]:
    """What decides how hard a call is: g, its sum over whole chunks of 64, beta, and cosines of neighbouring keys."""
    p = call.problem
    assert p.g is not None
    chunks = p.g[:, : p.g.shape[1] // 64 * 64]
    k = p.k / np.linalg.norm(p.k, axis=-1, keepdims=True)
    return {
        "g, nats per token": p.g,
        "g over a chunk of 64, nats": chunks.reshape(len(chunks), -1, 64, *chunks.shape[2:]).sum(2),
        "beta": p.beta,
        "cosine of a key and the next": (k[:, 1:] * k[:, :-1]).sum(-1),
    }


QUANTILES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)


def distribution_rows(named: Sequence[tuple[str, Call]]) -> Iterator[str]:
    """Lines of the table of distributions."""
    yield "| what | call | least | 1% | 10% | median | 90% | 99% | greatest |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for what in distribution(named[0][1]):
        for name, call in named:
            numbers = np.quantile(distribution(call)[what], QUANTILES)
            yield f"| {what} | {name} | {' | '.join(f'{x:.3g}' for x in numbers)} |"


def words(calls: Sequence[Call]) -> str:
    """What of it makes a kernel's life hard, in one sentence."""
    found = [distribution(call) for call in calls]
    chunk = min(float(d["g over a chunk of 64, nats"].min()) for d in found)
    close = max(float(np.median(d["cosine of a key and the next"])) for d in found)
    return (
        f"After training a chunk of 64 decays by up to {-chunk:.0f} nats (such a decay is 0 in float16 from 17 nats "
        f"on, in float32 from 104), and in one layer half of the keys have a cosine above {close:.2f} with the next "
        "one."
    )


def verdict_rows(files: Sequence[Path]) -> Iterator[str]:
    """Lines of the table of verdicts, `CHECKED` on every file and target; then what ran."""
    yield "| call | target | verdict | worst error over noise floor, by output |"
    yield "|---|---|---|---|"
    ran: dict[tuple[str, str], None] = {}
    for path in files:
        for name in TARGETS:
            try:
                target = resolve(name)
            except TargetError as error:
                yield f"| {path.stem} | {name} | not run: {error} | |"
                continue
            call, _ = load_call(path)
            outcomes, _, ctx = run_call(target, call if target.capabilities.backward else forward_only(call), CHECKED)
            ran[name, ctx.ran] = None
            floor = next((o for o in outcomes if o.check == "floor"), None)
            ratios = ", ".join(f"{n} {r:.2f}" for n, r in floor.ratios.items()) if floor else ""
            failed = sorted({f"{f.check} ({f.output})" for o in outcomes for f in o.failures})
            says = verdict_of(outcomes) + (f": {', '.join(failed)}" if failed else "")
            yield f"| {path.stem} | {name} | {says} | {ratios} |"
    yield ""
    yield from (f"- {name} ran {what}" for name, what in ran)


def report(losses: Sequence[float], before: Sequence[Path], after: Sequence[Path]) -> str:
    """The whole report as Markdown."""
    named = [(path.stem, load_call(path)[0]) for path in (*before, *after)]
    known = ", ".join(f"{n} {v}" for n, v in versions().items() if n in ("python", "torch", "transformers", "numpy"))
    text = "\n".join(
        [
            "# Calls of a trained model", "",
            f"`python -m verikda.capture_example` with {known}: a Kimi-Linear of 3 layers (2 of the delta rule, 2 "
            f"heads, K = V = 32, softplus gates outside the operator), {len(losses)} steps of {BATCH} x {TOKENS} bytes "
            f"of Python's documentation; {losses[0]:.2f} nats per byte before, {np.mean(losses[-5:]):.2f} at the end. "
            f"Kept: one training step of {TOKENS} tokens, in [captured/](captured/); `verikda replay FILE TARGET` "
            "judges any target on them.", "",
            "## Gates, beta and keys", "",
            words([call for _, call in named[len(before) :]]), "",
            *distribution_rows(named), "", VERDICTS,
        ]
    )  # fmt: skip
    return judged_again(text, after)


def judged_again(text: str, files: Sequence[Path]) -> str:
    """A report with its verdicts made anew.

    Raises
    ------
    ValueError
        When the text has no section for them, or there is no file.
    """
    before, section, _ = text.partition(VERDICTS)
    if not section:
        raise ValueError(f"the report has no section {VERDICTS!r}; leave out --again to train and write it whole")
    if not files:
        raise ValueError("the folder holds no captured call; leave out --again to train and keep some")
    checks = f"Checks: {', '.join(c.name for c in CHECKED)}."
    return "\n".join([before + section, "", checks, "", *verdict_rows(files), ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, keep, judge, write."""
    parser = argparse.ArgumentParser(
        prog="python -m verikda.capture_example",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of training")
    parser.add_argument(
        "--folder", type=Path, default=Path("reports/cpu/captured"), help="of the captured calls; it is emptied first"
    )
    parser.add_argument(
        "--report", type=Path, default=Path("reports/cpu/captured.md"), help="Markdown file that is written"
    )
    parser.add_argument("--again", action="store_true", help="train nothing: judge the calls in the folder again")
    args = parser.parse_args(arguments)
    started = time.perf_counter()
    if args.again:
        try:
            text = judged_again(args.report.read_text(encoding="utf-8"), sorted(args.folder.glob("*.safetensors")))
        except (OSError, ValueError) as error:
            parser.error(str(error))
        args.report.write_text(text, encoding="utf-8")
        return
    net = model()
    shutil.rmtree(args.folder, ignore_errors=True)
    # where fla is installed the decorated function would hand tensors of the CPU to Triton
    with patch(f"{MODULE}.{NAME}", torch_path(NAME)):
        before = keep(net, args.folder, "untrained-float32")
        losses = train(net, args.steps, print)
        after = keep(net, args.folder, "trained-float32") + keep(net.bfloat16(), args.folder, "trained-bfloat16")
    args.report.write_text(report(losses, before, after), encoding="utf-8")
    for path in before:
        path.unlink()  # only their distribution is of interest
    print(f"wrote {args.report} in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
