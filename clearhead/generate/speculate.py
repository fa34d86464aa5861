"""Speculative decoding: a small model proposes several tokens, and the model checks them all in one pass.

A proposed token x is accepted with probability min(1, p(x)/q(x)), where p is the model's distribution and q the
draft's. The first rejected token is replaced by a sample from max(0, p − q), normalised. The output has the
distribution of the model alone, and greedy text is identical  (Leviathan et al. 2023, theorem 3.5; Chen et al. 2023).
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

from .filters import Filter, apply_filters, build_filters, draw, probabilities, sample_generator, uniform_numbers
from .row import Row


@dataclass(frozen=True)
class Draft:
    """A smaller model with the same vocabulary, and how many tokens it proposes at a time."""

    model: Model
    count: int = 4

    def check(self, model: Model) -> None:
        if isinstance(model, EncoderDecoder) or isinstance(self.model, EncoderDecoder):
            raise ValueError("a draft model works only with language models, not with encoder–decoders")
        mine, theirs = self.model.config.head, model.config.head
        if not isinstance(mine, LMHeadConfig) or not isinstance(theirs, LMHeadConfig):
            raise ValueError("the draft model has no language-model head")
        if mine.vocabulary != theirs.vocabulary:
            raise ValueError(
                f"the draft's vocabulary has {mine.vocabulary:,} tokens and the model's {theirs.vocabulary:,}; "
                "use a draft model with the same tokenizer"
            )
        for name, one in (("draft", self.model), ("model", model)):
            if not one.init_state(1, 1).can_rewind:
                raise ValueError(
                    f"the {name} has a recurrent mixer, which cannot take back a token; use an attention model"
                )
        if self.count < 1:
            raise ValueError(f"the draft proposes {self.count} tokens at a time, but must propose at least 1")


@dataclass
class CachedReader:
    """A model, its state, and how many tokens of a text it has read."""

    model: SequenceModel
    state: DecodeState
    read: int = 0

    @classmethod
    def of(cls, model: Model, room: int, spare: int) -> CachedReader:
        assert isinstance(model, SequenceModel), "Draft.check has refused encoder–decoders"
        return cls(model, model.init_state(1, room, spare=spare))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], last: int) -> Float[Tensor, "T V"]:
        """Read the rest of `tokens` and return the logits after each of the last `last` of them."""
        ahead = len(tokens) - last
        if self.read < ahead:  # the prompt, whose logits nobody needs
            self.model.next_logits(self.row(tokens[self.read : ahead]), self.state)
            self.read = ahead
        logits = self.model(self.row(tokens[self.read :]), state=self.state)[0]
        self.read = len(tokens)
        return logits[-last:]

    @torch.inference_mode()
    def rewind(self, length: int) -> None:
        if length < self.read:
            self.state.rewind(torch.tensor([length], device=self.state.lengths.device))
            self.read = length

    def row(self, tokens: Sequence[int]) -> Int[Tensor, "1 T"]:
        return torch.tensor([tokens], device=self.state.lengths.device)


def speculate(
    model: Model, draft: Draft, ids: Sequence[int], row: Row, config: DecodingConfig, *, logprobs: bool = False
) -> Iterator[tuple[Row, str]]:
    """Like `loop.decode`, for one prompt: yields the row whenever it got a token."""
    filters, tokens = build_filters(config), list(ids)
    room = len(ids) + row.limit + draft.count + 1
    writer, drafter = (CachedReader.of(one, room, draft.count + 1) for one in (model, draft.model))
    numbers = sample_generator(config.seed or 0, row.sample)
    seen = torch.zeros(1, vocabulary(writer.model), dtype=torch.bool, device=writer.state.lengths.device)
    seen[0, tokens] = True
    while row.reason is None:
        count = min(draft.count, row.limit - len(row.tokens) - 1)
        proposal = propose(drafter, tokens, seen, filters, config.sampling, count, numbers)
        logits = writer.logits([*tokens, *proposal.tokens], count + 1)
        kept, extra = verify(logits, proposal, seen, filters, config.sampling, numbers)
        row.drafted, row.accepted = row.drafted + count, row.accepted + kept
        for i, token in enumerate([*proposal.tokens[:kept], extra]):
            tokens.append(token)
            seen[0, token] = True
            logprob = float(logits[i].float().log_softmax(0)[token]) if logprobs else None
            yield row, row.append(token, logprob, config.ends)
            if row.reason is not None:
                return
        writer.rewind(len(tokens) - 1)
        drafter.rewind(len(tokens) - 1)


@dataclass
class Proposal:
    """Tokens proposed by the draft, and the distributions that they were drawn from."""

    tokens: list[int] = field(default_factory=list)
    chances: list[Float[Tensor, "1 V"]] = field(default_factory=list)


@torch.inference_mode()
def propose(
    drafter: CachedReader,
    tokens: Sequence[int],
    seen: Bool[Tensor, "1 V"],
    filters: Sequence[Filter],
    sampling: bool,
    count: int,
    numbers: torch.Generator,
) -> Proposal:
    """Let the draft write `count` tokens."""
    proposal, seen = Proposal(), seen.clone()
    for _ in range(count):
        logits = drafter.logits([*tokens, *proposal.tokens], 1)
        chances = probabilities(apply_filters(logits, seen, filters), sampling)
        token = int(draw(chances, uniform_numbers(numbers, 1).to(chances.device)))
        seen[0, token] = True
        proposal.tokens.append(token)
        proposal.chances.append(chances)
    return proposal


@torch.inference_mode()
def verify(
    logits: Float[Tensor, "T V"],
    proposal: Proposal,
    seen: Bool[Tensor, "1 V"],
    filters: Sequence[Filter],
    sampling: bool,
    numbers: torch.Generator,
) -> tuple[int, int]:
    """How many proposed tokens are accepted, and the token after them."""
    seen, ours = seen.clone(), []
    for i, one in enumerate(logits):
        ours.append(probabilities(apply_filters(one[None], seen, filters), sampling))
        if i < len(proposal.tokens):
            seen[0, proposal.tokens[i]] = True
    p = torch.stack(ours, dim=1)  # 1 T V
    q = torch.stack([*proposal.chances, torch.zeros_like(ours[0])], dim=1)
    tokens = torch.tensor([proposal.tokens], device=p.device, dtype=torch.long)
    tests, last = uniform_numbers(numbers, p.shape[1])[None].to(p.device), uniform_numbers(numbers, 1).to(p.device)
    kept, extra = accept(p, q, tokens, tests, last)
    return int(kept), int(extra)


def accept(
    p: Float[Tensor, "B T V"],
    q: Float[Tensor, "B T V"],
    tokens: Int[Tensor, "B K"],
    tests: Float[Tensor, "B T"],
    last: Float[Tensor, "B"],
) -> tuple[Int[Tensor, "B"], Int[Tensor, "B"]]:
    """How many of each row's K = T − 1 proposed tokens are accepted, and the next token. The last `q` is 0."""
    count = tokens.shape[1]
    chances = [table[:, :count].gather(2, tokens[:, :, None])[:, :, 0] for table in (p, q)]
    kept = (tests[:, :count] * chances[1] < chances[0]).long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(p), device=p.device)
    return kept, draw((p[rows, kept] - q[rows, kept]).clamp(min=0), last)


def vocabulary(model: SequenceModel) -> int:
    assert isinstance(model.config.head, LMHeadConfig), "Draft.check has refused other heads"
    return model.config.head.vocabulary
