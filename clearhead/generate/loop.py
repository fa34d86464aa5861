"""The decode loop of encoder–decoders: one forward pass writes one token in every row of a batch.

Language models are written by the engine (`engine.py`); beam search starts from `prefill` too.

The first pass reads the prompts (prefill). Every later pass reads the last token of each row and the model's state.
A row leaves the batch when it ends. The text of a row depends on its own prompt and seed, not on the other rows.
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
from clearhead.nn.weights import check_weights_finite

from .filters import Filter, apply_filters, build_filters, draw, probabilities, sample_generator, uniform_numbers
from .row import Row


@dataclass
class PrefilledBatch:
    """Rows whose prompts have been read: the model's state, and the logits of the next token of each row."""

    state: DecodeState
    logits: Float[Tensor, "B V"]
    seen: Bool[Tensor, "B _"]  # tokens in each row so far; width 0 if no filter needs them

    @torch.inference_mode()
    def select(self, rows: Sequence[int] | Int[Tensor, "R"]) -> None:
        """Keep, repeat and reorder rows."""
        rows = torch.as_tensor(rows, device=self.logits.device)
        self.state.select(rows)
        self.logits, self.seen = self.logits[rows], self.seen[rows]

    @torch.inference_mode()
    def spread(self, width: int) -> None:
        """Repeat every row `width` times."""
        self.state.repeat_rows(width)
        self.logits, self.seen = (each.repeat_interleave(width, dim=0) for each in (self.logits, self.seen))

    @torch.inference_mode()
    def advance(self, model: Model, tokens: Int[Tensor, "B"]) -> None:
        """Read one more token in every row."""
        if self.seen.shape[1]:
            self.seen[torch.arange(len(tokens), device=tokens.device), tokens] = True
        self.logits = model.next_logits(tokens[:, None], self.state)


@torch.inference_mode()
def prefill(model: Model, prompts: Sequence[Sequence[int]], room: int, *, start: int | None = None) -> PrefilledBatch:
    """Read prompts of any lengths and leave room for `room` more tokens after each.

    For an encoder–decoder the prompts are sources, and every target begins with `start`.
    """
    device = next(model.parameters()).device
    tokens, readable = pad_prompts(prompts, device)
    if isinstance(model, EncoderDecoder):
        state = model.init_state(model.encode(tokens, readable=readable), 1 + room, readable=readable)
        assert start is not None, "an encoder–decoder needs the first token of its target"
        tokens, readable = torch.full((len(prompts), 1), start, device=device), None
    else:
        state = model.init_state(len(prompts), tokens.shape[1] + room)
    logits = model.next_logits(tokens, state, readable=readable)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in enumerate(tokens):
        seen[row, ids if readable is None else ids[readable[row]]] = True
    return PrefilledBatch(state, logits, seen)


def pad_prompts(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"] | None]:
    """Rows of equal length, and True where a token is real; None if there is no padding."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    if all(len(prompt) == longest for prompt in prompts):
        return tokens, None
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    return tokens, torch.arange(longest, device=device) < lengths


def decode(
    model: Model, batch: PrefilledBatch, rows: Sequence[Row], config: DecodingConfig, *, logprobs: bool = False
) -> Iterator[tuple[Row, str]]:
    """Write tokens until every row has ended; `rows` holds one Row for each row of the batch.

    Yields each row that got a token, with the text that this token completed.
    """
    filters, live = build_filters(config), list(rows)
    numbers = torch.empty(0)
    if config.sampling:
        count, seed = max(row.limit for row in live), config.seed or 0
        streams = [uniform_numbers(sample_generator(seed, row.sample), count) for row in live]
        numbers = torch.stack(streams).to(batch.logits.device)
    step = 0
    while True:
        check_numbers(model, batch.logits)
        tokens = choose_tokens(batch, filters, numbers[:, step] if config.sampling else None)
        if config.forced_end is not None:
            last = torch.tensor([row.limit == step + 1 for row in live], device=tokens.device)
            tokens = torch.where(last, config.forced_end, tokens)
        scores = token_logprobs(batch.logits, tokens) if logprobs else [None] * len(live)
        for row, token, logprob in zip(live, tokens.tolist(), scores, strict=True):
            yield row, row.append(token, logprob, config.ends)
        keep = [i for i, row in enumerate(live) if row.reason is None]
        if not keep:
            return
        if len(keep) < len(live):
            batch.select(keep)
            live, tokens = [live[i] for i in keep], tokens[keep]
            numbers = numbers[keep] if config.sampling else numbers
        batch.advance(model, tokens)
        step += 1


@torch.inference_mode()
def choose_tokens(
    batch: PrefilledBatch, filters: Sequence[Filter], numbers: Float[Tensor, "B"] | None
) -> Int[Tensor, "B"]:
    """The next token of each row: the argmax of the filtered logits, or a sample drawn with uniform `numbers`."""
    logits = apply_filters(batch.logits, batch.seen, filters)
    return logits.argmax(dim=1) if numbers is None else draw(probabilities(logits, True), numbers)


def check_numbers(model: Model, logits: Float[Tensor, "B V"]) -> None:
    """Raise if a logit is NaN, and name the layer whose weights cause it: no token can be chosen then."""
    if bool(logits.isnan().any()):
        check_weights_finite(model)
        raise ValueError("the model's logits are NaN, although its weights are not; try --weights float32")


@torch.inference_mode()
def token_logprobs(logits: Float[Tensor, "B V"], tokens: Int[Tensor, "B"]) -> list[float]:
    """The log-probability of each row's token under the model itself, before any filter."""
    return logits.float().log_softmax(dim=1).gather(1, tokens[:, None])[:, 0].tolist()
