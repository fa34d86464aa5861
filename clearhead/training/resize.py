"""Change a recipe by its most common settings: layers, width, heads, context, learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from clearhead.configs import (
    AdamWConfig,
    BlockConfig,
    ConfigError,
    EncoderDecoderConfig,
    LearnedConfig,
    MuonConfig,
    OptimizerConfig,
    ParallelBlockConfig,
    RecipeConfig,
    SequenceModelConfig,
    StackConfig,
)
from clearhead.configs.base import nearest
from clearhead.configs.data import BytePairConfig
from clearhead.configs.train import ImagesConfig, PairsConfig

Block = BlockConfig | ParallelBlockConfig


@dataclass(frozen=True, kw_only=True)
class RecipeSizes:
    """What to change in a recipe; None leaves it unchanged.

    lr          the main learning rate; all others are scaled by the same factor
    vocabulary  number of tokens in a byte-pair vocabulary
    mixer       a name from `clearhead compare`: full, window, longformer, linear, performer, mamba, lstm …
    """

    lr: float | None = None
    batch: int | None = None
    context: int | None = None
    layers: int | None = None
    dim: int | None = None
    heads: int | None = None
    mixer: str | None = None
    vocabulary: int | None = None


def resize(recipe: RecipeConfig, sizes: RecipeSizes) -> RecipeConfig:
    """The recipe with other sizes. Feed-forward layers keep their width relative to `dim`."""
    for field in fields(sizes):
        value = getattr(sizes, field.name)
        if isinstance(value, int | float) and not value > 0:
            raise ConfigError(f"--{field.name} is {value}, but must be positive")
    shape = (sizes.layers, sizes.dim, sizes.heads, sizes.mixer)
    if recipe.start is not None and any(value is not None for value in (*shape, sizes.vocabulary)):
        raise ConfigError(
            "--from takes the model from a checkpoint; leave out --layers, --dim, --heads, --mixer, --vocabulary"
        )
    if sizes.vocabulary is not None:
        recipe = resize_vocabulary(recipe, sizes.vocabulary)
    if sizes.context is not None:
        recipe = resize_context(recipe, sizes.context)
    if any(value is not None for value in shape):
        recipe = replace(recipe, model=resize_model(recipe, sizes))
    if sizes.lr is not None:
        recipe = replace(recipe, optimizer=scale_rates(recipe.optimizer, sizes.lr))
    return recipe if sizes.batch is None else replace(recipe, batch=sizes.batch)


def scale_rates(optimizer: OptimizerConfig, lr: float) -> OptimizerConfig:
    """The optimizer with `lr` as its main learning rate and all its other rates scaled by the same factor."""
    factor = lr / optimizer.lr

    def scale(config: AdamWConfig) -> dict[str, float]:
        rates = {name: getattr(config, name) for name in ("lr", "embedding_lr", "head_lr")}
        return {name: rate * factor for name, rate in rates.items() if rate is not None}

    if isinstance(optimizer, MuonConfig):
        return replace(optimizer, lr=lr, rest=replace(optimizer.rest, **scale(optimizer.rest)))
    return replace(optimizer, **scale(optimizer) | {"lr": lr})


def resize_vocabulary(recipe: RecipeConfig, vocabulary: int) -> RecipeConfig:
    tokenizer = getattr(recipe.task, "tokenizer", None)
    if not isinstance(tokenizer, BytePairConfig):
        kind = recipe.task.kind() if tokenizer is None else tokenizer.kind()
        raise ConfigError(f"--vocabulary sets the size of a byte-pair vocabulary, but this recipe has {kind}")
    return recipe.with_value("task.tokenizer.vocabulary", vocabulary)


def resize_context(recipe: RecipeConfig, context: int) -> RecipeConfig:
    """Set the number of tokens per row. If it grows, learned positions grow too."""
    if isinstance(recipe.task, ImagesConfig):
        raise ConfigError("--context is the number of tokens in a row, and images have none")
    recipe = recipe.with_value("task.length" if isinstance(recipe.task, PairsConfig) else "task.context", context)
    model = recipe.model
    position = model.embedding.position if isinstance(model, SequenceModelConfig) else None
    if recipe.start is None and isinstance(position, LearnedConfig) and position.length < context:
        recipe = recipe.with_value("model.embedding.position.length", context)
    return recipe


def resize_model(recipe: RecipeConfig, sizes: RecipeSizes) -> SequenceModelConfig | EncoderDecoderConfig:
    model, context = recipe.model, getattr(recipe.task, "context", 0)
    if isinstance(model, EncoderDecoderConfig):
        if sizes.mixer is not None:
            raise ConfigError("--mixer replaces the mixers of a language model, not of an encoder–decoder")
        encoder, decoder = (resize_stack(stack, sizes, context) for stack in (model.encoder, model.decoder))
        return replace(model, encoder=encoder, decoder=decoder)
    return replace(model, stack=resize_stack(model.stack, sizes, context))


def resize_stack(stack: StackConfig, sizes: RecipeSizes, context: int) -> StackConfig:
    dim, repeats = sizes.dim or stack.dim, stack.repeats
    pattern = tuple(resize_block(block, sizes, dim / stack.dim, context) for block in stack.pattern)
    if sizes.mixer is not None:
        pattern = pattern[:1]  # blocks differ only in their mixers, and now all mixers are the same
        repeats = len(stack.pattern) * stack.repeats
    if sizes.layers is not None:
        repeats, rest = divmod(sizes.layers - len(stack.first), len(pattern))
        if rest or repeats < 1:
            raise ConfigError(
                f"--layers is {sizes.layers}, but this model repeats a pattern of {len(pattern)} blocks; give a "
                f"multiple of {len(pattern)}"
            )
    return replace(stack, dim=dim, pattern=pattern, repeats=repeats)


def resize_block(block: Block, sizes: RecipeSizes, wider: float, context: int) -> Block:
    """The block with new heads or a new mixer, and a feed-forward layer that grows with the width."""
    changes: dict[str, Any] = {}
    mixer: Any = block.mixer
    heads = sizes.heads or getattr(block.mixer, "heads", None) or 4
    if sizes.mixer is not None:
        changes["mixer"] = named_mixer(sizes.mixer, heads)(context)
    elif sizes.heads is not None and hasattr(block.mixer, "heads"):
        changes["mixer"] = replace(mixer, **{"heads": heads} | drop_kv_heads(mixer))
    cross = getattr(block, "cross", None)
    if sizes.heads is not None and cross is not None:
        changes["cross"] = replace(cross, **{"heads": heads} | drop_kv_heads(cross))
    ffn: Any = block.ffn
    hidden = getattr(ffn, "hidden", None)
    if hidden is not None and wider != 1:
        changes["ffn"] = replace(ffn, hidden=max(8, round(hidden * wider / 8) * 8))
    return replace(block, **changes)


def drop_kv_heads(mixer: Any) -> dict[str, None]:
    """Reset `kv_heads`: after a change of `heads`, every head has its own keys and values."""
    return {"kv_heads": None} if hasattr(mixer, "kv_heads") else {}


def named_mixer(name: str, heads: int) -> Callable[[int], Any]:
    from clearhead.measure.growth import ModelSize, mixers

    known = mixers(ModelSize(heads=heads))
    if name not in known:
        raise ConfigError(f"there is no mixer {name!r}{nearest(name, known)}; known mixers: {', '.join(known)}")
    return known[name]
