"""The equations of the Transformer in PyTorch, with the names and signatures of `clearhead.reference`.

Tensor in, tensor out, any leading dimensions; autograd is the backward, also the second one, and `torch.func` works.

    from clearhead import functional
    out = functional.flash_attention(q, k, v, causal=True)
    loss = functional.cross_entropy(logits, targets, ignore_index=-100)
"""

from clearhead.functional.attention import attention, flash_attention
from clearhead.functional.ffn import (
    ACTIVATIONS,
    feed_forward,
    gated_feed_forward,
    gelu,
    gelu_quick,
    gelu_tanh,
    relu,
    relu2,
    silu,
    swiglu,
)
from clearhead.functional.gradients import clip_gradients
from clearhead.functional.linear import embedding, linear
from clearhead.functional.linear_attention import (
    delta_linear_attention,
    elu_features,
    gated_linear_attention,
    linear_attention,
    positive_features,
)
from clearhead.functional.loss import cross_entropy
from clearhead.functional.lstm import lstm
from clearhead.functional.mamba import selective_scan
from clearhead.functional.moe import load_balancing_loss
from clearhead.functional.norm import layer_norm, rms_norm
from clearhead.functional.positions import alibi_bias, causal_mask, relative_bias, sinusoidal_positions
from clearhead.functional.rotary import rotate, rotate_by
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
    "gelu_quick",
    "silu",
    "feed_forward",
    "gated_feed_forward",
    "swiglu",
    "elu_features",
    "positive_features",
    "linear_attention",
    "gated_linear_attention",
    "delta_linear_attention",
    "lstm",
    "selective_scan",
    "sinusoidal_positions",
    "alibi_bias",
    "relative_bias",
    "rotate",
    "rotate_by",
    "cross_entropy",
    "load_balancing_loss",
    "clip_gradients",
    "noam",
    "cosine",
    "warmup_stable_decay",
]
