"""The causal convolution over the last few tokens, which Mamba and short-convolution layers begin with.

    y_t = bias + Σ_{k=0}^{O} filter_k ∘ x_{t−O+k}         each channel has a filter of its own ("depthwise")

With O = 3 a token sees itself and three tokens back: enough to recognise a pair or triple of tokens cheaply.

Why before a recurrence. A state-space model or a gated mixer weighs one token at a time. "not good" means something
else than "not" and "good"; a filter over neighbours lets the following step see them together. It costs O + 1
multiplications per channel and token, next to nothing.

    filter row      0          1          2          3        O = 3
    reads           x_{t−3}    x_{t−2}    x_{t−1}    x_t

Depthwise means that channels do not mix: the matrices before and after it do that. Causal means that no later token is
read, so decoding needs the last O inputs only.
"""

import numpy as np
from jaxtyping import Float

from clearhead.reference.run import Context


def causal_convolution(x: Float[np.ndarray, "B T I"], context: Context) -> Float[np.ndarray, "B T I"]:
    """Convolve every document of every row on its own. Before its first token there are zeros.

    For decoding, the state keeps the last O inputs, which the next token's convolution reads again.
    """
    taps = context["filter"]  # O+1 I
    conv = np.zeros_like(x)
    start = context.load_state("conv", np.zeros((len(x), len(taps) - 1, x.shape[-1]), x.dtype))
    last = start.copy()
    for row, at in context.sequences():
        past = np.concatenate((start[row], x[row, at]))  # O earlier inputs, then the new ones
        last[row] = past[len(at) :]
        summed = sum(taps[k] * past[k : k + len(at)] for k in range(len(taps)))
        bias = context.get("filter_bias")
        conv[row, at] = summed if bias is None else summed + bias
    context.save_state("conv", last)
    return conv
