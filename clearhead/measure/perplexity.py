"""How well a model predicts a text: perplexity, and bits per byte, which does not depend on the tokenizer.

A text longer than the context is read in overlapping windows, `stride` tokens apart. Each token is scored once, in the
first window that predicts it. After the first window, every token therefore has at least context − stride + 1 tokens
before it. The last window is moved back until it is full. If the stride is the context, windows do not overlap, as in
`lm_eval`'s rolling log-likelihood.

    context 4, stride 2    · ▪ ▪ ▪ ▪
                               · · · ▪ ▪
                                 · · · · ▪       ▪ scored, · only read
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.data.corpus import Document
from clearhead.generate.complete import TextGenerator
from clearhead.models.context import check_ids, make_context
from clearhead.models.model import EncoderDecoder, Model, SequenceModel
from clearhead.nn.weights import check_weights_finite
from clearhead.tokenize import Tokenizer

WINDOW = 1024  # tokens, if the model has no maximum
SLICE = 512  # tokens whose logits are computed together


@dataclass(frozen=True)
class Perplexity:
    """The log-probability that a model gives a text."""

    nats: float  # −log p, summed
    tokens: int  # scored
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
    """e^loss, at most e^700, so that it stays finite."""
    return math.exp(min(loss, 700))


@torch.inference_mode()
def logprobs(
    model: SequenceModel, prefix: Sequence[int], continuation: Sequence[int]
) -> tuple[Float[Tensor, "T"], bool]:
    """log p of each token of a continuation, and whether every one of them is the most likely; one forward pass.

    `prefix` has at least one token.
    """
    tokens = torch.tensor([[*prefix, *continuation]], device=next(model.parameters()).device)
    logp, likeliest = token_logprobs(model, tokens)
    first = len(prefix)
    return logp[0, first - 1 :], bool((likeliest[0, first - 1 :] == tokens[0, first:]).all())


@torch.inference_mode()
def token_logprobs(
    model: SequenceModel, tokens: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T-1"], Int[Tensor, "B T-1"]]:
    """log p of every token but the first given the tokens before it, and the most likely token at its place.

    The logits of a long text are computed in slices.
    """
    assert model.head is not None, "callers check that the model is a language model"
    check_ids(tokens)
    (rows, length), device = tokens[:, :-1].shape, tokens.device
    x, logp, likeliest = model.hidden_states(tokens[:, :-1], make_context(rows, length, device)), [], []
    for part, wanted in zip(x.split(SLICE, dim=1), tokens[:, 1:, None].split(SLICE, dim=1), strict=True):
        logits = model.head(part, make_context(rows, part.shape[1], device), model.embedding.table).float()
        logp.append(logits.gather(2, wanted)[:, :, 0] - logits.logsumexp(dim=2))
        likeliest.append(logits.argmax(dim=2))
    return torch.cat(logp, dim=1), torch.cat(likeliest, dim=1)


def windows(length: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Begin, end and first scored token of each window. The last token of a window is predicted but not read."""
    counted, begin = 1, 0  # nothing predicts the first token
    while counted < length:
        begin = min(begin, max(0, length - 1 - context))
        end = min(begin + context + 1, length)
        yield begin, end, counted
        counted, begin = end, begin + stride


def perplexity(
    model: SequenceModel, tokens: Sequence[int], size: int, *, context: int | None = None, stride: int | None = None
) -> Perplexity:
    """The perplexity of a text of `size` bytes; its tokens begin with the model's start token."""
    context = context or WINDOW
    stride = stride or max(1, context // 2)
    if not 1 <= stride <= context:
        raise ValueError(f"stride is {stride}, but must be between 1 and the context of {context} tokens")
    if len(tokens) < 2:
        raise ValueError(f"the text has {len(tokens)} of the 2 tokens that a prediction needs; give a longer text")
    nats, device = 0.0, next(model.parameters()).device
    for begin, end, counted in windows(len(tokens), context, stride):
        logp, _ = token_logprobs(model, torch.tensor([tokens[begin:end]], device=device))
        nats -= float(logp[0, counted - begin - 1 :].double().sum())
    if math.isnan(nats):
        check_weights_finite(model)
        raise ValueError(
            "the model's log-probabilities are NaN on this text, though its weights are not; try --weights float32"
        )
    return Perplexity(nats, len(tokens) - 1, size, context, stride)


def perplexity_of(
    model: Model,
    text: str,
    *,
    tokenizer: Tokenizer | None = None,
    context: int | None = None,
    stride: int | None = None,
) -> Perplexity:
    """The perplexity of a text. The model's start token comes first, so that the first token is predicted too."""
    generator, reader = text_reader(model, tokenizer, context)
    start = [] if generator.config.start is None else [generator.config.start]
    tokens = [*start, *reader.encode(text)]
    assert isinstance(generator.model, SequenceModel)
    return perplexity(generator.model, tokens, len(text.encode()), context=context or generator.context, stride=stride)


def text_reader(model: Model, tokenizer: Tokenizer | None, context: int | None) -> tuple[TextGenerator, Tokenizer]:
    """The model and its tokenizer, if it is a language model that can read `context` tokens."""
    generator = TextGenerator.of(model, tokenizer)
    if isinstance(generator.model, EncoderDecoder):
        raise ValueError(
            "an encoder–decoder predicts a target from a source, so it has no perplexity on one text; use --pairs"
        )
    if generator.tokenizer is None:
        raise ValueError("the model has no tokenizer, so it cannot read text; pass tokenizer=")
    if context is not None and generator.context is not None and context > generator.context:
        raise ValueError(f"context is {context}, but the model reads at most {generator.context} tokens")
    return generator, generator.tokenizer


def perplexity_of_documents(
    model: Model,
    documents: Iterable[Document],
    *,
    tokenizer: Tokenizer | None = None,
    context: int | None = None,
    stride: int | None = None,
) -> Perplexity:
    """The perplexity of documents as training reads them: each by itself, scored on the pieces with loss only.

    In a conversation these are the assistant's answers. The end-of-text token after a document is scored too.
    """
    generator, reader = text_reader(model, tokenizer, context)
    assert isinstance(generator.model, SequenceModel)
    context = context or generator.context or WINDOW
    stride = stride or max(1, context // 2)
    nats, scored, size, device = 0.0, 0, 0, next(generator.model.parameters()).device
    for document in documents:
        tokens, counts = encode_pieces(document, reader)
        size += sum(len(text.encode()) for text, loss in document.pieces if loss)
        for begin, end, first in windows(len(tokens), context, stride):
            logp, _ = token_logprobs(generator.model, torch.tensor([tokens[begin:end]], device=device))
            wanted = torch.tensor(counts[first:end], device=device)
            nats -= float(logp[0, first - begin - 1 :].double()[wanted].sum())
            scored += int(wanted.sum())
    if not scored or not size:
        raise ValueError("the documents have no text to score; conversations need answers of the assistant")
    return Perplexity(nats, scored, size, context, stride)


def encode_pieces(document: Document, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """The tokens of a document and which of them count, with the end-of-text token as in training."""
    tokens: list[int] = []
    counts: list[bool] = []
    for text, loss in document.pieces:
        found = tokenizer.encode(text)
        tokens += found
        counts += [loss] * len(found)
    if tokenizer.end is not None and tokens:
        tokens.append(tokenizer.end)
        counts.append(counts[-1])
    return tokens, counts
