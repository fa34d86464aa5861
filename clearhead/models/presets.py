"""Architectures by name. Each is a function that returns a config; none allocates a weight."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from clearhead.configs import (
    AttentionConfig,
    Causal,
    ClassHeadConfig,
    Config,
    ConfigError,
    EncoderDecoderConfig,
    GatedFeedForwardConfig,
    GroupedChoiceConfig,
    LatentAttentionConfig,
    LSTMConfig,
    MaskedLMHeadConfig,
    ModelConfig,
    MoEConfig,
    RotaryConfig,
    SequenceModelConfig,
    Window,
)
from clearhead.configs.base import nearest

from .bert import albert, bert
from .deepseek import deepseek, deepseek_v2_lite, deepseek_v3
from .gemma import gemma, gemma3, gemma3_1b, gemma_2b
from .gpt import gpt
from .llama import decoder, llama, mixtral
from .mamba import mamba
from .transformer import transformer
from .vit import vit

if TYPE_CHECKING:
    from .model import Model

PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "transformer-base": partial(transformer, dim=512, layers=6, heads=8, hidden=2048),
    "transformer-big": partial(transformer, dim=1024, layers=6, heads=16, hidden=4096, dropout=0.3),
    "gpt1": partial(gpt, dim=768, layers=12, heads=12, vocabulary=40478, length=512, placement="post"),
    "gpt2": partial(gpt, dim=768, layers=12, heads=12),
    "gpt2-medium": partial(gpt, dim=1024, layers=24, heads=16),
    "gpt2-large": partial(gpt, dim=1280, layers=36, heads=20),
    "gpt2-xl": partial(gpt, dim=1600, layers=48, heads=25),
    "gpt3-175b": partial(gpt, dim=12288, layers=96, heads=96, length=2048),
    "bert-base": partial(bert, dim=768, layers=12, heads=12),
    "bert-base-mlm": partial(bert, dim=768, layers=12, heads=12, head=MaskedLMHeadConfig(vocabulary=30522)),
    "bert-large": partial(bert, dim=1024, layers=24, heads=16),
    "albert-base": partial(albert, dim=768, layers=12, heads=12),
    "vit-b16": partial(vit, dim=768, layers=12, heads=12),
    "vit-l16": partial(vit, dim=1024, layers=24, heads=16),
    "llama-2-7b": partial(llama, dim=4096, layers=32, heads=32, hidden=11008, vocabulary=32000),
    "llama-3-8b": partial(
        llama, dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocabulary=128256, theta=500000.0
    ),
    "mistral-7b": partial(
        llama,
        dim=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        hidden=14336,
        vocabulary=32000,
        mask=Causal() & Window(4096),
    ),
    "mixtral-8x7b": partial(mixtral, dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocabulary=32000),
    "gemma-2b": gemma_2b,
    "gemma-3-1b": gemma3_1b,
    "deepseek-v2-lite": deepseek_v2_lite,
    "deepseek-v3": deepseek_v3,
    "mamba-130m": partial(mamba, dim=768, layers=24),
    "tiny-transformer": partial(transformer, dim=32, layers=2, heads=4, hidden=64, vocabulary=101, dropout=0.0),
    "tiny-gpt": partial(gpt, dim=32, layers=2, heads=4, vocabulary=101, length=64),
    "tiny-bert": partial(bert, dim=32, layers=2, heads=4, vocabulary=101, length=64),
    "tiny-albert": partial(albert, dim=32, width=12, layers=3, heads=4, vocabulary=101, length=64),
    "tiny-vit": partial(
        vit, dim=32, layers=2, heads=4, image=16, patch=4, channels=1, head=ClassHeadConfig(classes=10)
    ),
    "tiny-llama": partial(llama, dim=32, layers=2, heads=4, kv_heads=2, hidden=88, vocabulary=101),
    "tiny-mistral": partial(
        llama, dim=32, layers=2, heads=4, kv_heads=2, hidden=88, vocabulary=101, mask=Causal() & Window(5)
    ),
    "tiny-mixtral": partial(mixtral, dim=32, layers=2, heads=4, kv_heads=2, hidden=48, vocabulary=101, experts=4),
    "tiny-gemma": partial(
        gemma,
        dim=32,
        layers=2,
        mixer=AttentionConfig(heads=4, kv_heads=1, head_dim=12, mask=Causal(), rotary=RotaryConfig()),
        hidden=88,
        vocabulary=101,
    ),
    "tiny-gemma-3": partial(
        gemma3,
        dim=32,
        mixers=[
            AttentionConfig(
                heads=4, kv_heads=2, head_dim=12, mask=Causal() & Window(5) if near else Causal(), rotary=RotaryConfig()
            )
            for near in (True, True, False)
        ],
        hidden=88,
        vocabulary=101,
    ),
    "tiny-deepseek": partial(
        deepseek,
        dim=32,
        layers=3,
        mixer=LatentAttentionConfig(heads=4, latent_dim=16, plain_dim=8, rope_dim=4, value_dim=6, query_latent_dim=12),
        hidden=88,
        moe=MoEConfig(
            expert=GatedFeedForwardConfig(hidden=24),
            experts=5,
            active=2,
            shared=GatedFeedForwardConfig(hidden=24),
            normalised=False,
        ),
        vocabulary=101,
    ),
    "tiny-mamba": partial(mamba, dim=32, layers=2, vocabulary=101),
    "tiny-lstm": partial(
        decoder, dim=32, layers=2, mixer=LSTMConfig(), ffn=GatedFeedForwardConfig(hidden=88), vocabulary=101
    ),
    "tiny-deepseek-v3": partial(
        deepseek,
        dim=32,
        layers=2,
        mixer=LatentAttentionConfig(heads=4, latent_dim=16, plain_dim=8, rope_dim=4, value_dim=6, query_latent_dim=12),
        hidden=88,
        moe=MoEConfig(
            expert=GatedFeedForwardConfig(hidden=24),
            experts=6,
            active=2,
            shared=GatedFeedForwardConfig(hidden=24),
            scale=2.5,
            choice=GroupedChoiceConfig(groups=3, kept=2),
        ),
        vocabulary=101,
    ),
}


def preset(name: str) -> ModelConfig:
    """The config of a published architecture, such as `gpt2` or `llama-3-8b`, or of a tiny one of its family.

    >>> preset("gpt2").stack.dim
    768
    """
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}{nearest(name, PRESETS)}")
    return PRESETS[name]()


def find_config(given: "ModelConfig | Model | str") -> ModelConfig:
    """The config that a caller means by a config, a preset's name, or a model.

    >>> find_config("tiny-gpt").stack.dim
    32
    """
    config: object = preset(given) if isinstance(given, str) else getattr(given, "config", given)
    if not isinstance(config, SequenceModelConfig | EncoderDecoderConfig):
        what = f"a {config.kind()}" if isinstance(config, Config) else repr(given)
        raise ConfigError(
            f"{what} does not describe a whole model; give a preset's name such as 'tiny-llama', a model config, "
            "or a model"
        )
    return config
