"""Decoding options: how tokens are filtered and sampled, and when a text stops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from .base import Config, ConfigError


@dataclass(frozen=True)
class Power(Config):
    """|y|^α, the length penalty of `transformers` and CTranslate2. α = 0: no penalty, α = 1: mean log-probability.

    >>> DecodingConfig(beams=4, length_penalty=Power(0.6)).length_penalty
    Power(alpha=0.6)
    """

    alpha: float = 1.0

    def check(self) -> None:
        check_alpha(self.alpha)

    def __call__(self, length: int) -> float:
        return float(length) ** self.alpha


@dataclass(frozen=True)
class Wu(Config):
    """((5 + |y|)/6)^α  (Wu et al. 2016, equation 14).

    >>> DecodingConfig(beams=4, length_penalty=Wu(0.6)).length_penalty
    Wu(alpha=0.6)
    """

    alpha: float = 0.6

    def check(self) -> None:
        check_alpha(self.alpha)

    def __call__(self, length: int) -> float:
        return ((5 + length) / 6) ** self.alpha


LengthPenalty = Power | Wu


def check_alpha(alpha: float) -> None:
    if not -10 <= alpha <= 10:
        raise ConfigError(f"alpha of the length penalty is {alpha}, but must be between -10 and 10")


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(Config):
    """Everything besides the model and the prompt that decides the generated text.

    The default is greedy. A temperature, top_k, top_p or min_p turns sampling on; beams > 1 is beam search.

    >>> DecodingConfig(temperature=0.8, top_p=0.95, max_new_tokens=50).temperature
    0.8
    """

    max_new_tokens: int | None = None  # None: 256, or more for a long translation; the model's context is the bound
    temperature: float | None = None  # 0: greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    beams: int = 1
    length_penalty: LengthPenalty = Power(1.0)
    early_stopping: bool | Literal["never"] = False  # same meaning as in `transformers`
    n: int = 1  # texts per prompt: samples, or the best beams
    seed: int | None = None  # None: a new random seed every time
    stop: tuple[str, ...] = ()  # stop strings; the text ends before them
    ends: tuple[int, ...] = ()  # tokens that end a text
    banned: tuple[int, ...] = ()  # tokens that must not be written
    start: int | None = None  # first token of an empty prompt, or of an encoder–decoder's target
    forced_end: int | None = None  # last token of a text that reaches max_new_tokens

    def check(self) -> None:
        self.require_positive("max_new_tokens", "top_k", "repetition_penalty", "beams", "n")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}, but must be a finite number ≥ 0; 0 is greedy")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value}, but must be between 0 and 1")
        if "" in self.stop:
            raise ConfigError("a stop string is empty, which would stop every text at once; remove it")
        if self.beams > 1 and self.sampling:
            raise ConfigError(
                f"beams={self.beams} is beam search, which does not sample; drop temperature, top_k, top_p and min_p"
            )
        if self.beams > 1 and self.stop:
            raise ConfigError("stop strings do not work with beam search; drop stop or beams")
        if self.beams > 1 and self.n > self.beams:
            raise ConfigError(
                f"n={self.n} is more than beams={self.beams}; a beam search returns at most as many texts as beams"
            )
        if self.beams == 1 and self.n > 1 and not self.sampling:
            raise ConfigError(f"n={self.n} greedy texts would all be the same; set temperature or beams")

    @property
    def sampling(self) -> bool:
        """Whether tokens are sampled at random."""
        if self.temperature is not None:
            return self.temperature > 0
        return any(given is not None for given in (self.top_k, self.top_p, self.min_p))


class DecodingOptions(TypedDict, total=False):
    """The fields of `DecodingConfig` as options of `model.generate`. None keeps the checkpoint's default."""

    max_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    beams: int | None
    length_penalty: LengthPenalty | None
    early_stopping: bool | Literal["never"] | None
    n: int | None
    seed: int | None
    stop: str | Sequence[str] | None
    ends: Sequence[int] | None
    never: Sequence[int] | None
    start: int | None
    forced_end: int | None
