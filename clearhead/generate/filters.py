"""What is done to logits before a token is chosen: small parts, applied one after the other.

Each takes the logits of every row and which tokens the row has read or written so far, and gives new logits. What a
part rules out becomes −∞. They mean what the parts of `transformers` mean by the same names, and stand in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.configs import DecodingConfig

Filter = Callable[[Float[Tensor, "B V"], Bool[Tensor, "B V"]], Float[Tensor, "B V"]]


@dataclass(frozen=True)
class RepetitionPenalty:
    """Logits of tokens seen before: divided by the penalty, or multiplied where negative  (Keskar et al. 2019)."""

    penalty: float

    def __call__(self, logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        less = torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return torch.where(seen, less, logits)


@dataclass(frozen=True)
class Never:
    """Tokens that are never written."""

    tokens: tuple[int, ...]

    def __call__(self, logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        return logits.index_fill(1, torch.tensor(self.tokens, device=logits.device), -torch.inf)


@dataclass(frozen=True)
class Temperature:
    """logits/temperature."""

    temperature: float

    def __call__(self, logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        return logits / self.temperature


@dataclass(frozen=True)
class TopK:
    """Only the `count` likeliest tokens, and those as likely as the last of them."""

    count: int

    def __call__(self, logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        least = logits.topk(min(self.count, logits.shape[1]), dim=1).values[:, -1:]
        return logits.masked_fill(logits < least, -torch.inf)


@dataclass(frozen=True)
class TopP:
    """The fewest likeliest tokens whose probabilities come to `share` together  (Holtzman et al. 2020)."""

    share: float

    def __call__(self, logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        ordered, tokens = logits.sort(dim=1)  # from the least likely
        out = ordered.softmax(dim=1).cumsum(dim=1) <= 1 - self.share
        out[:, -1] = False
        return logits.masked_fill(torch.zeros_like(out).scatter(1, tokens, out), -torch.inf)


@dataclass(frozen=True)
class MinP:
    """Tokens at least `share` times as probable as the likeliest  (Nguyen et al. 2024)."""

    share: float

    def __call__(self, logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        probabilities = logits.softmax(dim=1)
        return logits.masked_fill(probabilities < self.share * probabilities.amax(dim=1, keepdim=True), -torch.inf)


def filters(config: DecodingConfig) -> tuple[Filter, ...]:
    """The parts that a config asks for, in their order."""
    parts: list[Filter] = []
    if config.repetition_penalty != 1:
        parts.append(RepetitionPenalty(config.repetition_penalty))
    if config.never:
        parts.append(Never(config.never))
    if not config.draws:
        return tuple(parts)
    if config.temperature not in (None, 1):
        parts.append(Temperature(config.temperature))
    if config.top_k is not None:
        parts.append(TopK(config.top_k))
    if config.top_p is not None and config.top_p < 1:
        parts.append(TopP(config.top_p))
    if config.min_p is not None:
        parts.append(MinP(config.min_p))
    return tuple(parts)


def filtered(logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"], parts: Iterable[Filter]) -> Float[Tensor, "B V"]:
    """In float32, through every part."""
    logits = logits.float()
    for part in parts:
        logits = part(logits, seen)
    return logits


def probabilities(logits: Float[Tensor, "B V"], draws: bool) -> Float[Tensor, "B V"]:
    """What a token is drawn from: the softmax, or all on the likeliest token where nothing is drawn."""
    if draws:
        return logits.double().softmax(dim=1)
    return torch.zeros_like(logits, dtype=torch.float64).scatter_(1, logits.argmax(dim=1, keepdim=True), 1.0)


def draw(chances: Float[Tensor, "B V"], uniform: Float[Tensor, "B"]) -> Tensor:
    """The token at which the running sum of chances passes a uniform number: one number a token, so that what a row
    draws depends on its own seed alone. A token of no chance is never drawn."""
    sums = chances.cumsum(dim=1)
    return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True).squeeze(1)


def uniforms(luck: torch.Generator, count: int) -> Float[Tensor, "N"]:
    """Numbers to draw by, each below 1 by more than rounding can undo."""
    return torch.rand(count, generator=luck, dtype=torch.float64) * (1 - 2**-40)


def luck_of(seed: int, sample: int) -> torch.Generator:
    """Where the numbers come from by which the `sample`-th text of a seed is drawn."""
    return torch.Generator().manual_seed((seed * 1_000_003 + sample) % 2**64)
