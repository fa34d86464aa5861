"""Attention against recurrence, at equal parameters: throughput, recall at a distance, and the cost of inference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.configs import SequenceModelConfig
from clearhead.configs.base import ONE
from clearhead.measure.compare import Size, matched, measure, mixers, of_mixer, parameters
from clearhead.models.assemble import SequenceModel, build

from .learn import learn
from .result import Result, Rows, Say, quiet, require, tidy

NAMES = {"flash": "attention", "lstm": "LSTM"}
TESTED = 512


@dataclass(frozen=True)
class Recall:
    """Pairs of a key and a value, then questions: a key, to be answered by its value. Any key may be asked again, so
    that nothing follows from what was asked already."""

    pairs: int = 6
    words: int = 16  # of keys, and as many of values

    def texts(self, count: int, generator: torch.Generator) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B Pairs"]]:
        """Texts, and for each question how many tokens lie between it and where its value was last seen."""
        draw = torch.rand(count, self.words, generator=generator).argsort(1)
        keys = draw[:, : self.pairs]  # no key comes twice
        values = torch.randint(self.words, 2 * self.words, keys.shape, generator=generator)
        order = torch.randint(0, self.pairs, keys.shape, generator=generator)
        told = torch.stack((keys, values), 2).flatten(1)
        asked = torch.stack((keys.gather(1, order), values.gather(1, order)), 2).flatten(1)
        seen = (2 * torch.arange(self.pairs) + 1).repeat(count, 1)  # where each value was last
        distance = torch.empty_like(order)
        for i in range(self.pairs):
            here, which = 2 * self.pairs + 2 * i, order[:, i : i + 1]
            distance[:, i : i + 1] = here - seen.gather(1, which) - 1
            seen.scatter_(1, which, here + 1)
        return torch.cat((told, asked), 1), distance

    def answers(self, model: SequenceModel, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B Pairs V"]:
        """Logits at the questions."""
        return model(tokens[:, :-1])[:, 2 * self.pairs :: 2]

    def wanted(self, tokens: Int[Tensor, "B T"]) -> Int[Tensor, "B Pairs"]:
        return tokens[:, 2 * self.pairs + 1 :: 2]


def lstm(
    *,
    lengths: Sequence[int] = (128, 256, 512, 1024),
    dim: int = 128,
    layers: int = 2,
    pairs: int = 6,
    steps: int = 1000,
    batch: int = 64,
    rounds: int = 3,
    seed: int = 0,
    say: Say = quiet,
) -> Result:
    """Time both, train both to recall, and count what each keeps while it writes."""
    require(8, lengths=lengths, dim=dim)
    require(1, layers=layers, pairs=pairs, steps=steps, batch=batch, rounds=rounds)
    size = Size(dim=dim, layers=layers, heads=4, vocabulary=128)
    task = Recall(pairs)
    rows: Rows = []
    recalled: dict[str, dict[int, float]] = {}
    for name, called in NAMES.items():
        config = contestant(name, size)
        for length in sorted(lengths):
            say(f"{called}, {length} tokens")
            timed = measure(config, length, 1, rounds, fused=True)
            forward, backward, decode = (timed.seconds[which] or 0.0 for which in ("forward", "backward", "decode"))
            rate = length / (forward + backward)
            rows.append((called, length, parameters(config), rate, decode * 1e3, kept(config, length)))
        recalled[called] = recall(config, task, steps, batch, seed, partial(tell, say, called))
    return Result(
        name="lstm",
        claim="Attention trains faster and recalls at any distance; a recurrence writes at a cost that does not grow.",
        found=found(rows, recalled, pairs, steps),
        columns=("model", "tokens", "parameters", "training tokens/s", "ms per token written", "numbers kept"),
        rows=rows,
        draw=lambda picture, theme: draw(picture, rows, recalled),
        more={"recall": {name: {str(far): share for far, share in found.items()} for name, found in recalled.items()}},
        size=(11, 7.5),
    )


def tell(say: Say, name: str, text: str) -> None:
    say(f"{name}: {text}")


def contestant(name: str, size: Size) -> SequenceModelConfig:
    """As many parameters as the one with attention has."""
    configs = {each: of_mixer(each, mixers(size)[each], size).make(64) for each in NAMES}
    return matched(configs[name], configs["flash"], "parameters", 64, name)


def kept(config: SequenceModelConfig, length: int) -> int:
    """How many numbers decoding keeps after so many tokens."""
    return sum(prod(shape) for shape in config.state(ONE.having(S=length)).values())


def recall(config: SequenceModelConfig, task: Recall, steps: int, batch: int, seed: int, say: Say) -> dict[int, float]:
    """The share of right answers by the distance between value and question, after training."""
    torch.manual_seed(seed)
    model = build(config)
    assert isinstance(model, SequenceModel), "a sequence config builds a sequence model"
    generator = torch.Generator().manual_seed(seed)

    def loss_of() -> Tensor:
        tokens, _ = task.texts(batch, generator)
        return F.cross_entropy(task.answers(model, tokens).flatten(0, 1), task.wanted(tokens).flatten())

    for step, loss in learn(model, loss_of, steps=steps, lr=3e-3):
        if step % 20 == 0:
            say(f"step {step} of {steps}, loss {loss:.2f}")
    tokens, distance = task.texts(TESTED, torch.Generator().manual_seed(seed + 1))
    with torch.inference_mode():
        right = task.answers(model.eval(), tokens).argmax(-1) == task.wanted(tokens)
    return {int(far): float(right[distance == far].float().mean()) for far in distance.unique()}


def found(rows: Rows, recalled: dict[str, dict[int, float]], pairs: int, steps: int) -> str:
    longest, shortest = max(row[1] for row in rows), min(row[1] for row in rows)
    at = {(row[0], row[1]): row for row in rows}
    ours, theirs = (at[name, longest] for name in NAMES.values())
    mean = {name: sum(shares.values()) / len(shares) for name, shares in recalled.items()}
    grows = {name: at[name, longest][4] / at[name, shortest][4] for name in NAMES.values()}
    return (
        f"At {longest} tokens attention trains on {ours[3] / theirs[3]:.1f} times as many tokens a second here. After "
        f"{steps} steps on {pairs} pairs it answers {mean['attention']:.0%} right and the LSTM {mean['LSTM']:.0%}; "
        f"a guess among those told is right {1 / pairs:.0%} of the time. From {shortest} to {longest} tokens a written "
        f"token takes {grows['attention']:.2f} times as long with attention and {grows['LSTM']:.2f} times with the "
        f"LSTM, which keeps {theirs[5]:,} numbers where attention keeps {ours[5]:,}. Times are of this machine and "
        "these sizes: where one token is cheap, attention is a small part of it."
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
    recall.set(xlabel="tokens between value and question", ylabel="share right", title="recall", ylim=(-0.03, 1.03))
    write.set(xlabel="tokens before", ylabel="ms", title="one more token, written")
    write.set_ylim(bottom=0)
    keep.set(xlabel="tokens before", ylabel="numbers", title="kept while writing")
    for axis in (train, write, keep):
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axis.set_xticks([], minor=True)
    tidy(train, recall, write, keep)
