"""The equations of the Transformer in NumPy, each forward with its backward beside it.

Array in, array out, any leading dimensions. `f_backward(d_out, …)` takes the gradient of the loss with respect to f's
output, then the arguments of f. It returns the gradients of f's real-valued arrays in their order, None for each that
was None. `clearhead.functional` has the same names in PyTorch, where autograd is the backward. `run` computes a whole
model.

A way to read the files: softmax, linear, attention (with flash and rotary), norm, ffn, embedding, heads, stack, run;
then the alternatives to attention: linear_attention, mamba, lstm, latent, linformer, longformer, shortconv, moe.

    from clearhead import reference
    out, weights = reference.attention(q, k, v, causal=True, return_weights=True)
    d_q, d_k, d_v, _ = reference.attention_backward(d_out, q, k, v, causal=True)

Conventions of all files:

    letters      one alphabet for shapes, defined in `clearhead.shapes`: B batch, T queries, S keys, D width, H heads …
    d_x          the gradient of the loss with respect to x, always in the shape of x
    …            any number of leading dimensions, which broadcast
    float64      give float64 in and everything is computed in it; the tests compare with torch to 1e-9
    errors       arguments that do not fit raise one sentence before any arithmetic

Every example after >>> in these files is run by a test, and so is every formula: against torch's own functions, forward
and backward, and against numerical differences.
"""

from clearhead.reference.attention import attention, attention_backward
from clearhead.reference.embedding import embedding, embedding_backward
from clearhead.reference.ffn import (
    ACTIVATIONS,
    feed_forward,
    feed_forward_backward,
    gated_feed_forward,
    gated_feed_forward_backward,
    gelu,
    gelu_backward,
    gelu_quick,
    gelu_quick_backward,
    gelu_tanh,
    gelu_tanh_backward,
    relu,
    relu2,
    relu2_backward,
    relu_backward,
    silu,
    silu_backward,
    swiglu,
    swiglu_backward,
)
from clearhead.reference.flash import flash_attention, flash_attention_backward
from clearhead.reference.gradients import clip_gradients
from clearhead.reference.linear import linear, linear_backward
from clearhead.reference.linear_attention import (
    delta_linear_attention,
    delta_linear_attention_backward,
    elu_features,
    elu_features_backward,
    gated_linear_attention,
    gated_linear_attention_backward,
    linear_attention,
    linear_attention_backward,
    positive_features,
    positive_features_backward,
)
from clearhead.reference.loss import cross_entropy, cross_entropy_backward
from clearhead.reference.lstm import lstm, lstm_backward
from clearhead.reference.mamba import selective_scan, selective_scan_backward
from clearhead.reference.moe import load_balancing_loss, load_balancing_loss_backward
from clearhead.reference.norm import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from clearhead.reference.positions import (
    alibi_bias,
    causal_mask,
    relative_bias,
    relative_bias_backward,
    sinusoidal_positions,
)
from clearhead.reference.rotary import rotate, rotate_backward, rotate_by, rotate_by_backward
from clearhead.reference.run import DecodeState, run
from clearhead.reference.softmax import softmax, softmax_backward
from clearhead.schedules import cosine, noam, warmup_stable_decay

__all__ = [
    "softmax",
    "softmax_backward",
    "attention",
    "attention_backward",
    "flash_attention",
    "flash_attention_backward",
    "causal_mask",
    "linear",
    "linear_backward",
    "embedding",
    "embedding_backward",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
    "ACTIVATIONS",
    "relu",
    "relu_backward",
    "relu2",
    "relu2_backward",
    "gelu",
    "gelu_backward",
    "gelu_tanh",
    "gelu_quick",
    "gelu_quick_backward",
    "gelu_tanh_backward",
    "silu",
    "silu_backward",
    "feed_forward",
    "feed_forward_backward",
    "gated_feed_forward",
    "gated_feed_forward_backward",
    "swiglu",
    "swiglu_backward",
    "elu_features",
    "elu_features_backward",
    "positive_features",
    "positive_features_backward",
    "linear_attention",
    "linear_attention_backward",
    "gated_linear_attention",
    "gated_linear_attention_backward",
    "delta_linear_attention",
    "delta_linear_attention_backward",
    "lstm",
    "lstm_backward",
    "selective_scan",
    "selective_scan_backward",
    "sinusoidal_positions",
    "alibi_bias",
    "relative_bias",
    "relative_bias_backward",
    "rotate",
    "rotate_backward",
    "rotate_by",
    "rotate_by_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "load_balancing_loss",
    "load_balancing_loss_backward",
    "clip_gradients",
    "noam",
    "cosine",
    "warmup_stable_decay",
    "run",
    "DecodeState",
]
