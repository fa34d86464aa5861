"""Attention against recurrence at equal parameters: throughput, recall at a distance, cost of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead.configs import SequenceModelConfig
from clearhead.configs.base import ONE
from clearhead.measure.growth import ModelSize, match_size, measure, mixers, of_mixer, parameters
from clearhead.models.model import SequenceModel, build

from .induction import repeating_texts
from .result import Progress, Result, Rows, no_progress, require, tidy
from .training_loop import train_steps

NAMES = {"flash": "attention", "lstm": "LSTM"}
TESTED, WORDS = 512, 32  # test texts, and vocabulary size


def lstm(
    *,
    lengths: Sequence[int] = (128, 256, 512, 1024),
    dim: int = 64,
    layers: int = 2,
    half: int = 16,
    steps: int = 600,
    batch: int = 64,
    rounds: int = 3,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Result:
    """Time both models, train both on a recall task, and count the numbers each keeps while decoding."""
    require(8, lengths=lengths, dim=dim)
    require(2, half=half)
    require(1, layers=layers, steps=steps, batch=batch, rounds=rounds)
    size = ModelSize(dim=dim, layers=layers, heads=4, vocabulary=128)
    rows: Rows = []
    recalled: dict[str, dict[int, float]] = {}
    for name, called in NAMES.items():
        config = matched_config(name, size)
        for length in sorted(lengths):
            progress(f"{called}, {length} tokens")
            timed = measure(config, length, 1, rounds, fused=True)
            forward, backward, decode = (timed.seconds[which] or 0.0 for which in ("forward", "backward", "decode"))
            rate = length / (forward + backward)
            rows.append((called, length, parameters(config), rate, decode * 1e3, state_size(config, length)))
        recalled[called] = recall(config, half, steps, batch, seed, partial(report, progress, called))
    return Result(
        name="lstm",
        claim="Attention trains faster and recalls at any distance; a recurrence decodes at constant cost.",
        found=summarize(rows, recalled, steps),
        columns=("model", "tokens", "parameters", "training tokens/s", "ms per decoded token", "numbers state_size"),
        rows=rows,
        draw=lambda picture, theme: draw(picture, rows, recalled),
        more={"recall": {name: {str(far): share for far, share in found.items()} for name, found in recalled.items()}},
        size=(11, 7.5),
    )


def report(progress: Progress, name: str, text: str) -> None:
    progress(f"{name}: {text}")


def matched_config(name: str, size: ModelSize) -> SequenceModelConfig:
    """The config with as many parameters as the attention model."""
    configs = {each: of_mixer(each, mixers(size)[each], size).make(64) for each in NAMES}
    return match_size(configs[name], configs["flash"], "parameters", 64, name)


def state_size(config: SequenceModelConfig, length: int) -> int:
    """Numbers in the decoding state after `length` tokens."""
    return sum(prod(shape) for shape in config.state(ONE.with_sizes(S=length)).values())


def recall(
    config: SequenceModelConfig, half: int, steps: int, batch: int, seed: int, progress: Progress
) -> dict[int, float]:
    """Train on repeating texts and return the accuracy on repeated tokens, by distance."""
    torch.manual_seed(seed)
    model = build(config)
    assert isinstance(model, SequenceModel), "a sequence config builds a sequence model"
    generator = torch.Generator().manual_seed(seed)

    def loss_of() -> Tensor:
        tokens, _ = repeating_texts(batch, WORDS, half, generator)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    for step, loss in train_steps(model, loss_of, steps=steps, lr=3e-3):
        if step % 20 == 0:
            progress(f"step {step} of {steps}, loss {loss:.2f}")
    tokens, again = repeating_texts(TESTED, WORDS, half, torch.Generator().manual_seed(seed + 1))
    with torch.inference_mode():
        return recall_by_distance(model.eval()(tokens[:, :-1]).argmax(-1), tokens, again)


def recall_by_distance(
    predicted: Int[Tensor, "B N"], tokens: Int[Tensor, "B T"], again: Bool[Tensor, "B T"]
) -> dict[int, float]:
    """Accuracy on repeated tokens, by the period of the text."""
    right, period = predicted == tokens[:, 1:], (~again).sum(1) - 1
    return {int(far): float(right[period == far][again[period == far, 1:]].float().mean()) for far in period.unique()}


def summarize(rows: Rows, recalled: dict[str, dict[int, float]], steps: int) -> str:
    longest, shortest = max(row[1] for row in rows), min(row[1] for row in rows)
    at = {(row[0], row[1]): row for row in rows}
    ours, theirs = (at[name, longest] for name in NAMES.values())
    mean = {name: sum(shares.values()) / len(shares) for name, shares in recalled.items()}
    grows = {name: at[name, longest][4] / at[name, shortest][4] for name in NAMES.values()}
    return (
        f"At {longest} tokens attention trains on {ours[3] / theirs[3]:.1f} times as many tokens a second here. After "
        f"{steps} steps on repeating texts it predicts {mean['attention']:.0%} of the repeated tokens, the "
        f"LSTM {mean['LSTM']:.0%}; a guess is right {1 / WORDS:.0%} of the time. From {shortest} to "
        f"{longest} tokens a decoded token takes {grows['attention']:.2f} times as long with attention and "
        f"{grows['LSTM']:.2f} times with the LSTM, which keeps {theirs[5]:,} numbers where attention keeps "
        f"{ours[5]:,}. Times are for this machine and these sizes: in a small model, attention "
        "is a small part of a token's cost."
    )


def draw(picture: Any, rows: Rows, recalled: dict[str, dict[int, float]]) -> None:
    (train, recall), (write, keep) = picture.subplots(2, 2)
    for name, line in zip(NAMES.values(), ("o-", "s--"), strict=True):
        mine = [row for row in rows if row[0] == name]
        lengths = [row[1] for row in mine]
        train.loglog(lengths, [row[3] for row in mine], line, label=name)
        write.semilogx(lengths, [row[4] for row in mine], line, label=name)
        keep.loglog(lengths, [row[5] for row in mine], line, label=name)
        recall.plot(list(recalled[name]), list(recalled[name].values()), line, label=name)
    train.set(xlabel="tokens in the text", ylabel="tokens per second", title="training: forward and backward")
    recall.set(xlabel="tokens ago", ylabel="accuracy", title="recall", ylim=(-0.03, 1.03))
    write.set(xlabel="tokens before", ylabel="ms", title="one decoded token")
    write.set_ylim(bottom=0)
    keep.set(xlabel="tokens before", ylabel="numbers", title="decoding state")
    for axis in (train, write, keep):
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axis.set_xticks([], minor=True)
    tidy(train, recall, write, keep)
