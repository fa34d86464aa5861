"""A filter over the last few tokens."""

import numpy as np
from jaxtyping import Float

from clearhead.reference.run import Here


def filtered(x: Float[np.ndarray, "B T I"], here: Here) -> Float[np.ndarray, "B T I"]:
    """Σ_k filter_k∘x_{t−k}, each channel by a filter of its own; what is before a document's start is 0."""
    taps = here["filter"]
    conv = np.zeros_like(x)
    start = here.recall("recent", np.zeros((len(x), len(taps) - 1, x.shape[-1]), x.dtype))
    recent = start.copy()
    for row, at in here.lanes():
        past = np.concatenate((start[row], x[row, at]))
        recent[row] = past[len(at) :]
        summed = sum(taps[k] * past[k : k + len(at)] for k in range(len(taps)))
        bias = here.get("filter_bias")
        conv[row, at] = summed if bias is None else summed + bias
    here.keep("recent", recent)
    return conv
