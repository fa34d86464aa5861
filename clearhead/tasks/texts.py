"""Compute embeddings of texts, and batch texts for an encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.configs import PoolerConfig, TokenEmbeddingConfig
from clearhead.generate.complete import own_tokenizer
from clearhead.generate.defaults import context_length
from clearhead.generate.loop import pad_prompts
from clearhead.models.context import make_context
from clearhead.models.model import EncoderDecoder, Model, SequenceModel
from clearhead.nn.context import Context
from clearhead.tokenize import Tokenizer

Pool = Literal["mean", "first", "pooler", "none"]
BATCH = 32


@dataclass(frozen=True)
class TextReader:
    """A model that reads texts, and its tokenizer."""

    model: SequenceModel
    tokenizer: Tokenizer
    context: int | None

    @classmethod
    def of(cls, model: Model, tokenizer: Tokenizer | None = None) -> TextReader:
        if isinstance(model, EncoderDecoder) or not isinstance(model.config.embedding, TokenEmbeddingConfig):
            raise ValueError("this needs a model that reads one text; this one reads images, or is an encoder–decoder")
        found = tokenizer or own_tokenizer(model)
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
        if self.context is not None and len(ids) > self.context:
            raise ValueError(f"the text has {len(ids)} tokens, but the model reads at most {self.context}")
        return ids

    def batches(
        self, texts: Sequence[str], size: int = BATCH
    ) -> Iterator[tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"] | None]]:
        """Batches of `size` texts: padded tokens, and True where a token is real."""
        device = next(self.model.parameters()).device
        for first in range(0, len(texts), size):
            yield pad_prompts([self.ids(text) for text in texts[first : first + size]], device)

    def hidden_states(
        self, tokens: Int[Tensor, "B T"], readable: Bool[Tensor, "B T"] | None
    ) -> tuple[Float[Tensor, "B T D"], Context]:
        """The last hidden states, before any head."""
        context = make_context(len(tokens), tokens.shape[1], tokens.device, readable=readable)
        return self.model.hidden_states(tokens, context), context


@torch.inference_mode()
def embed(
    model: Model, texts: Sequence[str], *, pool: Pool = "mean", tokenizer: Tokenizer | None = None
) -> list[Tensor]:
    """One vector for each text, or one for each of its tokens with `pool="none"`.

    mean    the mean of the hidden states of all real tokens
    first   the hidden state of the first token, BERT's [CLS]
    pooler  the output of the model's own pooler
    """
    reader, found = TextReader.of(model, tokenizer), []
    if pool == "pooler" and not isinstance(reader.model.config.head, PoolerConfig):
        raise ValueError("this model has no pooler; pool is one of mean, first, none")
    for tokens, readable in reader.batches(texts):
        x, context = reader.hidden_states(tokens, readable)
        real = torch.ones_like(tokens, dtype=torch.bool) if readable is None else readable
        if pool == "none":
            found += [row[mine] for row, mine in zip(x, real, strict=True)]
        elif pool == "mean":
            found += list((x * real[:, :, None]).sum(dim=1) / real.sum(dim=1, keepdim=True))
        elif pool == "first":
            found += list(x[:, 0])
        else:
            assert reader.model.head is not None, "a pooler is a head"
            found += list(reader.model.head(x, context.at("head"), None))
    return found
