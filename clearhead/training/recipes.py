"""Recipes by name: functions that return a whole training run. `clearhead recipes NAME` prints one as recipe.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    ClassHeadConfig,
    ConfigError,
    FeedForwardConfig,
    LMHeadConfig,
    LSTMConfig,
    MaskedLMHeadConfig,
    RMSNormConfig,
    RotaryConfig,
    SequenceModelConfig,
    ShortConvConfig,
    StackConfig,
    TokenEmbeddingConfig,
)
from clearhead.configs.base import nearest
from clearhead.configs.data import BytePairConfig, CharactersConfig
from clearhead.configs.train import (
    AdamWConfig,
    CosineConfig,
    ImagesConfig,
    MaskedTokensConfig,
    MuonConfig,
    NextTokenConfig,
    NoamConfig,
    PairsConfig,
    RecipeConfig,
    StableConfig,
)
from clearhead.models.bert import bert
from clearhead.models.gpt import gpt
from clearhead.models.llama import llama
from clearhead.models.presets import preset
from clearhead.models.transformer import modern_transformer, transformer
from clearhead.models.vit import vit


def lm() -> RecipeConfig:
    """A LLaMA-style language model of 5.8M parameters with a byte-pair vocabulary. Minutes on two cores."""
    return RecipeConfig(
        model=llama(dim=256, layers=6, heads=4, hidden=688, vocabulary=4096, tied=True),
        task=NextTokenConfig(tokenizer=BytePairConfig(vocabulary=4096), context=256),
        optimizer=MuonConfig(rest=AdamWConfig(lr=0.005, beta1=0.8, eps=1e-10, weight_decay=0.0)),
        schedule=StableConfig(warmup=20, decay=0.5),
        batch=16,
        steps=240,
        evaluate_every=80,
        evaluate_targets=32768,
        save_every=80,
    )


def chars() -> RecipeConfig:
    """A character-level model for the task of nanoGPT's CPU recipe, with fewer parameters. A minute on two cores.

    Characters depend mostly on their neighbours: two layers of short convolutions read those, one layer of attention
    reads the rest.
    """
    norm = RMSNormConfig(eps=1e-5)
    ffn = FeedForwardConfig(hidden=512, activation="relu2", bias=False)
    far = AttentionConfig(heads=4, mask=Causal(), rotary=RotaryConfig(), qk_norm=RMSNormConfig())
    near = ShortConvConfig()
    pattern = tuple(BlockConfig(mixer=mixer, ffn=ffn, norm=norm) for mixer in (near, far, near))
    model = SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=65),
        stack=StackConfig(dim=128, pattern=pattern, repeats=1, final_norm=norm),
        head=LMHeadConfig(vocabulary=65),
    )
    adam = AdamWConfig(lr=0.01, embedding_lr=0.3, beta1=0.8, eps=1e-10, weight_decay=0.0)
    return RecipeConfig(
        model=model,
        task=NextTokenConfig(tokenizer=CharactersConfig(), context=128),
        optimizer=MuonConfig(lr=0.03, iterations=4, rest=adam),
        schedule=StableConfig(warmup=10, decay=0.6),
        batch=12,
        steps=1000,
        evaluate_targets=32768,
        clip=None,
        zero_out=True,
    )


def gpt2_124m() -> RecipeConfig:
    """GPT-2 (124M) with AdamW and a cosine schedule, for a GPU; use --layers and --dim to make it smaller."""
    return RecipeConfig(
        model=gpt(dim=768, layers=12, heads=12, vocabulary=50257, length=1024),
        task=NextTokenConfig(tokenizer=BytePairConfig(vocabulary=50257), context=1024),
        optimizer=AdamWConfig(lr=6e-4, beta2=0.95, weight_decay=0.1),
        schedule=CosineConfig(warmup=2000, floor=0.1),
        batch=480,
        accumulate=40,
        steps=600000,
        evaluate_every=1000,
        save_every=1000,
    )


def lstm() -> RecipeConfig:
    """The recurrent baseline: `lm` with four LSTM layers instead of blocks, about as many parameters."""
    block = BlockConfig(mixer=LSTMConfig(hidden=384), norm=RMSNormConfig())
    model = SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=4096),
        stack=StackConfig(dim=256, pattern=(block,), repeats=4, final_norm=RMSNormConfig()),
        head=LMHeadConfig(vocabulary=4096, tied=True),
    )
    return replace(lm(), model=model)


def bert_tiny() -> RecipeConfig:
    """A masked language model, a thirtieth of BERT's size: predict masked tokens from all the others."""
    return RecipeConfig(
        model=bert(dim=256, layers=4, heads=4, vocabulary=4096, length=128, head=MaskedLMHeadConfig(vocabulary=4096)),
        task=MaskedTokensConfig(tokenizer=BytePairConfig(vocabulary=4095), context=128),
        optimizer=MuonConfig(rest=AdamWConfig(lr=0.003, weight_decay=0.0)),
        schedule=StableConfig(warmup=50, decay=0.5),
        batch=32,
        steps=1000,
    )


def vit_digits() -> RecipeConfig:
    """A vision transformer. Without --data it learns scikit-learn's 1,797 handwritten digits: 98 % in a minute."""
    return RecipeConfig(
        model=vit(dim=64, layers=4, heads=4, image=8, patch=2, channels=1, head=ClassHeadConfig(classes=10)),
        task=ImagesConfig(shift=1),
        optimizer=MuonConfig(rest=AdamWConfig(lr=0.003, weight_decay=0.0)),
        schedule=CosineConfig(warmup=50, floor=0.01),
        batch=64,
        steps=800,
        label_smoothing=0.1,
        validation=0.2,
    )


def finetune() -> RecipeConfig:
    """Fine-tune a checkpoint (--from): AdamW with a small learning rate, all weights or LoRA (--lora RANK)."""
    return RecipeConfig(
        model=llama(dim=64, layers=2, heads=2, hidden=128, vocabulary=4096),  # replaced by the checkpoint's model
        task=NextTokenConfig(context=256),
        optimizer=AdamWConfig(lr=1e-4, weight_decay=0.01),
        schedule=CosineConfig(warmup=10, floor=0.1),
        batch=8,
        steps=200,
        evaluate_every=50,
        save_every=50,
    )


def translate() -> RecipeConfig:
    """Translation: a modern encoder–decoder of 2.6M parameters."""
    adam = AdamWConfig(lr=0.008, beta2=0.98, weight_decay=0.0)
    return RecipeConfig(
        model=modern_transformer(dim=128, layers=4, heads=4, hidden=256, vocabulary=8000, dropout=0.25),
        task=PairsConfig(tokenizer=BytePairConfig(vocabulary=8000, space=True)),
        optimizer=MuonConfig(lr=0.03, iterations=4, weight_decay=0.1, rest=adam),
        schedule=StableConfig(warmup=100, decay=0.6),
        batch=4096,
        steps=5600,
        label_smoothing=0.1,
        evaluate_every=300,
        save_every=100,
        average=5,
    )


def dates() -> RecipeConfig:
    """`translate` for its built-in data: dates in 40 languages to ISO form and back. Minutes on two cores."""
    adam = AdamWConfig(lr=0.01, beta2=0.98, weight_decay=0.0)
    return RecipeConfig(
        model=modern_transformer(dim=128, layers=2, heads=4, hidden=256, vocabulary=1024, dropout=0.0),
        task=PairsConfig(tokenizer=BytePairConfig(vocabulary=1024, space=True)),
        optimizer=MuonConfig(lr=0.02, iterations=4, rest=adam),
        schedule=StableConfig(warmup=50, decay=0.6),
        batch=4096,
        steps=800,
        evaluate_every=200,
        save_every=200,
    )


def translate_2017() -> RecipeConfig:
    """The Transformer of 2017 at the size published for 30,000 pairs, with Adam and its own schedule."""
    return RecipeConfig(
        model=transformer(dim=128, layers=4, heads=4, hidden=256, vocabulary=10000, dropout=0.3, bias=True),
        task=PairsConfig(tokenizer=BytePairConfig(vocabulary=10000, space=True)),
        optimizer=AdamWConfig(lr=5e-3, beta2=0.98, weight_decay=0.0),
        schedule=NoamConfig(warmup=2000),
        batch=4096,
        steps=8000,
        clip=None,
        label_smoothing=0.1,
        evaluate_every=250,
        save_every=100,
        average=10,
        patience=10,
    )


def transformer_base() -> RecipeConfig:
    """The base model of 2017 as it was trained (Vaswani et al., section 5): millions of pairs, on GPUs."""
    return RecipeConfig(
        model=preset("transformer-base"),
        task=PairsConfig(tokenizer=BytePairConfig(vocabulary=37000, space=True), length=256),
        optimizer=AdamWConfig(lr=7e-4, beta2=0.98, eps=1e-9, weight_decay=0.0),
        schedule=NoamConfig(warmup=4000),
        batch=25000,
        steps=100000,
        clip=None,
        label_smoothing=0.1,
        validation=0.001,
        evaluate_every=2000,
        save_every=1000,
        average=5,
    )


def transformer_big() -> RecipeConfig:
    """`transformer-base` with twice the width and three times the steps, as it was trained in 2017."""
    base, adam = transformer_base(), AdamWConfig(lr=5e-4, beta2=0.98, eps=1e-9, weight_decay=0.0)
    return replace(base, model=preset("transformer-big"), optimizer=adam, steps=300000, average=20)


RECIPES: dict[str, Callable[[], RecipeConfig]] = {
    "lm": lm,
    "chars": chars,
    "gpt2-124m": gpt2_124m,
    "lstm": lstm,
    "bert": bert_tiny,
    "vit": vit_digits,
    "finetune": finetune,
    "translate": translate,
    "dates": dates,
    "translate-2017": translate_2017,
    "transformer-base": transformer_base,
    "transformer-big": transformer_big,
}


BUILT_IN = {"translate": "dates"}
"""The recipe to use for a task's built-in data, which is much smaller than real data."""


def recipe(name: str, data: bool = True) -> RecipeConfig:
    """The recipe with this name, for your own data, or without `data` for the built-in data.

    >>> config = recipe("lm")
    >>> config.steps, config.model.stack.dim
    (240, 256)
    >>> config.with_value("steps", 500).steps
    500
    """
    name = name if data else BUILT_IN.get(name, name)
    if name not in RECIPES:
        raise ConfigError(f"there is no recipe {name!r}{nearest(name, RECIPES)}; `clearhead recipes` lists them")
    return RECIPES[name]()
