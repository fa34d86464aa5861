"""Learning from text: the next token, or tokens that are hidden."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.configs import (
    ConfigError,
    LearnedConfig,
    LMHeadConfig,
    MaskedLMHeadConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
)
from clearhead.configs.data import CharactersConfig
from clearhead.configs.train import MaskedTokensConfig, NextTokenConfig, RecipeConfig
from clearhead.data import (
    CHAT_TEMPLATE,
    IGNORED,
    Batch,
    Batches,
    Corpus,
    Hiding,
    Shards,
    build,
    documents,
    split,
    standard_library,
    windows,
)
from clearhead.measure.perplexity import bounded_exp
from clearhead.models.context import make_context
from clearhead.models.model import SequenceModel
from clearhead.tokenize import MASK, Tokenizer, make

from .loss import linear_cross_entropy
from .run import Run
from .task import Paths, Say, Sums, Task, TrainBatch, learns

PROMPT_TOKENS, SAMPLE_TOKENS = 8, 64


class Text(Task):
    """What the two tasks share: tokenizer, shards, windows over them."""

    unit = "tokens"
    tokenizer: Tokenizer
    length: int
    head: type[LMHeadConfig] | type[MaskedLMHeadConfig]

    def __init__(self, recipe: RecipeConfig, tokenizer: Tokenizer, training: Shards, validation: Shards) -> None:
        assert isinstance(recipe.task, NextTokenConfig | MaskedTokensConfig)
        self.recipe, self.task, self.tokenizer = recipe, recipe.task, tokenizer
        self.training, self.held_out = training, validation
        self.config = fitted(recipe, self.head, recipe.task.context, tokenizer.vocabulary)
        self.guess = math.log(tokenizer.vocabulary)
        self.length = min(self.task.context, max(len(training), len(validation)))  # a row is no longer than any text
        self.batches = Batches(
            training, batch=recipe.batch, context=self.length, seed=recipe.seed, apart=self.task.apart
        )

    def batch(self, step: int, rows: slice = slice(None)) -> TrainBatch:
        return to_torch(self.batches.at(step, rows))

    def validation(self) -> Iterator[TrainBatch]:
        task = self.task
        for window in windows(self.held_out, self.length, batch=self.recipe.batch, apart=task.apart):
            yield to_torch(window)


class NextToken(Text):
    """The loss of a language model; the vocabulary's logits are never all there at once."""

    head = LMHeadConfig

    def loss(self, model: SequenceModel, batch: TrainBatch, smoothing: float) -> tuple[Float[Tensor, ""], Sums]:
        x, head = hidden(model, batch), model.head
        assert head is not None
        weight = model.embedding.table if head.weight is None else head.weight
        loss = linear_cross_entropy(
            x, weight, batch.targets, bias=head.bias, ignore_index=IGNORED, label_smoothing=smoothing
        )
        return loss, {}

    def measures(self, loss: float, sums: dict[str, float], count: int) -> dict[str, float]:
        bytes_per_token = self.held_out.scored_bytes / self.held_out.scored
        return {"val/loss": loss, "val/perplexity": bounded_exp(loss), "val/bpb": loss / math.log(2) / bytes_per_token}

    def made(self, model: SequenceModel) -> dict[str, Any]:
        """How it goes on from the first words that it has not seen."""
        prompt = [int(token) for token in self.held_out.tokens(0, min(PROMPT_TOKENS, len(self.held_out)))]
        length = min(SAMPLE_TOKENS, self.task.context - len(prompt))
        return {"sample": continued(model, self.tokenizer, prompt, length)}

    def files(self) -> dict[str, str]:
        """The layout of conversations, where it has learned from any."""
        return {"chat_template.jinja": CHAT_TEMPLATE} if self.training.chats else {}


class MaskedTokens(Text):
    """The loss on hidden tokens; only these need logits."""

    head = MaskedLMHeadConfig

    def __init__(self, recipe: RecipeConfig, tokenizer: Tokenizer, training: Shards, validation: Shards) -> None:
        super().__init__(recipe, tokenizer, training, validation)
        assert isinstance(self.task, MaskedTokensConfig)
        mask = tokenizer.inner.token_to_id(MASK)
        if mask is None:
            raise ConfigError(f"the tokenizer has no token {MASK}, by which a masked language model hides tokens")
        self.hiding = Hiding(mask, tokenizer.vocabulary, self.task.share, recipe.seed)

    def batch(self, step: int, rows: slice = slice(None)) -> TrainBatch:
        first = rows.indices(self.recipe.batch)[0] + step * self.recipe.batch
        return to_torch(self.hiding.hide(self.batches.at(step, rows), first))

    def validation(self) -> Iterator[TrainBatch]:
        task, first = self.task, 0
        for window in windows(self.held_out, self.length, batch=self.recipe.batch, apart=task.apart):
            yield to_torch(self.hiding.hide(window, first))
            first += len(window.inputs)

    def loss(self, model: SequenceModel, batch: TrainBatch, smoothing: float) -> tuple[Float[Tensor, ""], Sums]:
        x, head = hidden(model, batch), model.head
        assert head is not None
        hidden_ones = batch.targets != IGNORED
        wanted = batch.targets[hidden_ones]
        context = make_context(1, len(wanted), x.device)
        logits = head(x[hidden_ones][None], context, model.embedding.table)[0]
        loss = F.cross_entropy(logits.float(), wanted, label_smoothing=smoothing, reduction="sum")
        return loss / max(len(wanted), 1), {"right": (logits.argmax(dim=-1) == wanted).sum()}

    def measures(self, loss: float, sums: dict[str, float], count: int) -> dict[str, float]:
        return {"val/loss": loss, "val/perplexity": bounded_exp(loss), "val/accuracy": sums["right"] / max(count, 1)}


@learns(NextTokenConfig)
def next_token(recipe: RecipeConfig, paths: Paths, validation: Paths, run: Run, say: Say) -> NextToken:
    return NextToken(recipe, *tokens(recipe, paths, validation, run, say))


@learns(MaskedTokensConfig)
def masked_tokens(recipe: RecipeConfig, paths: Paths, validation: Paths, run: Run, say: Say) -> MaskedTokens:
    return MaskedTokens(recipe, *tokens(recipe, paths, validation, run, say))


def tokens(
    recipe: RecipeConfig, paths: Paths, validation: Paths, run: Run, say: Say
) -> tuple[Tokenizer, Shards, Shards]:
    """Tokenizer and shards in the run's folder; what is there already is used again."""
    assert isinstance(recipe.task, NextTokenConfig | MaskedTokensConfig)
    config = recipe.task.tokenizer
    corpus: Corpus = documents(paths, run.folder) if paths else standard_library()
    say(f"reading {corpus.summary}")
    held_out = documents(validation, run.folder) if validation else None
    parts = split(corpus, recipe.validation, recipe.seed) if held_out is None else (corpus, held_out)
    if (run.folder / "tokenizer.json").exists():
        tokenizer = Tokenizer.load(run.folder)
    else:
        # characters are those of the whole text: one that only the validation part has must be known
        known = parts if isinstance(config, CharactersConfig) else parts[:1]
        tokenizer = make(config, (text for part in known for text in part.texts()))
        if isinstance(recipe.task, MaskedTokensConfig):
            tokenizer = tokenizer.with_mask()
        tokenizer.save(run.folder)
        say(f"{'took' if recipe.start else 'made'} a tokenizer of {tokenizer.vocabulary:,} tokens")
    shards = [
        build(part, tokenizer, run.tokens / name) for name, part in zip(("training", "validation"), parts, strict=True)
    ]
    say(f"{len(shards[0]):,} tokens to train on, {len(shards[1]):,} to validate with")
    if len(shards[0]) <= recipe.task.context:
        say(f"that is less than one row of task.context={recipe.task.context}, so rows are as long as the text")
    return tokenizer, shards[0], shards[1]


def fitted(
    recipe: RecipeConfig, head: type[LMHeadConfig] | type[MaskedLMHeadConfig], context: int, vocabulary: int
) -> SequenceModelConfig:
    """The recipe's model with the tokenizer's vocabulary. A checkpoint's model stays as it is."""
    config = recipe.model
    if not isinstance(config, SequenceModelConfig) or not isinstance(config.embedding, TokenEmbeddingConfig):
        raise ConfigError(f"a {config.kind()} of this shape cannot be trained on plain text")
    if not isinstance(config.head, head):
        kind = "no head" if config.head is None else f"a {config.head.kind()} head"
        raise ConfigError(f"the model has {kind}, but the task {recipe.task.kind()} needs a {head.kind()}")
    if head is LMHeadConfig:
        require_causal(config.stack)
    position = config.embedding.position
    if isinstance(position, LearnedConfig) and position.length < context:
        raise ConfigError(f"context={context}, but the model has {position.length} learned positions")
    if recipe.start is not None:
        if config.embedding.vocabulary < vocabulary:
            raise ConfigError(
                f"the tokenizer has {vocabulary:,} tokens, but the checkpoint knows {config.embedding.vocabulary:,}"
            )
        return config
    embedding = replace(config.embedding, vocabulary=vocabulary)
    return replace(config, embedding=embedding, head=replace(config.head, vocabulary=vocabulary))


def require_causal(stack: StackConfig) -> None:
    """What foretells the next token must not have read it."""
    if not stack.causal:
        place, mixer = next((i, b.mixer) for i, b in enumerate(stack.blocks) if not b.mixer.mask.causal)
        raise ConfigError(
            f"block {place} reads later tokens: its {mixer.kind()} has the mask {mixer.mask.kind()}, and so would be "
            "given the very tokens that it is to foretell; make it Causal"
        )


def hidden(model: SequenceModel, batch: TrainBatch) -> Float[Tensor, "B T D"]:
    """What the head reads."""
    rows, length = batch.inputs.shape
    context = make_context(rows, length, batch.inputs.device, documents=batch.documents)
    return model.hidden(batch.inputs, context)


def continued(model: Any, tokenizer: Tokenizer, prompt: str | list[int], steps: int) -> str:
    """How a language model goes on from a text, or from tokens."""
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    ids = ids or [tokenizer.end or 0]
    if steps < 1:
        return tokenizer.decode(ids)
    options = {"max_new_tokens": steps, "temperature": 0.8, "seed": 0, "ends": ()}
    return tokenizer.decode([*ids, *model.generate(ids, tokenizer=tokenizer, **options)[0].tokens])


def to_torch(batch: Batch) -> TrainBatch:
    documents = None if batch.documents is None else torch.from_numpy(batch.documents)
    return TrainBatch(torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets), documents)
