"""The one decode loop: any model that writes, one token at a time for every row of a batch.

The prompts are read in one pass; after that each pass reads one token per row and the state that the model keeps.
A row that has ended leaves the batch. What a row says depends on its own prompt and seed, not on its company.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.configs import DecodingConfig
from clearhead.models.model import EncoderDecoder, Model
from clearhead.nn.cache import DecodeState

from .filters import Filter, draw, filtered, filters, luck_of, probabilities, uniforms
from .row import Row


@dataclass
class Begun:
    """Prompts that have been read: what the model remembers of them, and what it says comes next."""

    state: DecodeState
    logits: Float[Tensor, "B V"]
    seen: Bool[Tensor, "B _"]  # tokens that each row has read or written; of no width where nobody asks

    @torch.inference_mode()
    def select(self, rows: Sequence[int] | Int[Tensor, "R"]) -> None:
        """Keep, repeat and reorder rows."""
        rows = torch.as_tensor(rows, device=self.logits.device)
        self.state.select(rows)
        self.logits, self.seen = self.logits[rows], self.seen[rows]

    @torch.inference_mode()
    def spread(self, width: int) -> None:
        """Make `width` rows of each."""
        self.state.repeat_rows(width)
        self.logits, self.seen = (each.repeat_interleave(width, dim=0) for each in (self.logits, self.seen))

    @torch.inference_mode()
    def advance(self, model: Model, tokens: Int[Tensor, "B"]) -> None:
        """Read one more token in every row."""
        if self.seen.shape[1]:
            self.seen[torch.arange(len(tokens), device=tokens.device), tokens] = True
        self.logits = model.next_logits(tokens[:, None], self.state)


@torch.inference_mode()
def begin(model: Model, prompts: Sequence[Sequence[int]], room: int, *, start: int | None = None) -> Begun:
    """Read prompts of any lengths, with room for `room` more tokens after each.

    For an encoder–decoder the prompts are sources, and the targets begin with `start`.
    """
    device = next(model.parameters()).device
    tokens, readable = padded(prompts, device)
    if isinstance(model, EncoderDecoder):
        state = model.init_state(model.encode(tokens, readable=readable), 1 + room, readable=readable)
        assert start is not None, "who writes for a source has been told how a target begins"
        tokens, readable = torch.full((len(prompts), 1), start, device=device), None
    else:
        state = model.init_state(len(prompts), tokens.shape[1] + room)
    logits = model.next_logits(tokens, state, readable=readable)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for row, mine in enumerate(tokens):
        seen[row, mine if readable is None else mine[readable[row]]] = True
    return Begun(state, logits, seen)


def padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"] | None]:
    """Rows of one length, and which of their tokens are real; None where all are."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    if all(len(prompt) == longest for prompt in prompts):
        return tokens, None
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    return tokens, torch.arange(longest, device=device) < lengths


def write(
    model: Model, begun: Begun, rows: Sequence[Row], config: DecodingConfig, *, logprobs: bool = False
) -> Iterator[tuple[Row, str]]:
    """Go on from what has been read, one row of it for each of `rows`: yields every row that wrote a token, with the
    text that this made certain, until all have ended. `begun` has then read all that was written but the last token."""
    parts, live = filters(config), list(rows)
    luck = torch.empty(0)
    if config.draws:
        count, seed = max(row.limit for row in live), config.seed or 0
        luck = torch.stack([uniforms(luck_of(seed, row.sample), count) for row in live]).to(begun.logits.device)
    step = 0
    while True:
        tokens = chosen(begun, parts, luck[:, step] if config.draws else None)
        if config.forced_end is not None:
            last = torch.tensor([row.limit == step + 1 for row in live], device=tokens.device)
            tokens = torch.where(last, config.forced_end, tokens)
        said = spoken(begun.logits, tokens) if logprobs else [None] * len(live)
        for row, token, logprob in zip(live, tokens.tolist(), said, strict=True):
            yield row, row.take(token, logprob, config.ends)
        keep = [i for i, row in enumerate(live) if row.reason is None]
        if not keep:
            return
        if len(keep) < len(live):
            begun.select(keep)
            live, tokens = [live[i] for i in keep], tokens[keep]
            luck = luck[keep] if config.draws else luck
        begun.advance(model, tokens)
        step += 1


@torch.inference_mode()
def chosen(begun: Begun, parts: Sequence[Filter], luck: Float[Tensor, "B"] | None) -> Int[Tensor, "B"]:
    """Each row's next token: the likeliest that the filters leave, or drawn by `luck` from what they leave."""
    logits = filtered(begun.logits, begun.seen, parts)
    return logits.argmax(dim=1) if luck is None else draw(probabilities(logits, True), luck)


@torch.inference_mode()
def spoken(logits: Float[Tensor, "B V"], tokens: Int[Tensor, "B"]) -> list[float]:
    """The log-probability that the model itself, before any filter, gives each row's token."""
    return logits.float().log_softmax(dim=1).gather(1, tokens[:, None])[:, 0].tolist()
