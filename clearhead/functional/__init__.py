"""The equations in PyTorch, with the names and signatures of `clearhead.reference`; autograd is the backward."""

from clearhead.functional.attention import attention, flash_attention
from clearhead.functional.ffn import (
    ACTIVATIONS,
    feed_forward,
    gated_feed_forward,
    gelu,
    gelu_tanh,
    relu,
    relu2,
    silu,
    swiglu,
)
from clearhead.functional.linear import embedding, linear
from clearhead.functional.linear_attention import elu_features, linear_attention, positive_features
from clearhead.functional.loss import cross_entropy
from clearhead.functional.lstm import lstm
from clearhead.functional.mamba import selective_scan
from clearhead.functional.moe import load_balancing_loss
from clearhead.functional.norm import layer_norm, rms_norm
from clearhead.functional.positions import alibi_bias, causal_mask, sinusoidal_positions
from clearhead.functional.rotary import rotate
from clearhead.functional.softmax import softmax
from clearhead.schedules import cosine, noam, warmup_stable_decay

__all__ = [
    "softmax",
    "attention",
    "flash_attention",
    "causal_mask",
    "linear",
    "embedding",
    "layer_norm",
    "rms_norm",
    "ACTIVATIONS",
    "relu",
    "relu2",
    "gelu",
    "gelu_tanh",
    "silu",
    "feed_forward",
    "gated_feed_forward",
    "swiglu",
    "elu_features",
    "positive_features",
    "linear_attention",
    "lstm",
    "selective_scan",
    "sinusoidal_positions",
    "alibi_bias",
    "rotate",
    "cross_entropy",
    "load_balancing_loss",
    "noam",
    "cosine",
    "warmup_stable_decay",
]
