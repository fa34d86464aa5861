"""Filters: functions from logits to logits that run before a token is chosen.

A filter gets the logits of all rows, and which tokens each row has seen so far. It sets a forbidden token's logit to
−∞. The filters have the same meaning and order as the logits processors of `transformers`.
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
    """Lower the logits of seen tokens: positive ones / penalty, negative ones · penalty  (Keskar et al. 2019)."""

    penalty: float

    def __call__(self, logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        less = torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return torch.where(seen, less, logits)


@dataclass(frozen=True)
class BannedTokens:
    """Forbid these tokens."""

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
    """Keep the `count` most likely tokens, and any that tie with the last of them."""

    count: int

    def __call__(self, logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        least = logits.topk(min(self.count, logits.shape[1]), dim=1).values[:, -1:]
        return logits.masked_fill(logits < least, -torch.inf)


@dataclass(frozen=True)
class TopP:
    """Keep the smallest set of most likely tokens with total probability ≥ `share`  (Holtzman et al. 2020)."""

    share: float

    def __call__(self, logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        ordered, tokens = logits.sort(dim=1)  # ascending
        out = ordered.softmax(dim=1).cumsum(dim=1) <= 1 - self.share
        out[:, -1] = False  # always keep the most likely token
        return logits.masked_fill(torch.zeros_like(out).scatter(1, tokens, out), -torch.inf)


@dataclass(frozen=True)
class MinP:
    """Keep tokens with at least `share` times the probability of the most likely one  (Nguyen et al. 2024)."""

    share: float

    def __call__(self, logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        probabilities = logits.softmax(dim=1)
        return logits.masked_fill(probabilities < self.share * probabilities.amax(dim=1, keepdim=True), -torch.inf)


def build_filters(config: DecodingConfig) -> tuple[Filter, ...]:
    """The filters of a config, in the order in which they run."""
    filters: list[Filter] = []
    if config.repetition_penalty != 1:
        filters.append(RepetitionPenalty(config.repetition_penalty))
    if config.banned:
        filters.append(BannedTokens(config.banned))
    if not config.sampling:
        return tuple(filters)
    if config.temperature not in (None, 1):
        filters.append(Temperature(config.temperature))
    if config.top_k is not None:
        filters.append(TopK(config.top_k))
    if config.top_p is not None and config.top_p < 1:
        filters.append(TopP(config.top_p))
    if config.min_p is not None:
        filters.append(MinP(config.min_p))
    return tuple(filters)


def apply_filters(
    logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"], filters: Iterable[Filter]
) -> Float[Tensor, "B V"]:
    """Convert logits to float32 and run every filter in order."""
    logits = logits.float()
    for each in filters:
        logits = each(logits, seen)
    return logits


def probabilities(logits: Float[Tensor, "B V"], sampling: bool) -> Float[Tensor, "B V"]:
    """The probability of each token in float64. Without sampling, the most likely token has probability 1."""
    if sampling:
        return logits.double().softmax(dim=1)
    return torch.zeros_like(logits, dtype=torch.float64).scatter_(1, logits.argmax(dim=1, keepdim=True), 1.0)


def draw(chances: Float[Tensor, "B V"], uniform: Float[Tensor, "B"]) -> Tensor:
    """Sample a token for each row: the first at which the cumulative probability exceeds the row's uniform number.

    Each row has a number of its own, so its samples depend on its own seed alone. A token with probability 0 is never
    drawn.
    """
    sums = chances.cumsum(dim=1)
    return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True).squeeze(1)


def uniform_numbers(generator: torch.Generator, count: int) -> Float[Tensor, "N"]:
    """Uniform numbers from 0 to 1 − 2⁻⁴⁰. Closer to 1, rounding in `draw` could point past the last token."""
    return torch.rand(count, generator=generator, dtype=torch.float64) * (1 - 2**-40)


def sample_generator(seed: int, sample: int) -> torch.Generator:
    """The random stream of the `sample`-th text drawn with a seed."""
    return torch.Generator().manual_seed((seed * 1_000_003 + sample) % 2**64)
