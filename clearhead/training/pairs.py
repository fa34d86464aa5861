"""Learning to write one text from another: translation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import compress, islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.configs import ConfigError, EncoderDecoderConfig, LearnedConfig, TokenEmbeddingConfig
from clearhead.configs.train import PairsConfig, RecipeConfig
from clearhead.data import Shards, build
from clearhead.data.dates import dates
from clearhead.data.pairs import PairBatch, PairBatches, Pairs, pairs
from clearhead.measure.bleu import bleu, import_extra
from clearhead.measure.perplexity import bounded_exp
from clearhead.models.folder import json_text
from clearhead.models.model import EncoderDecoder
from clearhead.tasks.translate import translate
from clearhead.tokenize import Tokenizer, make

from .loss import head_loss
from .run import Run
from .task import Paths, Say, Sums, Task, TrainBatch
from .text import describe_tokenizer, require_causal

Sides = tuple[Shards, Shards]
"""Token shards of the sources and of the targets."""
TRANSLATED_TOGETHER = 128  # sentences in a batch at an evaluation
NAMES = ("training", "validation")


@dataclass(frozen=True)
class PairTrainBatch(TrainBatch):
    """A batch of pairs: targets as in TrainBatch, and the sources."""

    source: Int[Tensor, "B S"] | None = None
    readable: Bool[Tensor, "B S"] | None = None

    def part(self, rows: slice) -> PairTrainBatch:
        source, readable = (None if side is None else side[rows] for side in (self.source, self.readable))
        return PairTrainBatch(self.inputs[rows], self.targets[rows], None, source, readable)

    def to(self, device: torch.device) -> PairTrainBatch:
        source, readable = (None if side is None else side.to(device) for side in (self.source, self.readable))
        return PairTrainBatch(self.inputs.to(device), self.targets.to(device), None, source, readable)

    def apply_model(self, model: EncoderDecoder, **options: Any) -> Tensor:
        assert self.source is not None
        return model(self.source, self.inputs, source_readable=self.readable, **options)


class Translation(Task):
    """Predict every token of the target from the source and the target before it."""

    unit = "tokens"
    score_name = "val/bleu"
    tokenizer: Tokenizer

    def __init__(
        self, recipe: RecipeConfig, tokenizer: Tokenizer, training: Sides, validation: Sides, held: Pairs
    ) -> None:
        assert isinstance(recipe.task, PairsConfig)
        assert tokenizer.end is not None
        self.recipe, self.task, self.tokenizer, self.end = recipe, recipe.task, tokenizer, tokenizer.end
        self.config = fit_config(recipe, tokenizer.vocabulary)
        self.chance_loss = math.log(tokenizer.vocabulary)
        self.training = self.batches(training, NAMES[0], recipe.seed)
        self.held_out = self.batches(validation, NAMES[1], 0)
        short = self.held_out.lengths.max(axis=0) <= recipe.task.length
        self.known = list(islice(compress(held, short), recipe.task.judged))
        self.length: int = round(self.training.mean)

    def size(self) -> int:
        return round(len(self.training) * self.training.mean)

    def batches(self, sides: Sides, use: str, seed: int) -> PairBatches:
        return PairBatches(*sides, use, tokens=self.recipe.batch, length=self.task.length, seed=seed, start=self.end)

    def rows(self, batch: int) -> int:
        return max(1, batch // self.length)

    def batch(self, step: int, rows: slice = slice(None)) -> TrainBatch:
        first, last, _ = rows.indices(self.recipe.batch)
        return to_torch(self.training.at(step, first / self.recipe.batch, last / self.recipe.batch))

    def validation(self) -> Iterator[TrainBatch]:
        return map(to_torch, self.held_out.all())

    def loss(self, model: EncoderDecoder, batch: TrainBatch, smoothing: float) -> tuple[Float[Tensor, ""], Sums]:
        assert isinstance(batch, PairTrainBatch)
        assert batch.source is not None
        x = model.hidden_states(batch.source, batch.inputs, source_readable=batch.readable)
        return head_loss(model.head, x, model.table, batch.targets, smoothing), {}

    def measures(self, loss: float, sums: dict[str, float], count: int) -> dict[str, float]:
        return {"val/loss": loss, "val/perplexity": bounded_exp(loss)}

    def write_samples(self, model: EncoderDecoder) -> dict[str, Any]:
        """Translate held-out sentences greedily: BLEU, the share of exact matches, and the first translation."""
        options: dict[str, Any] = {"beams": 1, "start": self.end, "ends": (self.end,), "batch": TRANSLATED_TOGETHER}
        found = translate(model, [source for source, _ in self.known], tokenizer=self.tokenizer, **options)
        written = [best.text for (best,) in found]
        wanted = [target for _, target in self.known]
        exact = sum(one == other for one, other in zip(written, wanted, strict=True)) / len(wanted)
        return {
            "val/bleu": bleu(written, wanted).score,
            "val/exact": exact,
            "prompt": self.known[0][0],
            "sample": written[0],
        }

    def score(self, numbers: dict[str, Any]) -> float:
        return -numbers["val/bleu"] if "val/bleu" in numbers else numbers["val/loss"]

    def extra_files(self) -> dict[str, str]:
        """The token that a target starts with, in the file that `transformers` and `generate` read."""
        settings = {"decoder_start_token_id": self.end, "eos_token_id": self.end, "num_beams": 5}
        return {"generation_config.json": json_text(settings)}


def translation(recipe: RecipeConfig, paths: Paths, validation: Paths, run: Run, say: Say) -> Translation:
    """Prepare the tokenizer and the token shards; those in the run's folder are reused."""
    assert isinstance(recipe.task, PairsConfig)
    import_extra("sacrebleu")  # fail now, not at the first evaluation
    parts = parts_of(recipe, paths, validation)
    say(f"Reading {parts[0].summary}")
    if (run.folder / "tokenizer.json").exists():
        tokenizer = Tokenizer.load(run.folder)
    else:
        tokenizer = make(recipe.task.tokenizer, parts[0].texts()).with_end()
        tokenizer.save(run.folder)
        describe_tokenizer(recipe, tokenizer, say)
    shards = [sides(part, tokenizer, run.tokens / name) for name, part in zip(NAMES, parts, strict=True)]
    task = Translation(recipe, tokenizer, shards[0], shards[1], parts[1])
    skipped = task.training.skipped
    longer = f" ({skipped:,} longer than {recipe.task.length} tokens skipped)" if skipped else ""
    say(f"{len(task.training):,} pairs to train on{longer}, {len(task.held_out):,} to validate")
    return task


def parts_of(recipe: RecipeConfig, paths: Paths, validation: Paths) -> tuple[Pairs, Pairs]:
    """Pairs for training and for validation: separate files, or a share."""
    if not paths:
        if validation:
            raise ConfigError("the built-in dates have their own validation pairs; give --data with --validation")
        return dates(recipe.validation, recipe.seed)
    everything = require_pairs(pairs(paths))
    if validation:
        return everything, require_pairs(pairs(validation))
    parts = everything.split(recipe.validation, recipe.seed)
    if next(iter(parts[1]), None) is None:
        raise ConfigError(
            f"a share of {recipe.validation} of the pairs in {parts[0].summary} holds out none; give --validation, or "
            "hold out more with --set validation=0.2"
        )
    return parts


def require_pairs(known: Pairs) -> Pairs:
    if next(iter(known), None) is None:
        raise ConfigError(f"there is no pair in {known.summary}: every line has an empty side")
    return known


def sides(part: Pairs, tokenizer: Tokenizer, folder: Path) -> Sides:
    return build(part.side(0), tokenizer, folder / "source"), build(part.side(1), tokenizer, folder / "target")


def fit_config(recipe: RecipeConfig, vocabulary: int) -> EncoderDecoderConfig:
    """The recipe's model with the tokenizer's vocabulary. A checkpoint's model stays unchanged."""
    config = recipe.model
    if not isinstance(config, EncoderDecoderConfig):
        raise ConfigError(
            f"a {config.kind()} cannot learn from pairs; use an EncoderDecoder, such as the recipe translate"
        )
    assert isinstance(recipe.task, PairsConfig)
    require_causal(config.decoder)
    if not isinstance(config.source, TokenEmbeddingConfig):
        raise ConfigError("this model reads sound; `train translate` trains models that read texts")
    tables = [config.source, *([] if config.target is None else [config.target])]
    for position in (table.position for table in tables):
        if isinstance(position, LearnedConfig) and position.length < recipe.task.length:
            raise ConfigError(f"length={recipe.task.length}, but the model has {position.length} learned positions")
    if recipe.start is not None:
        known = min(config.head.vocabulary, *(table.vocabulary for table in tables))
        if known < vocabulary:
            raise ConfigError(f"the tokenizer has {vocabulary:,} tokens, but the checkpoint has {known:,}")
        return config
    return replace(
        config,
        source=replace(config.source, vocabulary=vocabulary),
        target=None if config.target is None else replace(config.target, vocabulary=vocabulary),
        head=replace(config.head, vocabulary=vocabulary),
    )


def to_torch(batch: PairBatch) -> PairTrainBatch:
    readable = None if batch.readable is None else torch.from_numpy(batch.readable)
    inputs, targets, source = map(torch.from_numpy, (batch.inputs, batch.targets, batch.source))
    return PairTrainBatch(inputs, targets, None, source, readable)
