"""How tokens are chosen when a model writes: what is left out, how it is drawn, when it stops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from .base import Config, ConfigError


@dataclass(frozen=True)
class Power(Config):
    """|y|^α: what `transformers` and CTranslate2 divide a beam's log-probability by. 0: nothing, 1: the mean."""

    alpha: float = 1.0

    def check(self) -> None:
        check_alpha(self.alpha)

    def __call__(self, length: int) -> float:
        return float(length) ** self.alpha


@dataclass(frozen=True)
class Wu(Config):
    """((5 + |y|)/6)^α  (Wu et al. 2016, equation 14)."""

    alpha: float = 0.6

    def check(self) -> None:
        check_alpha(self.alpha)

    def __call__(self, length: int) -> float:
        return ((5 + length) / 6) ** self.alpha


LengthPenalty = Power | Wu


def check_alpha(alpha: float) -> None:
    if not -10 <= alpha <= 10:
        raise ConfigError(f"alpha is {alpha}, but of a length penalty it is between -10 and 10")


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(Config):
    """All that decides, besides the model and the prompt, what is written.

    Greedy, unless a temperature or one of top_k, top_p, min_p says to draw; more than one beam: beam search.
    """

    max_new_tokens: int | None = (
        None  # None: 256, for a translation more if it is long; never more than the model's context holds
    )
    temperature: float | None = None  # 0: greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    beams: int = 1
    length_penalty: LengthPenalty = Power(1.0)
    early_stopping: bool | Literal["never"] = False  # as `transformers` has it: docs/generation.md
    n: int = 1  # texts for each prompt: samples, or the best of the beams
    seed: int | None = None  # None: another one every time
    stop: tuple[str, ...] = ()  # texts before which to stop
    ends: tuple[int, ...] = ()  # tokens that end a text
    never: tuple[int, ...] = ()  # tokens that are not written
    start: int | None = None  # what an empty prompt, or the target of an encoder–decoder, begins with
    forced_end: int | None = None  # the last token of a text that has come to max_new_tokens

    def check(self) -> None:
        self.require_positive("max_new_tokens", "top_k", "repetition_penalty", "beams", "n")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}, but must not be negative, and finite; 0 is greedy")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value}, but must be a share between 0 and 1")
        if "" in self.stop:
            raise ConfigError("an empty stop text would stop everything before its first token")
        if self.beams > 1 and self.draws:
            raise ConfigError(
                f"beams={self.beams} looks for the likeliest text and draws nothing; leave temperature out"
            )
        if self.beams > 1 and self.stop:
            raise ConfigError("stop texts go with one text at a time, not with beams; leave one of them out")
        if self.beams > 1 and self.n > self.beams:
            raise ConfigError(f"n={self.n} texts are asked of {self.beams} beams; n can be at most beams")
        if self.beams == 1 and self.n > 1 and not self.draws:
            raise ConfigError(f"n={self.n} greedy texts would all be the same; give a temperature, or beams")

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn at random."""
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
