"""From paths to tokenizer and shards, and the model that fits them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clearhead.configs import (
    ConfigError,
    LearnedConfig,
    LMHeadConfig,
    MaskedLMHeadConfig,
    SequenceModelConfig,
    TokenEmbeddingConfig,
)
from clearhead.configs.data import CharactersConfig
from clearhead.configs.train import RecipeConfig
from clearhead.data import Corpus, Shards, build, documents, split, standard_library
from clearhead.tokenize import Tokenizer, make

from .run import Run

Say = Callable[[str], None]


@dataclass(frozen=True)
class TextData:
    """What a language model is trained on and measured with."""

    tokenizer: Tokenizer
    training: Shards
    validation: Shards


def prepare_text(recipe: RecipeConfig, paths: Sequence[str | Path], run: Run, say: Say) -> TextData:
    """Tokenizer and shards in the run's folder; what is there already is used again."""
    corpus: Corpus = documents(paths) if paths else standard_library()
    say(f"reading {corpus.summary}")
    training, validation = split(corpus, recipe.validation, recipe.seed)
    if (run.folder / "tokenizer.json").exists():
        tokenizer = Tokenizer.load(run.folder)
    else:
        # characters are those of the whole text: one that only the validation part has must be known
        known = corpus if isinstance(recipe.tokenizer, CharactersConfig) else training
        tokenizer = make(recipe.tokenizer, known.texts())
        tokenizer.save(run.folder)
        say(f"made a tokenizer of {tokenizer.vocabulary:,} tokens")
    shards = [
        build(part, tokenizer, run.tokens / name)
        for name, part in {"training": training, "validation": validation}.items()
    ]
    say(f"{len(shards[0]):,} tokens to train on, {len(shards[1]):,} to validate with")
    return TextData(tokenizer, *shards)


def fitted(recipe: RecipeConfig, vocabulary: int) -> SequenceModelConfig:
    """The recipe's model with the tokenizer's vocabulary."""
    config = recipe.model
    if not isinstance(config, SequenceModelConfig) or not isinstance(config.embedding, TokenEmbeddingConfig):
        raise ConfigError(f"a {config.kind()} of this shape cannot be trained on plain text")
    position = config.embedding.position
    if isinstance(position, LearnedConfig) and position.length < recipe.context:
        raise ConfigError(f"context={recipe.context}, but the model has {position.length} learned positions")
    head = config.head
    if isinstance(head, LMHeadConfig | MaskedLMHeadConfig):
        head = replace(head, vocabulary=vocabulary)
    return replace(config, embedding=replace(config.embedding, vocabulary=vocabulary), head=head)
