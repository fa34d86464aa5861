"""Induction heads form in a two-layer model but not in a one-layer model: head scores during training.

A text repeats a few random tokens. An induction head finds the earlier copy of the current token and reads the token
after it, which predicts the next one. For that, the first layer must tell each token what precedes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead.configs import AttentionConfig, Causal, FeedForwardConfig, RotaryConfig
from clearhead.models.llama import decoder
from clearhead.models.model import SequenceModel, build

from .result import Progress, Result, Rows, no_progress, require, tidy
from .training_loop import record_steps, train_steps

PROMPTS = 4  # texts on which heads are scored


@dataclass(frozen=True)
class Snapshot:
    """A model at one step: loss on new and on repeated tokens, and the best head score of each kind."""

    step: int
    first: float  # loss on new tokens
    second: float  # loss on repeated tokens
    induction: float
    previous: float


def induction(
    *,
    vocabulary: int = 32,
    half: int = 16,
    dim: int = 64,
    heads: int = 4,
    steps: int = 800,
    batch: int = 64,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Result:
    """Train both models and score their heads during training."""
    require(2, vocabulary=vocabulary, half=half)
    require(1, dim=dim, heads=heads, steps=steps, batch=batch)
    curves = {}
    for layers in (1, 2):
        torch.manual_seed(seed)
        config = decoder(
            dim=dim,
            layers=layers,
            mixer=AttentionConfig(heads=heads, mask=Causal(), rotary=RotaryConfig()),
            ffn=FeedForwardConfig(hidden=2 * dim),
            vocabulary=vocabulary,
        )
        model = build(config)
        assert isinstance(model, SequenceModel), "a sequence config builds a sequence model"
        curves[layers] = train_and_record(model, vocabulary, half, batch, steps, seed, progress)
    rows: Rows = [
        (two.step, two.first, two.second, two.induction, two.previous, one.second, one.induction)
        for one, two in zip(*curves.values(), strict=True)
    ]
    return Result(
        name="induction",
        claim="A two-layer model forms induction heads abruptly, and its loss on repeated text falls with them.",
        found=summarize(curves),
        columns=(
            "step",
            "loss, new",
            "loss, again",
            "induction",
            "previous token",
            "1 layer: loss, again",
            "1 layer: induction",
        ),
        rows=rows,
        draw=lambda picture, theme: draw(picture, curves, vocabulary),
    )


def repeating_texts(count: int, vocabulary: int, half: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return repeating texts and a mask of the repeated tokens.

    Each text has its own period of at most `half`; with one fixed period, reading a fixed distance back would suffice.
    """
    period = torch.randint(half // 2 + 1, half + 1, (count, 1), generator=generator)
    once = torch.randint(0, vocabulary, (count, half), generator=generator)
    at = torch.arange(2 * half)[None]
    return once.gather(1, at % period), at > period


def train_and_record(
    model: SequenceModel, vocabulary: int, half: int, batch: int, steps: int, seed: int, progress: Progress
) -> list[Snapshot]:
    generator = torch.Generator().manual_seed(seed)
    tested = repeating_texts(256, vocabulary, half, torch.Generator().manual_seed(seed + 1))
    recorded = record_steps(steps, 14)

    def loss_of() -> Tensor:
        tokens, _ = repeating_texts(batch, vocabulary, half, generator)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    curve = [measure_heads(model, *tested, 0)]
    for step, loss in train_steps(model, loss_of, steps=steps, lr=3e-3):
        if step % 50 == 0:
            progress(f"layers {len(model.stack.blocks)}, step {step} of {steps}, loss {loss:.2f}")
        if step in recorded:
            curve.append(measure_heads(model, *tested, step))
    return curve


@torch.inference_mode()
def measure_heads(model: SequenceModel, tokens: Int[Tensor, "B T"], again: Bool[Tensor, "B T"], step: int) -> Snapshot:
    """Score heads as `clearhead inspect` does: the attention weight on the keys that such a head would read."""
    model.eval()
    losses = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
    old = again[:, 1:]
    scores: dict[tuple[str, str], list[float]] = {}
    for prompt in tokens[:PROMPTS].tolist():
        for head in model.inspect(prompt).heads:
            for kind in ("induction", "previous token"):
                scores.setdefault((kind, head.name), []).append(head.scores[kind] or 0.0)
    model.train()

    def best(kind: str) -> float:
        return max(sum(values) / len(values) for (of, _), values in scores.items() if of == kind)

    return Snapshot(
        step, float(losses[~old].mean()), float(losses[old].mean()), best("induction"), best("previous token")
    )


def summarize(curves: dict[int, list[Snapshot]]) -> str:
    two, one = curves[2], curves[1]
    rise = max(range(1, len(two)), key=lambda i: two[i].induction - two[i - 1].induction)
    return (
        f"With two layers the best induction score goes from {two[0].induction:.2f} to {two[-1].induction:.2f}, mostly "
        f"between steps {two[rise - 1].step} and {two[rise].step}, where the loss on repeated tokens goes from "
        f"{two[rise - 1].second:.2f} to {two[rise].second:.2f}; it ends at {two[-1].second:.2f}; on new tokens, "
        f"which cannot be predicted, at {two[-1].first:.2f}. With one layer the score ends at {one[-1].induction:.2f} "
        f"and the loss at {one[-1].second:.2f}: it learns which tokens a text contains, not their order."
    )


def draw(picture: Any, curves: dict[int, list[Snapshot]], vocabulary: int) -> None:
    picture.suptitle("Induction heads on repeating random tokens")
    left, right = picture.subplots(1, 2)
    for layers, line in ((2, "-"), (1, "--")):
        curve = curves[layers]
        steps = [max(seen.step, 0.7) for seen in curve]
        name = f"{layers} layer{'s' * (layers > 1)}"
        left.plot(steps, [seen.induction for seen in curve], f"o{line}", markersize=3, label=f"{name}: induction")
        left.plot(steps, [seen.previous for seen in curve], f"s{line}", markersize=3, label=f"{name}: previous token")
        right.plot(steps, [seen.second for seen in curve], f"o{line}", markersize=3, label=f"{name}: repeated tokens")
        right.plot(steps, [seen.first for seen in curve], f"s{line}", markersize=3, label=f"{name}: new tokens")
    right.axhline(
        torch.log(torch.tensor(float(vocabulary))).item(), color="gray", linewidth=0.8, label="guessing: ln V"
    )
    left.set(xlabel="step", ylabel="attention weight, best head", title="head scores", xscale="log", ylim=(-0.03, 1.03))
    right.set(xlabel="step", ylabel="loss (nats per token)", title="loss", xscale="log", ylim=(0, None))
    tidy(left, right)
