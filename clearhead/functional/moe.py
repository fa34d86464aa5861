"""The loss that keeps a mixture of experts balanced."""

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.reference.moe import check_active


def load_balancing_loss(router: Float[Tensor, "... E"], active: int) -> Float[Tensor, ""]:
    """E · Σ_e f_e·P_e: f_e the share of tokens sent to expert e, P_e the mean probability it is given.

    It is `active` if all experts are used alike, and grows as tokens crowd on the router's favourites.

    >>> load_balancing_loss(torch.zeros((6, 4)), 2)  # equal scores: 1 for each active expert
    tensor(0.)
    """
    check_active(router, active)
    experts = router.shape[-1]
    flat = router.reshape(-1, experts)
    which = flat.topk(active, dim=-1).indices
    share = torch.bincount(which.flatten(), minlength=experts).to(flat.dtype) / max(len(flat), 1)
    return experts * (share * flat.sum(0) / max(len(flat), 1)).sum()
