"""How well a model foresees a text: perplexity, and bits per byte, which does not depend on the tokenizer.

A text longer than the context is read in windows, each `stride` tokens after the one before. A token is counted once,
in the first window that foresees it, so that after the first window it has at least context − stride + 1 tokens before
it; the last window is moved back until it is full. With a stride of the whole context every window begins anew, which
is how `lm_eval` rolls.

    context 4, stride 2    · ▪ ▪ ▪ ▪
                               · · · ▪ ▪
                                 · · · · ▪       ▪ foreseen and counted, · read
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.generate.complete import TextGenerator
from clearhead.models.context import check_ids, make_context
from clearhead.models.model import EncoderDecoder, Model, SequenceModel
from clearhead.tokenize import Tokenizer

WINDOW = 1024  # tokens, where the model has no bound
SLICE = 512  # tokens whose logits are made together


@dataclass(frozen=True)
class Score:
    """What a text cost the model."""

    nats: float  # −log p, summed
    tokens: int  # that were counted
    bytes: int
    context: int
    stride: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return bounded_exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def bounded_exp(loss: float) -> float:
    """e^loss, and of a loss beyond all measure still a number."""
    return math.exp(min(loss, 700))


@torch.inference_mode()
def logprobs(
    model: SequenceModel, prefix: Sequence[int], continuation: Sequence[int]
) -> tuple[Float[Tensor, "T"], bool]:
    """log p of each token of a continuation after one token or more, and whether each is the likeliest in its place, in
    one pass."""
    tokens = torch.tensor([[*prefix, *continuation]], device=next(model.parameters()).device)
    said, likeliest = token_logprobs(model, tokens)
    first = len(prefix)
    return said[0, first - 1 :], bool((likeliest[0, first - 1 :] == tokens[0, first:]).all())


@torch.inference_mode()
def token_logprobs(
    model: SequenceModel, tokens: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T-1"], Int[Tensor, "B T-1"]]:
    """log p of every token but the first, given those before it; and the likeliest token in its place. Of a long text
    the logits are never all there at once."""
    assert model.head is not None, "who asks has seen that the model writes"
    check_ids(tokens)
    (rows, length), device = tokens[:, :-1].shape, tokens.device
    x, said, likeliest = model.hidden(tokens[:, :-1], make_context(rows, length, device)), [], []
    for some, wanted in zip(x.split(SLICE, dim=1), tokens[:, 1:, None].split(SLICE, dim=1), strict=True):
        logits = model.head(some, make_context(rows, some.shape[1], device), model.embedding.table).float()
        said.append(logits.gather(2, wanted)[:, :, 0] - logits.logsumexp(dim=2))
        likeliest.append(logits.argmax(dim=2))
    return torch.cat(said, dim=1), torch.cat(likeliest, dim=1)


def windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Where each window begins, where it ends, its last token foreseen and not read, and the first that is counted."""
    counted, begin = 1, 0  # the first token has nothing before it
    while counted < length:
        begin = min(begin, max(0, length - 1 - context))
        end = min(begin + context + 1, length)
        yield begin, end, counted
        counted, begin = end, begin + stride


def perplexity(
    model: SequenceModel, tokens: Sequence[int], size: int, *, context: int | None = None, stride: int | None = None
) -> Score:
    """The score of a text of `size` bytes, whose tokens begin with the model's start token."""
    context = context or WINDOW
    stride = stride or max(1, context // 2)
    if not 1 <= stride <= context:
        raise ValueError(f"the stride is {stride}, but must be between 1 and the context, {context}")
    if len(tokens) < 2:
        raise ValueError("the text has fewer than two tokens, so there is nothing to foresee")
    nats, device = 0.0, next(model.parameters()).device
    for begin, end, counted in windows(len(tokens), context, stride):
        said, _ = token_logprobs(model, torch.tensor([tokens[begin:end]], device=device))
        nats -= float(said[0, counted - begin - 1 :].double().sum())
    return Score(nats, len(tokens) - 1, size, context, stride)


def perplexity_of(
    model: Model,
    text: str,
    *,
    tokenizer: Tokenizer | None = None,
    context: int | None = None,
    stride: int | None = None,
) -> Score:
    """The score of a text: its tokens after the model's start token, so that the first of them is foreseen too."""
    task = TextGenerator.of(model, tokenizer)
    if isinstance(task.model, EncoderDecoder):
        raise ValueError("an encoder–decoder foresees a target for a source; one text does not tell its perplexity")
    if task.tokenizer is None:
        raise ValueError("the model came with no tokenizer, so it reads no text; give tokenizer=")
    if context is not None and task.context is not None and context > task.context:
        raise ValueError(f"the context is {context}, but the model reads at most {task.context} tokens")
    start = [] if task.config.start is None else [task.config.start]
    tokens = [*start, *task.tokenizer.encode(text)]
    return perplexity(task.model, tokens, len(text.encode()), context=context or task.context, stride=stride)
