"""A short filter between two gates."""

import numpy as np
from jaxtyping import Float

from clearhead.configs import ShortConvConfig
from clearhead.reference.convolution import filtered
from clearhead.reference.linear import linear
from clearhead.reference.run import Here, runs


@runs(ShortConvConfig)
def short_conv(config: ShortConvConfig, x: Float[np.ndarray, "B T D"], here: Here) -> Float[np.ndarray, "B T D"]:
    """x -> write, read, x -> read∘filter(write∘x) -> out, over the real tokens of each document."""
    write, read, x = np.split(here.note("input", linear(x, here["input.weight"], here.get("input.bias"))), 3, -1)
    gated = here.note("gated", read * here.note("conv", filtered(write * x, here)))
    return here.note("out", linear(gated, here["out.weight"], here.get("out.bias")))
