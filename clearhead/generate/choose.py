"""Choosing the next token of each text, row by row, so that a row's choice never depends on its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from .filters import (
    Filter,
    apply_filters,
    build_filters,
    draw,
    probabilities,
    sample_generator,
    uniform_numbers,
)
from .job import JobOptions, TokenScore
from .row import Row


@dataclass
class Chooser:
    """The sampling state of one text: its random stream, its token counts, and its grammar."""

    options: JobOptions
    sample: int
    prompt: list[int]
    counts: dict[int, int] = field(default_factory=dict)  # tokens written, for the penalties
    written: int = 0

    def __post_init__(self) -> None:
        options = self.options
        self.filters: tuple[Filter, ...] = build_filters(options.config)
        self.matcher = None if options.grammar is None else options.grammar.matcher()
        changed = options.presence or options.frequency or options.bias or options.grammar or self.filters
        self.plain = not changed and not options.config.sampling and options.logprobs is None
        """Whether the choice is the argmax of the logits, and nobody asks for log-probabilities."""
        self.numbers: list[Tensor] = []

    @cached_property
    def generator(self) -> torch.Generator:
        return sample_generator(self.options.config.seed or 0, self.sample)

    def number(self, place: int) -> Float[Tensor, "1"]:
        """The uniform number that draws the token at a place of the text."""
        while len(self.numbers) <= place:
            self.numbers.append(uniform_numbers(self.generator, 1))
        return self.numbers[place]

    def choose(self, logits: Float[Tensor, "V"]) -> TokenScore:
        """Choose a token. Log-probabilities are the model's own, before any change."""
        own = logits.float()
        return score(own, self.pick(self.adjust(own), self.written), self.options.logprobs)

    def guess(self, logits: Float[Tensor, "V"], ahead: int) -> int:
        """The token that these logits of a draft would choose `ahead` tokens later, without penalties and grammar.

        It is drawn with the same random number as the model's own token, so that the two often agree.
        """
        return int(logits.argmax()) if self.plain else self.pick(logits.float(), self.written + ahead)

    def pick(self, logits: Float[Tensor, "V"], place: int) -> int:
        changed = logits[None]
        seen = torch.zeros_like(changed, dtype=torch.bool)
        if self.options.config.repetition_penalty != 1:
            seen[0, [*self.prompt, *self.counts]] = True
        changed = apply_filters(changed, seen, self.filters)
        if not self.options.config.sampling:
            return int(changed.argmax())
        return int(draw(probabilities(changed, True), self.number(place).to(changed.device)))

    def adjust(self, logits: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
        """Penalties, bias and grammar. Presence and frequency count the tokens written so far, not the prompt."""
        options = self.options
        if (options.presence or options.frequency) and self.counts:
            logits = logits.clone()
            tokens, counts = torch.tensor(list(self.counts)), torch.tensor(list(self.counts.values()))
            logits[tokens] -= options.presence + options.frequency * counts
        if options.bias:
            logits = logits.clone()
            for token, bias in options.bias:
                logits[token] += bias
        if self.matcher is not None:
            logits = self.matcher.mask(logits)
        return logits

    def accept(self, token: int, row: Row) -> str:
        """Add a chosen token to the text; returns the text that it completes."""
        self.counts[token] = self.counts.get(token, 0) + 1
        self.written += 1
        if self.matcher is not None and token not in self.options.config.ends:
            self.matcher.accept(token)
        return row.append(token, None, self.options.config.ends)


def score(logits: Float[Tensor, "V"], token: int, alternatives: int | None) -> TokenScore:
    """A token with its log-probability and the most likely alternatives."""
    if alternatives is None:
        return TokenScore(token, None)
    logprobs = logits.float().log_softmax(dim=0)
    if not alternatives:
        return TokenScore(token, float(logprobs[token]))
    values, tokens = logprobs.topk(min(alternatives, len(logprobs)))
    return TokenScore(token, float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
