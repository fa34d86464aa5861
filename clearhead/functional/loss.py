"""The loss of language models and classifiers."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.functional.softmax import widen
from clearhead.reference.loss import check_targets


def cross_entropy(
    logits: Float[Tensor, "... V"],
    targets: Int[Tensor, "..."],
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
) -> Float[Tensor, ""]:
    """The mean of −Σ_V y log softmax(logits) over the targets that are not ignored; 0 if all are.

    y is (1 − label_smoothing) · one-hot + label_smoothing / V.
    """
    check_targets(logits, targets, label_smoothing, ignore_index)
    ignored = -100 if ignore_index is None else ignore_index  # torch wants a number; −100 is no class
    rows, aim = widen(logits).reshape(-1, logits.shape[-1]), targets.reshape(-1).long()
    total = F.cross_entropy(rows, aim, reduction="sum", label_smoothing=label_smoothing, ignore_index=ignored)
    return total / (aim != ignored).sum().clamp(min=1)
