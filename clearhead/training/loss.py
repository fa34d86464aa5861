"""Cross-entropy of a vocabulary projection without holding all logits in memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.data import IGNORED
from clearhead.nn.context import Context
from clearhead.nn.heads import LMHead, Table, own_or_tied
from clearhead.precision.matrix import dense

CHUNK = 3 * 2**22  # logits held at once


class LinearCrossEntropy(torch.autograd.Function):
    """Σ over rows of −log softmax(x·Wᵀ + b)[target], in chunks of rows.

    The gradient of a chunk's logits is softmax − one-hot, which needs nothing but the logits. So the forward pass
    computes the gradients of x, W and b chunk by chunk, and drops each chunk's logits. This takes three matrix
    products, the same as without chunks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "X D"],
        weight: Float[Tensor, "V D"],
        bias: Float[Tensor, "V"] | None,
        targets: Int[Tensor, "X"],
        smoothing: float,
    ) -> Float[Tensor, ""]:
        rows = max(1, CHUNK // len(weight))
        table = weight.to(x.dtype)  # under autocast, x has fewer bits than the weight
        needed = [t is not None and t.requires_grad for t in (x, weight, bias)]
        d_x = torch.empty_like(x) if any(needed) else None
        d_weight = torch.zeros_like(weight) if needed[1] else None
        d_bias = torch.zeros_like(bias) if needed[2] and bias is not None else None
        total = x.new_zeros((), dtype=torch.float32)
        held = x.new_empty(min(rows, len(x)), len(weight))  # reused by every chunk
        for start in range(0, len(x), rows):
            chunk, wanted = x[start : start + rows], targets[start : start + rows]
            some = held[: len(chunk)]
            if bias is None:
                torch.mm(chunk, table.T, out=some)
            else:
                torch.addmm(bias.to(x.dtype), chunk, table.T, out=some)
            logits = some.float()
            hit = logits.gather(1, wanted[:, None])
            mean = logits.mean(dim=1, keepdim=True) if smoothing else 0.0
            largest = logits.amax(dim=1, keepdim=True)
            powers = logits.sub_(largest).exp_()  # in place, without a second buffer
            sums = powers.sum(dim=1, keepdim=True)
            total += (largest + sums.log() - (1 - smoothing) * hit - smoothing * mean).sum()
            if d_x is None:
                continue
            # `powers` becomes sums·(softmax − one-hot). Dividing D numbers of d_x and x by the sums is cheaper than
            # dividing V numbers here.
            powers.scatter_add_(1, wanted[:, None], (smoothing - 1) * sums)
            if smoothing:
                powers -= sums * (smoothing / len(weight))
            gradient, share = powers.to(x.dtype), (1 / sums).to(x.dtype)
            torch.mm(gradient, table, out=d_x[start : start + rows]).mul_(share)
            if d_weight is not None:
                add_product(d_weight, gradient.T, chunk * share)
            if d_bias is not None:
                d_bias += gradient.T @ share.squeeze(1)
        ctx.gradients = (d_x, d_weight, d_bias)
        return total

    @staticmethod
    def backward(ctx: Any, d_total: Float[Tensor, ""]) -> Any:
        scaled = [None if gradient is None else gradient.mul_(d_total) for gradient in ctx.gradients]
        return *scaled, None, None


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def linear_cross_entropy(
    x: Float[Tensor, "... D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "..."],
    *,
    bias: Float[Tensor, "V"] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """Mean of `cross_entropy(linear(x, weight, bias), targets)` over the targets that are not `ignore_index`."""
    rows, flat = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    counted = flat != ignore_index
    if not bool(counted.all()):
        rows, flat = rows[counted], flat[counted]
    if torch.is_autocast_enabled(x.device.type):
        rows = rows.to(torch.get_autocast_dtype(x.device.type))
    if not torch.is_grad_enabled():  # inside LinearCrossEntropy, requires_grad stays True
        rows, weight, bias = rows.detach(), weight.detach(), None if bias is None else bias.detach()
    total = LinearCrossEntropy.apply(rows, weight, bias, flat, label_smoothing)
    return total / max(len(flat), 1)


def head_loss(
    head: LMHead,
    x: Float[Tensor, "B T D"],
    table: Table,
    targets: Int[Tensor, "B T"],
    smoothing: float,
) -> Float[Tensor, ""]:
    """Mean cross-entropy of a head's logits over the targets that count.

    A scaled head needs no logits in memory either: (s·x)·Wᵀ + s·b is s times the logits. A softcap is not linear, so
    capped logits are computed in full.
    """
    if head.softcap is not None:
        at = torch.arange(x.shape[1], device=x.device)[None]
        logits = head(x, Context(at, at), table).flatten(0, 1).float()
        total = F.cross_entropy(
            logits, targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum"
        )
        return total / (targets != IGNORED).sum().clamp(min=1)
    weight = dense(own_or_tied(head.weight, table))
    x = x if head.narrow is None else head.narrow(x)
    bias: Tensor | None = head.bias
    if head.scale != 1:
        x, bias = x * head.scale, None if bias is None else bias * head.scale
    return linear_cross_entropy(x, weight, targets, bias=bias, ignore_index=IGNORED, label_smoothing=smoothing)
