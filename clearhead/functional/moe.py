"""The loss that keeps a mixture of experts in balance."""

import torch
from jaxtyping import Float
from torch import Tensor


def load_balancing_loss(router: Float[Tensor, "... E"], active: int) -> Float[Tensor, ""]:
    """E · Σ_e f_e·P_e: f_e the share of tokens sent to expert e, P_e the mean probability it is given."""
    experts = router.shape[-1]
    flat = router.reshape(-1, experts)
    which = flat.topk(active, dim=-1).indices
    share = torch.bincount(which.flatten(), minlength=experts).to(flat.dtype) / len(flat)
    return experts * (share * flat.mean(0)).sum()
