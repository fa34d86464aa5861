"""The short convolution between two gates, the cheap mixer of LFM2.

    (write, read, x) = three projections of the input
    out = W_out · (read ∘ conv(write ∘ x))

`write` decides what of a token enters the convolution, `read` what of its result is passed on.

Both gates depend on the token itself, so the convolution is switched on and off by content. Compared with attention it
reaches O tokens back and no further; LFM2 alternates it with a few attention layers, which look far.

By hand, one channel, O = 1 and the filter (½, 1): y_t = ½·u_{t−1} + u_t with u = write ∘ x. For write = (1, 0, 1), x =
(4, 6, 8) and read = 1: u = (4, 0, 8), so the outputs are 4, 2 and 8. The second token was not written, so only the echo
of the first is left there.

Cost: 8·D² FLOPs per token for the two matrices, as much as attention's four, and nothing that grows with the length.

    input    D → 3·D        conv    a filter of O + 1 numbers for each of D channels        out    D → D
"""

import numpy as np
from jaxtyping import Float

from clearhead.configs import ShortConvConfig
from clearhead.reference.convolution import causal_convolution
from clearhead.reference.linear import linear
from clearhead.reference.run import Context, runs


@runs(ShortConvConfig)
def short_conv(config: ShortConvConfig, x: Float[np.ndarray, "B T D"], context: Context) -> Float[np.ndarray, "B T D"]:
    """x -> write, read, x -> read ∘ conv(write ∘ x) -> out. Cost and state do not grow with the text's length."""
    write, read, x = np.split(
        context.tap("input", linear(x, context["input.weight"], context.get("input.bias"))), 3, -1
    )
    gated = context.tap("gated", read * context.tap("conv", causal_convolution(write * x, context)))
    return context.tap("out", linear(gated, context["out.weight"], context.get("out.bias")))
