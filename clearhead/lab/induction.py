"""Induction heads grow in a model of two layers, and not in one of one: the score of each head over training.

A text is a few random tokens, over and over. Whoever looks for the earlier place of the token at hand, and reads what
came after it, knows what comes next. The first layer has to tell every token who came before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead.configs import AttentionConfig, Causal, FeedForwardConfig, RotaryConfig
from clearhead.models.assemble import SequenceModel, build
from clearhead.models.llama import decoder

from .learn import learn, moments
from .result import Result, Rows, Say, quiet, require, tidy

PROMPTS = 4  # on which scores are taken


@dataclass(frozen=True)
class Seen:
    """A model at one step: its loss on new tokens and on those that came before, and the best head of each kind."""

    step: int
    first: float  # met for the first time
    second: float  # met again
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
    say: Say = quiet,
) -> Result:
    """Train both, and look at their heads on the way."""
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
        curves[layers] = grown(model, vocabulary, half, batch, steps, seed, say)
    rows: Rows = [
        (two.step, two.first, two.second, two.induction, two.previous, one.second, one.induction)
        for one, two in zip(*curves.values(), strict=True)
    ]
    return Result(
        name="induction",
        claim="A model of two layers grows induction heads, suddenly, and its loss on repeated text falls with them.",
        found=found(curves),
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


def texts(count: int, vocabulary: int, half: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Texts, and which of their tokens have come before: from the second of the repetition on.

    Each has a period of its own, at most `half`, or a head that reads so many tokens back would do.
    """
    period = torch.randint(half // 2 + 1, half + 1, (count, 1), generator=generator)
    once = torch.randint(0, vocabulary, (count, half), generator=generator)
    at = torch.arange(2 * half)[None]
    return once.gather(1, at % period), at > period


def grown(model: SequenceModel, vocabulary: int, half: int, batch: int, steps: int, seed: int, say: Say) -> list[Seen]:
    generator = torch.Generator().manual_seed(seed)
    tested = texts(256, vocabulary, half, torch.Generator().manual_seed(seed + 1))
    looks = moments(steps, 14)

    def loss_of() -> Tensor:
        tokens, _ = texts(batch, vocabulary, half, generator)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    curve = [look(model, *tested, 0)]
    for step, loss in learn(model, loss_of, steps=steps, lr=3e-3):
        if step % 50 == 0:
            say(f"layers {len(model.stack.blocks)}, step {step} of {steps}, loss {loss:.2f}")
        if step in looks:
            curve.append(look(model, *tested, step))
    return curve


@torch.inference_mode()
def look(model: SequenceModel, tokens: Int[Tensor, "B T"], again: Bool[Tensor, "B T"], step: int) -> Seen:
    """Scores are those of `clearhead inspect`: the share of weight on what such a head would read."""
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

    return Seen(step, float(losses[~old].mean()), float(losses[old].mean()), best("induction"), best("previous token"))


def found(curves: dict[int, list[Seen]]) -> str:
    two, one = curves[2], curves[1]
    rise = max(range(1, len(two)), key=lambda i: two[i].induction - two[i - 1].induction)
    return (
        f"With two layers the best induction score goes from {two[0].induction:.2f} to {two[-1].induction:.2f}, the "
        f"most between steps {two[rise - 1].step} and {two[rise].step}, where the loss on what came before goes from "
        f"{two[rise - 1].second:.2f} to {two[rise].second:.2f}; it ends at {two[-1].second:.2f}, that on new tokens, "
        f"which nothing foretells, at {two[-1].first:.2f}. With one layer the score ends at {one[-1].induction:.2f} "
        f"and the loss at {one[-1].second:.2f}: it knows which tokens the text has, not their order."
    )


def draw(picture: Any, curves: dict[int, list[Seen]], vocabulary: int) -> None:
    picture.suptitle("Induction heads: a few random tokens, over and over")
    left, right = picture.subplots(1, 2)
    for layers, line in ((2, "-"), (1, "--")):
        curve = curves[layers]
        steps = [max(seen.step, 0.7) for seen in curve]
        name = f"{layers} layer{'s' * (layers > 1)}"
        left.plot(steps, [seen.induction for seen in curve], f"o{line}", markersize=3, label=f"{name}: induction")
        left.plot(steps, [seen.previous for seen in curve], f"s{line}", markersize=3, label=f"{name}: previous token")
        right.plot(steps, [seen.second for seen in curve], f"o{line}", markersize=3, label=f"{name}: what came before")
        right.plot(steps, [seen.first for seen in curve], f"s{line}", markersize=3, label=f"{name}: new tokens")
    right.axhline(torch.log(torch.tensor(float(vocabulary))).item(), color="gray", linewidth=0.8, label="a guess: ln V")
    left.set(
        xlabel="step", ylabel="share of weight, best head", title="what heads read", xscale="log", ylim=(-0.03, 1.03)
    )
    right.set(xlabel="step", ylabel="loss (nats per token)", title="what it is worth", xscale="log", ylim=(0, None))
    tidy(left, right)
