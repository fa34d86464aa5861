"""Compute embeddings of texts, and batch texts for an encoder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.configs import PoolerConfig, TokenEmbeddingConfig
from clearhead.generate.defaults import context_length
from clearhead.generate.loop import pad_prompts
from clearhead.models.context import make_context
from clearhead.models.model import EncoderDecoder, Model, SequenceModel
from clearhead.nn.context import Context
from clearhead.tokenize import Tokenizer

from .sentences import Pool, SentenceSettings

BATCH = 32


def describe_model(model: Model) -> str:
    """Say in an error what the model is, such as "model with a LMHead"."""
    if isinstance(model, EncoderDecoder):
        return "encoder–decoder"
    return "model without a head" if model.config.head is None else f"model with a {model.config.head.kind()}"


@dataclass(frozen=True)
class TextReader:
    """A model that reads texts, and its tokenizer."""

    model: SequenceModel
    tokenizer: Tokenizer
    context: int | None
    truncate: bool = False  # cut longer texts; otherwise they are an error

    @classmethod
    def of(cls, model: Model, tokenizer: Tokenizer | None = None) -> TextReader:
        if isinstance(model, EncoderDecoder) or not isinstance(model.config.embedding, TokenEmbeddingConfig):
            read = "a source and a target" if isinstance(model, EncoderDecoder) else "images"
            raise ValueError(f"this model reads {read}, not one text; use an encoder or a decoder of texts")
        found = tokenizer or model.tokenizer
        if found is None:
            raise ValueError("the model has no tokenizer; pass tokenizer=")
        return cls(model, found, context_length(model))

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, with the special tokens around it."""
        ids = self.tokenizer.prompt(text)
        if not ids:
            raise ValueError(
                "the text is empty, and this tokenizer adds no special tokens, so there is nothing to read"
            )
        if self.context is None or len(ids) <= self.context:
            return ids
        if not self.truncate:
            raise ValueError(
                f"the text has {len(ids)} tokens, but the model reads at most {self.context}; to cut it, use truncate "
                "(on the command line: --truncate)"
            )
        body = self.tokenizer.prompt(text, around=False)
        place = next((i for i in range(len(ids)) if ids[i : i + len(body)] == body), 0)
        after = ids[place + len(body) :]
        return [*ids[: self.context - len(after)], *after]

    def batches(
        self, texts: Sequence[str], size: int = BATCH
    ) -> Iterator[tuple[list[int], Int[Tensor, "B T"], Bool[Tensor, "B T"] | None]]:
        """Batches of texts of similar lengths: their places in `texts`, padded tokens, and True where a token is real.

        Sorting by length saves most of the padding.
        """
        device = next(self.model.parameters()).device
        ids = [self.ids(text) for text in texts]
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        for first in range(0, len(order), size):
            places = order[first : first + size]
            yield places, *pad_prompts([ids[place] for place in places], device)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], readable: Bool[Tensor, "B T"] | None
    ) -> tuple[Float[Tensor, "B T D"], Context]:
        """The last hidden states, before any head."""
        context = make_context(len(tokens), tokens.shape[1], tokens.device, readable=readable)
        return self.model.hidden_states(tokens, context), context

    def head(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B D"]:
        """The output of the model's pooler."""
        assert self.model.head is not None, "a pooler is a head"
        return self.model.head(x, context.at("head"), None)


@torch.inference_mode()
def embed(
    model: Model,
    texts: Sequence[str],
    *,
    pool: Pool | None = None,
    normalize: bool | None = None,
    truncate: bool = False,
    tokenizer: Tokenizer | None = None,
) -> list[Tensor]:
    """One vector for each text, or one for each of its tokens with `pool="none"`.

    pool       mean    the mean of the hidden states of all real tokens
               first   the hidden state of the first token, BERT's [CLS]
               max     the largest value of each feature over the real tokens
               last    the hidden state of the last real token
               pooler  the output of the model's own pooler
    normalize  scale each vector to length 1
    truncate   cut texts that are too long; otherwise they are an error

    By default, a folder of sentence-transformers decides: its pooling, normalizing, dense layers,
    default prompt and longest text apply. Other models give the mean, not normalized.
    """
    settings = SentenceSettings.of(model.origin)
    reader = TextReader.of(model, tokenizer)
    chosen = pool or settings.pool
    if chosen == "pooler" and not isinstance(reader.model.config.head, PoolerConfig):
        raise ValueError("this model has no pooler; pool is one of mean, first, max, last, none")
    if settings.length is not None and not truncate:
        longest = min(settings.length, reader.context or settings.length)
        reader, truncate = replace(reader, context=longest), True
        warn_cut(reader, texts, settings)
    reader = replace(reader, truncate=truncate)
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    for places, tokens, readable in reader.batches([settings.prompt + text for text in texts]):
        x, context = reader.hidden_states(tokens, readable)
        real = torch.ones_like(tokens, dtype=torch.bool) if readable is None else readable
        vectors = pool_tokens(chosen, x, real) if chosen != "pooler" else reader.head(x, context)
        if chosen != "none":
            finish = settings if pool is None else replace(settings, dense=())
            vectors = list(
                finish.finish(torch.stack(list(vectors)), settings.normalize if normalize is None else normalize)
            )
        elif normalize:
            vectors = [F.normalize(each, dim=-1) for each in vectors]
        for place, vector in zip(places, vectors, strict=True):
            found[place] = vector
    return found


def warn_cut(reader: TextReader, texts: Sequence[str], settings: SentenceSettings) -> None:
    """Warn about texts that are longer than the folder's longest text."""
    assert reader.context is not None
    long = sum(len(reader.tokenizer.prompt(settings.prompt + text)) > reader.context for text in texts)
    if long:
        each = "has" if long == 1 else "have"
        warnings.warn(
            f"{long} of {len(texts)} texts {each} more than {reader.context} tokens; the rest is cut", stacklevel=3
        )


def pool_tokens(
    pool: Pool, x: Float[Tensor, "B T D"], real: Bool[Tensor, "B T"]
) -> Float[Tensor, "B D"] | list[Float[Tensor, "T D"]]:
    """One vector for each row from those of its real tokens; all of them for "none"."""
    if pool == "none":
        return [row[mine] for row, mine in zip(x, real, strict=True)]
    if pool == "mean":
        return (x * real[:, :, None]).sum(dim=1) / real.sum(dim=1, keepdim=True)
    if pool == "max":
        return x.masked_fill(~real[:, :, None], -torch.inf).amax(dim=1)
    if pool == "last":
        last = (real * torch.arange(real.shape[1], device=real.device)).argmax(dim=1)
        return x[torch.arange(len(x), device=x.device), last]
    return x[:, 0]
