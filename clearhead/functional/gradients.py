"""What is done to gradients before the optimizer sees them."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def clip_gradients(
    gradients: Sequence[Float[Tensor, "..."]], max_norm: float
) -> tuple[list[Float[Tensor, "..."]], float]:
    """Scale all gradients together so that their norm √Σg² is at most `max_norm`; return them and the norm before.

    For the gradients of a model: `clipped, norm = clip_gradients([p.grad for p in model.parameters()], 1.0)`.

    >>> clip_gradients([torch.tensor([3.0]), torch.tensor([4.0])], max_norm=1.0)
    ([tensor([0.6000]), tensor([0.8000])], 5.0)
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, but must be above 0")
    norm = (
        float(torch.stack([g.detach().double().square().sum() for g in gradients]).sum().sqrt()) if gradients else 0.0
    )
    factor = max_norm / norm if norm > max_norm else 1.0
    return [g * factor for g in gradients], norm
