"""Learning from text: predict the next token, or masked tokens."""

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
from clearhead.configs.data import BytePairConfig, CharactersConfig
from clearhead.configs.train import MaskedTokensConfig, NextTokenConfig, RecipeConfig
from clearhead.data import (
    CHAT_TEMPLATE,
    IGNORED,
    Batch,
    Batches,
    Corpus,
    Shards,
    TokenMasking,
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

from .loss import head_loss
from .run import Run
from .task import Paths, Say, Sums, Task, TrainBatch

PROMPT_CHARACTERS, SAMPLE_CHARACTERS = 24, 120


class TextTask(Task):
    """What both text tasks share: tokenizer, token shards and windows over them."""

    unit = "tokens"
    tokenizer: Tokenizer
    length: int
    head: type[LMHeadConfig] | type[MaskedLMHeadConfig]

    def __init__(self, recipe: RecipeConfig, tokenizer: Tokenizer, training: Shards, validation: Shards) -> None:
        assert isinstance(recipe.task, NextTokenConfig | MaskedTokensConfig)
        self.recipe, self.task, self.tokenizer = recipe, recipe.task, tokenizer
        self.training, self.held_out = training, validation
        self.config = fit_config(recipe, self.head, recipe.task.context, tokenizer.vocabulary)
        self.chance_loss = math.log(tokenizer.vocabulary)
        self.length = min(self.task.context, max(len(training), len(validation)))  # no row is longer than the text
        self.batches = Batches(
            training, batch=recipe.batch, context=self.length, seed=recipe.seed, apart=self.task.apart
        )

    def size(self) -> int:
        return len(self.training)

    def batch(self, step: int, rows: slice = slice(None)) -> TrainBatch:
        return to_torch(self.batches.at(step, rows))

    def validation(self) -> Iterator[TrainBatch]:
        task = self.task
        for window in windows(self.held_out, self.length, batch=self.recipe.batch, apart=task.apart):
            yield to_torch(window)


class NextToken(TextTask):
    """The loss of a language model. The logits of the vocabulary are never all in memory at once."""

    head = LMHeadConfig

    def loss(self, model: SequenceModel, batch: TrainBatch, smoothing: float) -> tuple[Float[Tensor, ""], Sums]:
        x, head = hidden_states(model, batch), model.head
        assert head is not None
        return head_loss(head, x, model.table, batch.targets, smoothing), {}

    @property
    def bytes_per_token(self) -> float:
        return self.held_out.scored_bytes / self.held_out.scored

    def measures(self, loss: float, sums: dict[str, float], count: int) -> dict[str, float]:
        bits_per_byte = loss / math.log(2) / self.bytes_per_token
        return {"val/loss": loss, "val/perplexity": bounded_exp(loss), "val/bpb": bits_per_byte}

    def write_samples(self, model: SequenceModel) -> dict[str, Any]:
        """A continuation of the first words of the held-out text, or an answer to its first question."""
        words = math.ceil(PROMPT_CHARACTERS / self.bytes_per_token)
        count = min(self.held_out.question_length() or words, len(self.held_out), self.task.context - 1)
        prompt = [int(token) for token in self.held_out.tokens(0, count)]
        length = math.ceil(SAMPLE_CHARACTERS / self.bytes_per_token)
        position = self.config.embedding.position if isinstance(self.config, SequenceModelConfig) else None
        if isinstance(position, LearnedConfig):
            length = min(length, position.length - len(prompt))
        return {
            "prompt": self.tokenizer.decode(prompt),
            "sample": continue_text(model, self.tokenizer, prompt, length),
        }

    def extra_files(self) -> dict[str, str]:
        """The chat template, if the data has conversations."""
        return {"chat_template.jinja": CHAT_TEMPLATE} if self.training.chats else {}


class MaskedTokens(TextTask):
    """The loss on masked tokens. Only these need logits."""

    head = MaskedLMHeadConfig

    def __init__(self, recipe: RecipeConfig, tokenizer: Tokenizer, training: Shards, validation: Shards) -> None:
        super().__init__(recipe, tokenizer, training, validation)
        assert isinstance(self.task, MaskedTokensConfig)
        mask = tokenizer.inner.token_to_id(MASK)
        if mask is None:
            raise ConfigError(f"the tokenizer has no token {MASK}, which a masked language model needs")
        self.masking = TokenMasking(mask, tokenizer.vocabulary, self.task.share, recipe.seed)

    def batch(self, step: int, rows: slice = slice(None)) -> TrainBatch:
        first = rows.indices(self.recipe.batch)[0] + step * self.recipe.batch
        return to_torch(self.masking.mask_tokens(self.batches.at(step, rows), first))

    def validation(self) -> Iterator[TrainBatch]:
        task, first = self.task, 0
        for window in windows(self.held_out, self.length, batch=self.recipe.batch, apart=task.apart):
            yield to_torch(self.masking.mask_tokens(window, first))
            first += len(window.inputs)

    def loss(self, model: SequenceModel, batch: TrainBatch, smoothing: float) -> tuple[Float[Tensor, ""], Sums]:
        x, head = hidden_states(model, batch), model.head
        assert head is not None
        masked = batch.targets != IGNORED
        wanted = batch.targets[masked]
        context = make_context(1, len(wanted), x.device)
        logits = head(x[masked][None], context, model.embedding.table)[0]
        loss = F.cross_entropy(logits.float(), wanted, label_smoothing=smoothing, reduction="sum")
        return loss / max(len(wanted), 1), {"right": (logits.argmax(dim=-1) == wanted).sum()}

    def measures(self, loss: float, sums: dict[str, float], count: int) -> dict[str, float]:
        return {"val/loss": loss, "val/perplexity": bounded_exp(loss), "val/accuracy": sums["right"] / max(count, 1)}


def next_token(recipe: RecipeConfig, paths: Paths, validation: Paths, run: Run, say: Say) -> NextToken:
    return NextToken(recipe, *prepare_tokens(recipe, paths, validation, run, say))


def masked_tokens(recipe: RecipeConfig, paths: Paths, validation: Paths, run: Run, say: Say) -> MaskedTokens:
    return MaskedTokens(recipe, *prepare_tokens(recipe, paths, validation, run, say))


def prepare_tokens(
    recipe: RecipeConfig, paths: Paths, validation: Paths, run: Run, say: Say
) -> tuple[Tokenizer, Shards, Shards]:
    """The tokenizer and the token shards for training and validation; those in the run's folder are reused."""
    assert isinstance(recipe.task, NextTokenConfig | MaskedTokensConfig)
    config = recipe.task.tokenizer
    corpus: Corpus = documents(paths, run.folder, say) if paths else standard_library()
    say(f"Reading {corpus.summary}")
    held_out = documents(validation, run.folder, say) if validation else None
    parts = split(corpus, recipe.validation, recipe.seed) if held_out is None else (corpus, held_out)
    if (run.folder / "tokenizer.json").exists():
        tokenizer = Tokenizer.load(run.folder)
    else:
        # Characters come from the whole text: one that only the validation part has must be known too.
        known = parts if isinstance(config, CharactersConfig) else parts[:1]
        tokenizer = make(config, (text for part in known for text in part.texts()))
        describe_tokenizer(recipe, tokenizer, say)
        if isinstance(recipe.task, MaskedTokensConfig):
            tokenizer = tokenizer.with_mask_token()
        tokenizer.save(run.folder)
    training, validating = (
        build(part, tokenizer, run.tokens / name) for name, part in zip(("training", "validation"), parts, strict=True)
    )
    say(f"{len(training):,} tokens to train on, {len(validating):,} to validate")
    if len(training) <= recipe.task.context:
        say(f"The text is shorter than the context of {recipe.task.context:,} tokens, so rows are as long as the text.")
    return tokenizer, training, validating


def describe_tokenizer(recipe: RecipeConfig, tokenizer: Tokenizer, say: Say) -> None:
    """Say how many tokens the vocabulary has, and if the text supports fewer than the recipe asks for."""
    task = recipe.task
    wanted = getattr(task, "tokenizer", None)
    if isinstance(wanted, BytePairConfig) and tokenizer.vocabulary < wanted.vocabulary:
        say(
            f"The text is too small for a vocabulary of {wanted.vocabulary:,} tokens: using {tokenizer.vocabulary:,} "
            "(--vocabulary sets another limit)"
        )
    else:
        say(f"{'Using the checkpoint’s' if recipe.start else 'Made a'} tokenizer of {tokenizer.vocabulary:,} tokens")


def fit_config(
    recipe: RecipeConfig, head: type[LMHeadConfig] | type[MaskedLMHeadConfig], context: int, vocabulary: int
) -> SequenceModelConfig:
    """The recipe's model with the tokenizer's vocabulary. A checkpoint's model stays unchanged."""
    config = recipe.model
    if not isinstance(config, SequenceModelConfig) or not isinstance(config.embedding, TokenEmbeddingConfig):
        raise ConfigError(f"a {config.kind()} of this shape cannot be trained on plain text")
    if not isinstance(config.head, head):
        kind = "no head" if config.head is None else f"a {config.head.kind()} head"
        raise ConfigError(f"the model has {kind}, but the task {recipe.task.kind()} needs a {head.kind()} head")
    if head is LMHeadConfig:
        require_causal(config.stack)
    position = config.embedding.position
    if isinstance(position, LearnedConfig) and position.length < context:
        raise ConfigError(
            f"context={context}, but the model has {position.length} learned positions; use --context {position.length}"
        )
    if recipe.start is not None:
        if config.embedding.vocabulary < vocabulary:
            raise ConfigError(
                f"the tokenizer has {vocabulary:,} tokens, but the checkpoint has {config.embedding.vocabulary:,}"
            )
        return config
    embedding = replace(config.embedding, vocabulary=vocabulary)
    return replace(config, embedding=embedding, head=replace(config.head, vocabulary=vocabulary))


def require_causal(stack: StackConfig) -> None:
    """Refuse a language model that can see the tokens it must predict."""
    if not stack.causal:
        place, mixer = next((i, b.mixer) for i, b in enumerate(stack.blocks) if not b.mixer.mask.causal)
        raise ConfigError(
            f"block {place} can see the tokens it must predict: its {mixer.kind()} has the mask {mixer.mask.kind()}; "
            "make it Causal"
        )


def hidden_states(model: SequenceModel, batch: TrainBatch) -> Float[Tensor, "B T D"]:
    """The input of the head."""
    rows, length = batch.inputs.shape
    context = make_context(rows, length, batch.inputs.device, documents=batch.documents)
    return model.hidden_states(batch.inputs, context)


def continue_text(model: Any, tokenizer: Tokenizer, prompt: str | list[int], steps: int) -> str:
    """The prompt and `steps` tokens that the model writes after it."""
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    ids = ids or [tokenizer.end or 0]
    if steps < 1:
        return tokenizer.decode(ids)
    options = {"max_new_tokens": steps, "temperature": 0.8, "seed": 0, "ends": ()}
    return tokenizer.decode([*ids, *model.generate(ids, tokenizer=tokenizer, **options)[0].tokens])


def to_torch(batch: Batch) -> TrainBatch:
    documents = None if batch.documents is None else torch.from_numpy(batch.documents)
    return TrainBatch(torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets), documents)
