"""The loss of language models and classifiers."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.functional.derivatives import plain_needed
from clearhead.functional.softmax import widen
from clearhead.reference.loss import check_targets


def cross_entropy(
    logits: Float[Tensor, "... V"],
    targets: Int[Tensor, "..."],
    *,
    weight: Float[Tensor, "V"] | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Float[Tensor, "..."]:
    """−Σ_V w ∘ y · log softmax(logits) over the targets that are not ignored.

    y is (1 − label_smoothing) · one-hot + label_smoothing / V; `weight` gives each class a weight w. `reduction`:
    "mean" divides by the number of counted targets, or by the sum of their weights, and is 0 if none counts; "sum"
    adds up; "none" returns one loss per target, 0 where it is ignored.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([2, 0]), reduction="none")  # log 4: four equal classes
    tensor([1.3863, 1.3863])
    """
    if not plain_needed(logits):  # under vmap, values cannot be looked at
        check_targets(logits, targets, label_smoothing, ignore_index, weight, reduction)
    ignored = -100 if ignore_index is None else ignore_index  # torch wants a number; −100 is no class
    rows, aim = widen(logits).reshape(targets.numel(), logits.shape[-1]), targets.reshape(-1).long()
    w = None if weight is None else weight.to(rows.dtype)
    options: dict[str, Any] = {"weight": w, "label_smoothing": label_smoothing, "ignore_index": ignored}
    if reduction == "none":
        return F.cross_entropy(rows, aim, reduction="none", **options).reshape(targets.shape)
    total = F.cross_entropy(rows, aim, reduction="sum", **options)
    if reduction == "sum":
        return total
    counted = aim != ignored
    if w is None:
        return total / counted.sum().clamp(min=1)
    weights = w[aim.clamp(min=0)] * counted
    return total / torch.where(counted.any(), weights.sum(), 1)
