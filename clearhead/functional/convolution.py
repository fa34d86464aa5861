"""A filter over the last few tokens, with a backward of its own."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable


def filtered(
    x: Float[Tensor, "B N I"],
    taps: Float[Tensor, "O I"],
    bias: Float[Tensor, "I"] | None,
    same: Bool[Tensor, "O B T"] | None = None,
) -> Float[Tensor, "B T I"]:
    """y_t = bias + Σ_k taps_k∘x_{t+k}, each channel by a filter of its own; by `same`, where x_{t+k} is of the document
    of y_t."""
    if x.shape[1] == len(taps) and not torch.is_grad_enabled():  # decoding
        summed = (x * taps).sum(1, keepdim=True)
        return summed if bias is None else summed.add_(bias)
    return Filter.apply(x, taps, bias, same)


class Filter(torch.autograd.Function):
    """In the order of the other tensors; torch's own convolutions want channels first, and transposing takes longer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, bias: Tensor | None, same: Tensor | None) -> Tensor:
        length = x.shape[1] - len(taps) + 1
        y = x.new_zeros(len(x), length, x.shape[2]) if bias is None else bias.repeat(len(x), length, 1)
        for k, tap in enumerate(taps):
            y.addcmul_(Filter.seen(x, k, length, same), tap)
        ctx.save_for_backward(x, taps, same)
        ctx.biased = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, same = ctx.saved_tensors
        length, d_x, d_taps = d_y.shape[1], torch.zeros_like(x), torch.empty_like(taps)
        for k, tap in enumerate(taps):
            seen = d_y if same is None else d_y * same[k].unsqueeze(-1)
            d_x[:, k : k + length].addcmul_(seen, tap)
            d_taps[k] = (d_y * Filter.seen(x, k, length, same)).sum((0, 1))
        return d_x, d_taps, d_y.sum((0, 1)) if ctx.biased else None, None

    @staticmethod
    def seen(x: Tensor, k: int, length: int, same: Tensor | None) -> Tensor:
        part = x[:, k : k + length]
        return part if same is None else part * same[k].unsqueeze(-1)
