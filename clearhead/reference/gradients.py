"""What is done to gradients before the optimizer sees them.

In NumPy training (`docs/learn/numpy_training.md`) the steps are: forward, loss, backward, clip, optimizer. Clipping is
the only one that looks at all gradients together.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float


def clip_gradients(
    gradients: Sequence[Float[np.ndarray, "..."]], max_norm: float
) -> tuple[list[Float[np.ndarray, "..."]], float]:
    """Scale all gradients together so that their norm is at most `max_norm`; return them and the norm before.

    The norm is that of all numbers of all gradients, √Σg², so the direction of the step stays the same. A rare batch
    with a huge gradient then cannot throw the weights far away. Pascanu et al. (2013), "On the difficulty of training
    recurrent neural networks", algorithm 1.

    >>> clip_gradients([np.array([3.0]), np.array([4.0])], max_norm=1.0)
    ([array([0.6]), array([0.8])], 5.0)
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, but must be above 0")
    norm = float(np.sqrt(sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in gradients)))
    factor = max_norm / norm if norm > max_norm else 1.0
    return [np.asarray(g * factor, g.dtype) for g in gradients], norm
