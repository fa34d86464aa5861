"""FFN width and number of heads at equal parameters and equal training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead
from clearhead.configs import AttentionConfig, Causal, FeedForwardConfig, RotaryConfig, SequenceModelConfig
from clearhead.measure.growth import match_size, parameters
from clearhead.models.llama import decoder
from clearhead.models.model import SequenceModel, build

from .result import Progress, Result, Rows, no_progress, require, tidy
from .training_loop import train_steps

BYTES = 256  # the vocabulary


def shape(
    *,
    ratios: Sequence[int] = (1, 2, 4, 8),
    heads: Sequence[int] = (1, 2, 4, 8, 16),
    dim: int = 96,
    layers: int = 2,
    steps: int = 150,
    batch: int = 16,
    context: int = 64,
    runs: int = 2,
    data: Sequence[str] = (),
    seed: int = 0,
    progress: Progress = no_progress,
) -> Result:
    """Train byte-level models of equal size, varying d_ff/d and then the number of heads."""
    require(1, ratios=ratios, heads=heads, dim=dim, layers=layers, steps=steps, batch=batch, context=context, runs=runs)
    if dim % (2 * max(heads)):
        raise ValueError(f"dim is {dim}, but must be a multiple of {2 * max(heads)}: rotary heads need an even width")
    read, held = corpus(data, context)
    usual = config(dim, layers, 4, 4 * dim)
    kinds: dict[tuple[str, int], SequenceModelConfig] = {}
    for ratio in ratios:
        kinds["d_ff/d", ratio] = match_parameters(usual, layers, ratio)
    for count in heads:
        kinds["heads", count] = config(dim, layers, count, 4 * dim)
    rows: Rows = []
    for (what, value), one in kinds.items():
        losses = []
        for run in range(runs):
            progress(f"{what} = {value}, run {run + 1} of {runs}")
            losses.append(train_model(one, read, held, steps, batch, context, seed + run))
        width = one.stack.dim
        hidden = one.weights()["stack.blocks.0.ffn.up.weight"][0]
        spread = max(losses) - min(losses)
        rows.append((what, value, width, hidden, parameters(one), sum(losses) / runs, spread if runs > 1 else None))
    return Result(
        name="shape",
        claim="At equal parameters, d_ff = 4·d and several heads are the right shape.",
        found=summarize(rows, steps),
        columns=("varied", "value", "d", "d_ff", "parameters", "loss", "spread"),
        rows=rows,
        draw=lambda picture, theme: draw(picture, rows),
        more={"bytes": len(read) + len(held)},
    )


def config(dim: int, layers: int, heads: int, hidden: int) -> SequenceModelConfig:
    mixer = AttentionConfig(heads=heads, mask=Causal(), rotary=RotaryConfig())
    ffn = FeedForwardConfig(hidden=hidden, bias=False)
    return decoder(dim=dim, layers=layers, mixer=mixer, ffn=ffn, vocabulary=BYTES)


def match_parameters(like: SequenceModelConfig, layers: int, ratio: int) -> SequenceModelConfig:
    """Solve 2·V·d + layers·d²(4 + 2·ratio) = parameters of `like` for the width d, then adjust the FFN for rounding."""
    square, line = layers * (4 + 2 * ratio), 2 * BYTES
    width = ((line**2 + 4 * square * parameters(like)) ** 0.5 - line) / (2 * square)
    width = max(8, 8 * round(width / 8))  # four rotary heads of even width
    return match_size(config(width, layers, 4, ratio * width), like, "parameters", 1, f"d_ff/d = {ratio}")


def corpus(paths: Sequence[str], context: int) -> tuple[Tensor, Tensor]:
    """Return training bytes and held-out bytes (the last tenth). Default text: this package's source."""
    files = [Path(path) for path in paths] or sorted(Path(clearhead.__file__).parent.rglob("*.py"))
    whole = b"\n".join(file.read_bytes() for file in files)
    if len(whole) < 20 * context:
        raise ValueError(f"the text has {len(whole)} bytes, but needs at least {20 * context}")
    tokens = torch.from_numpy(np.frombuffer(whole, np.uint8).astype(np.int64))
    cut = len(tokens) - len(tokens) // 10
    return tokens[:cut], tokens[cut:]


def train_model(
    config: SequenceModelConfig, read: Tensor, held: Tensor, steps: int, batch: int, context: int, seed: int
) -> float:
    """The loss on held-out windows after training."""
    torch.manual_seed(seed)
    model = build(config)
    assert isinstance(model, SequenceModel), "a sequence config builds a sequence model"
    generator = torch.Generator().manual_seed(seed)

    def windows(text: Tensor, count: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(0, len(text) - context - 1, (count, 1), generator=generator)
        return text[starts + torch.arange(context + 1)]

    def loss_of(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    for _ in train_steps(model, lambda: loss_of(windows(read, batch, generator)), steps=steps, lr=3e-3):
        pass
    with torch.inference_mode():
        return float(loss_of(windows(held, 256, torch.Generator().manual_seed(0))))


def summarize(rows: Rows, steps: int) -> str:
    findings = []
    noise = max((row[6] or 0.0) for row in rows)
    for what in ("d_ff/d", "heads"):
        mine = [row for row in rows if row[0] == what]
        best = min(mine, key=lambda row: row[5])
        worst = max(mine, key=lambda row: row[5])
        findings.append(f"of {what} the best is {best[1]} with {best[5]:.3f}, the worst {worst[1]} with {worst[5]:.3f}")
    return (
        f"After {steps} steps at equal parameters, {'; '.join(findings)}. Runs of one shape differ by up to "
        f"{noise:.3f}, so smaller differences mean nothing. Such short runs favour fast learners, and small models "
        "have most of their parameters in the embedding: do not conclude anything about large models."
    )


def draw(picture: Any, rows: Rows) -> None:
    picture.suptitle("Shape at equal parameters: loss on held-out text")
    axes = picture.subplots(1, 2, sharey=True)
    labels = {"d_ff/d": "d_ff / d (d adjusted)", "heads": "heads (each of width d / heads)"}
    for axis, (what, label) in zip(axes, labels.items(), strict=True):
        mine = [row for row in rows if row[0] == what]
        at = [row[1] for row in mine]
        axis.errorbar(at, [row[5] for row in mine], [(row[6] or 0) / 2 for row in mine], fmt="o-", capsize=3)
        axis.set(xscale="log", xlabel=label, title=what)
        axis.set_xticks(at, [f"{row[1]}\nd={row[2]}" if what == "d_ff/d" else str(row[1]) for row in mine])
        axis.set_xticks([], minor=True)
    axes[0].set_ylabel("loss (nats per byte); bars: spread of runs")
    tidy(*axes)
