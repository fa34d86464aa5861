"""Speculative decoding: a small model drafts several tokens, and the model reads them all in one pass.

A draft x is kept with the probability min(1, p(x)/q(x)), where p is the model's and q the draft's; at the first that is
not kept, a token is drawn from what p has more of than q. What is written then has the distribution of the model alone,
and greedy text is the same word for word  (Leviathan et al. 2023, theorem 3.5; Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.configs import DecodingConfig, LMHeadConfig
from clearhead.models.model import EncoderDecoder, Model, SequenceModel
from clearhead.nn.cache import DecodeState

from .filters import Filter, draw, filtered, filters, luck_of, probabilities, uniforms
from .row import Row


@dataclass(frozen=True)
class Draft:
    """A smaller model of the same vocabulary, and how many tokens it writes ahead."""

    model: Model
    count: int = 4

    def check(self, model: Model) -> None:
        if isinstance(model, EncoderDecoder) or isinstance(self.model, EncoderDecoder):
            raise ValueError("a draft goes with a language model, not with an encoder–decoder")
        mine, theirs = self.model.config.head, model.config.head
        if not isinstance(mine, LMHeadConfig) or not isinstance(theirs, LMHeadConfig):
            raise ValueError("the draft is no language model")
        if mine.vocabulary != theirs.vocabulary:
            sizes = f"{mine.vocabulary} tokens and the model {theirs.vocabulary}"
            raise ValueError(f"the draft has {sizes}; the two must have one vocabulary")
        for name, one in (("draft", self.model), ("model", model)):
            if not one.init_state(1, 1).can_rewind:
                raise ValueError(
                    f"a mixer of the {name} keeps a summary of what it has read, and cannot take back a token"
                )
        if self.count < 1:
            raise ValueError(f"the draft writes {self.count} tokens ahead, but must write at least 1")


@dataclass
class Reader:
    """A model and how far it has read a text."""

    model: SequenceModel
    state: DecodeState
    read: int = 0

    @classmethod
    def of(cls, model: Model, room: int, spare: int) -> Reader:
        assert isinstance(model, SequenceModel), "who asks has checked the draft and the model"
        return cls(model, model.init_state(1, room, spare=spare))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], last: int) -> Float[Tensor, "T V"]:
        """Read on to the end of `tokens`; the logits after each of the last few of them."""
        ahead = len(tokens) - last
        if self.read < ahead:  # a prompt, of which no logits are needed
            self.model.next_logits(self.row(tokens[self.read : ahead]), self.state)
            self.read = ahead
        said = self.model(self.row(tokens[self.read :]), state=self.state)[0]
        self.read = len(tokens)
        return said[-last:]

    @torch.inference_mode()
    def back_to(self, length: int) -> None:
        if length < self.read:
            self.state.rewind(torch.tensor([length], device=self.state.lengths.device))
            self.read = length

    def row(self, tokens: Sequence[int]) -> Int[Tensor, "1 T"]:
        return torch.tensor([tokens], device=self.state.lengths.device)


def speculate(
    model: Model, draft: Draft, ids: Sequence[int], row: Row, config: DecodingConfig, *, logprobs: bool = False
) -> Iterator[tuple[Row, str]]:
    """As `loop.write`, for one prompt: yields the row whenever it wrote a token."""
    parts, tokens = filters(config), list(ids)
    room = len(ids) + row.limit + draft.count + 1
    writer, drafter = (Reader.of(one, room, draft.count + 1) for one in (model, draft.model))
    luck = luck_of(config.seed or 0, row.sample)
    seen = torch.zeros(1, vocabulary(writer.model), dtype=torch.bool, device=writer.state.lengths.device)
    seen[0, tokens] = True
    while row.reason is None:
        count = min(draft.count, row.limit - len(row.tokens) - 1)
        guess = drafted(drafter, tokens, seen, parts, config.draws, count, luck)
        logits = writer.logits([*tokens, *guess.tokens], count + 1)
        kept, extra = judged(logits, guess, seen, parts, config.draws, luck)
        row.drafted, row.accepted = row.drafted + count, row.accepted + kept
        for i, token in enumerate([*guess.tokens[:kept], extra]):
            tokens.append(token)
            seen[0, token] = True
            said = float(logits[i].float().log_softmax(0)[token]) if logprobs else None
            yield row, row.take(token, said, config.ends)
            if row.reason is not None:
                return
        writer.back_to(len(tokens) - 1)
        drafter.back_to(len(tokens) - 1)


@dataclass
class Guess:
    """What a draft wrote ahead, and the chances that it drew each token from."""

    tokens: list[int] = field(default_factory=list)
    chances: list[Float[Tensor, "1 V"]] = field(default_factory=list)


@torch.inference_mode()
def drafted(
    drafter: Reader,
    tokens: Sequence[int],
    seen: Bool[Tensor, "1 V"],
    parts: Sequence[Filter],
    draws: bool,
    count: int,
    luck: torch.Generator,
) -> Guess:
    guess, seen = Guess(), seen.clone()
    for _ in range(count):
        logits = drafter.logits([*tokens, *guess.tokens], 1)
        chances = probabilities(filtered(logits, seen, parts), draws)
        token = int(draw(chances, uniforms(luck, 1).to(chances.device)))
        seen[0, token] = True
        guess.tokens.append(token)
        guess.chances.append(chances)
    return guess


@torch.inference_mode()
def judged(
    logits: Float[Tensor, "T V"],
    guess: Guess,
    seen: Bool[Tensor, "1 V"],
    parts: Sequence[Filter],
    draws: bool,
    luck: torch.Generator,
) -> tuple[int, int]:
    """How many of the drafted tokens are kept, and the token that comes after them."""
    seen, ours = seen.clone(), []
    for i, one in enumerate(logits):
        ours.append(probabilities(filtered(one[None], seen, parts), draws))
        if i < len(guess.tokens):
            seen[0, guess.tokens[i]] = True
    p = torch.stack(ours, dim=1)  # 1 T V
    q = torch.stack([*guess.chances, torch.zeros_like(ours[0])], dim=1)
    tokens = torch.tensor([guess.tokens], device=p.device, dtype=torch.long)
    tests, last = uniforms(luck, p.shape[1])[None].to(p.device), uniforms(luck, 1).to(p.device)
    kept, extra = accept(p, q, tokens, tests, last)
    return int(kept), int(extra)


def accept(
    p: Float[Tensor, "B T V"],
    q: Float[Tensor, "B T V"],
    tokens: Int[Tensor, "B K"],
    tests: Float[Tensor, "B T"],
    last: Float[Tensor, "B"],
) -> tuple[Int[Tensor, "B"], Int[Tensor, "B"]]:
    """The rule: how many of a row's K = T − 1 drafted tokens are kept, and the next one; `q` is 0 in the last place."""
    count = tokens.shape[1]
    chances = [table[:, :count].gather(2, tokens[:, :, None])[:, :, 0] for table in (p, q)]
    kept = (tests[:, :count] * chances[1] < chances[0]).long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(p), device=p.device)
    return kept, draw((p[rows, kept] - q[rows, kept]).clamp(min=0), last)


def vocabulary(model: SequenceModel) -> int:
    assert isinstance(model.config.head, LMHeadConfig), "who writes has a language model's head"
    return model.config.head.vocabulary
