"""Choosing the next token of each text, row by row, so that a row's choice never depends on its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.generate.filters import (
    Filter,
    apply_filters,
    build_filters,
    draw,
    probabilities,
    sample_generator,
    uniform_numbers,
)
from clearhead.generate.row import Row

from .job import JobOptions, TokenScore


@dataclass
class Chooser:
    """The sampling state of one text: its random stream, its token counts, and its grammar."""

    options: JobOptions
    sample: int
    prompt: list[int]
    counts: dict[int, int] = field(default_factory=dict)  # tokens written, for the penalties
    matcher: object = None

    @cached_property
    def filters(self) -> tuple[Filter, ...]:
        return build_filters(self.options.config)

    @cached_property
    def generator(self) -> torch.Generator:
        return sample_generator(self.options.config.seed or 0, self.sample)

    @property
    def plain(self) -> bool:
        """Whether the choice is the argmax of the logits, and nobody asks for log-probabilities."""
        options = self.options
        changed = options.presence or options.frequency or options.bias or options.grammar or self.filters
        return not changed and not options.config.sampling and options.logprobs is None

    def choose(self, logits: Float[Tensor, "V"]) -> TokenScore:
        """Choose a token. Log-probabilities are the model's own, before any change."""
        own = logits.float()
        changed = self.adjust(own)[None]
        if self.options.config.repetition_penalty != 1:
            seen = torch.zeros_like(changed, dtype=torch.bool)
            seen[0, [*self.prompt, *self.counts]] = True
        else:
            seen = torch.zeros(1, 0, dtype=torch.bool)
        changed = apply_filters(changed, seen, self.filters)
        if self.options.config.sampling:
            token = int(draw(probabilities(changed, True), uniform_numbers(self.generator, 1).to(changed.device)))
        else:
            token = int(changed.argmax())
        return score(own, token, self.options.logprobs)

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
            logits = self.matcher.mask(logits)  # type: ignore[attr-defined]
        return logits

    def accept(self, token: int, row: Row) -> str:
        """Add a chosen token to the text; returns the text that it completes."""
        self.counts[token] = self.counts.get(token, 0) + 1
        if self.matcher is not None and token not in self.options.config.ends:
            self.matcher.accept(token)  # type: ignore[attr-defined]
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
