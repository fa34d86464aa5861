"""Whole runs by name. Each is a function that returns a recipe; `clearhead recipes NAME` prints it as recipe.json."""

from __future__ import annotations

from collections.abc import Callable

from clearhead.configs import AttentionConfig, Causal, ConfigError, FeedForwardConfig, RMSNormConfig, RotaryConfig
from clearhead.configs.base import nearest
from clearhead.configs.data import BytePairConfig, CharactersConfig
from clearhead.configs.train import AdamWConfig, CosineConfig, MuonConfig, RecipeConfig, StableConfig
from clearhead.models.gpt import gpt
from clearhead.models.llama import decoder, llama


def lm() -> RecipeConfig:
    """A LLaMA-style language model of 5M parameters with a byte-pair vocabulary: minutes on two cores."""
    return RecipeConfig(
        model=llama(dim=256, layers=6, heads=4, hidden=688, vocabulary=4096, tied=True),
        tokenizer=BytePairConfig(vocabulary=4096),
        optimizer=MuonConfig(rest=AdamWConfig(lr=0.005, beta1=0.8, eps=1e-10, weight_decay=0.0)),
        schedule=StableConfig(warmup=20, decay=0.5),
        batch=16,
        context=256,
        steps=240,
        evaluate_every=80,
        save_every=80,
    )


def chars() -> RecipeConfig:
    """Characters, as nanoGPT's CPU recipe has them, by a modern model of no more parameters."""
    mixer = AttentionConfig(heads=4, mask=Causal(), rotary=RotaryConfig(), qk_norm=RMSNormConfig())
    ffn = FeedForwardConfig(hidden=512, activation="relu2", bias=False)
    adam = AdamWConfig(lr=0.01, embedding_lr=0.3, beta1=0.8, eps=1e-10, weight_decay=0.0)
    return RecipeConfig(
        model=decoder(dim=128, layers=4, mixer=mixer, ffn=ffn, vocabulary=65),
        tokenizer=CharactersConfig(),
        optimizer=MuonConfig(rest=adam),
        schedule=StableConfig(warmup=10, decay=0.6),
        batch=32,
        context=64,
        steps=500,
        clip=None,
        zero_out=True,
    )


def gpt2_124m() -> RecipeConfig:
    """GPT-2 as it was, with AdamW and a cosine: a recipe for a larger machine, or `--set` to a smaller size."""
    return RecipeConfig(
        model=gpt(dim=768, layers=12, heads=12, vocabulary=50257, length=1024),
        tokenizer=BytePairConfig(vocabulary=50257),
        optimizer=AdamWConfig(lr=6e-4, beta2=0.95, weight_decay=0.1),
        schedule=CosineConfig(warmup=2000, floor=0.1),
        batch=480,
        context=1024,
        accumulate=40,
        steps=600000,
        evaluate_every=1000,
        save_every=1000,
    )


RECIPES: dict[str, Callable[[], RecipeConfig]] = {"lm": lm, "chars": chars, "gpt2-124m": gpt2_124m}


def recipe(name: str) -> RecipeConfig:
    if name not in RECIPES:
        raise ConfigError(f"there is no recipe {name!r}{nearest(name, RECIPES)}")
    return RECIPES[name]()
