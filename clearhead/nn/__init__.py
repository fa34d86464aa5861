"""Layers of Transformers as torch modules.

Each layer works alone, like those of `torch.nn`: sizes and options in, a module out that takes `x`, `[B, T, D]`.

    from clearhead import nn

    attention = nn.MultiHeadAttention(64, heads=4, causal=True)
    y = attention(x)                                            # [B, T, 64]
    y, weights = attention(x, return_weights=True)              # weights: [B, heads, T, T]
    y = attention(x, source=memory, mask=may_read)              # cross-attention under a boolean mask, True = may read

    block = nn.Block(64, mixer=nn.Mamba(64), ffn=nn.SwiGLU(64), norm="rms")

Whole models are built from configs instead (`clearhead.build`), which can be saved, compared and priced; the files of
this package hold the modules of each config.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layers import (
        LSTM,
        Block,
        FeedForward,
        GatedFeedForward,
        LatentAttention,
        LayerNorm,
        LinearAttention,
        Mamba,
        MoE,
        MultiHeadAttention,
        RMSNorm,
        ShortConv,
        SwiGLU,
    )
    from .tap import Taps
    from .weights import check_weights_finite, first_nan_weight

PLACES = {
    "MultiHeadAttention": "layers",
    "LatentAttention": "layers",
    "LinearAttention": "layers",
    "Mamba": "layers",
    "LSTM": "layers",
    "ShortConv": "layers",
    "LayerNorm": "layers",
    "RMSNorm": "layers",
    "FeedForward": "layers",
    "GatedFeedForward": "layers",
    "SwiGLU": "layers",
    "MoE": "layers",
    "Block": "layers",
    "Taps": "tap",
    "check_weights_finite": "weights",
    "first_nan_weight": "weights",
}

__all__ = [
    "LSTM",
    "Block",
    "FeedForward",
    "GatedFeedForward",
    "LatentAttention",
    "LayerNorm",
    "LinearAttention",
    "Mamba",
    "MoE",
    "MultiHeadAttention",
    "RMSNorm",
    "ShortConv",
    "SwiGLU",
    "Taps",
    "check_weights_finite",
    "first_nan_weight",
]


def __getattr__(name: str) -> Any:
    if name in PLACES:
        return getattr(import_module(f"clearhead.nn.{PLACES[name]}"), name)
    raise AttributeError(f"module 'clearhead.nn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
