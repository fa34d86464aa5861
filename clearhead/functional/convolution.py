"""The causal convolution over the last few tokens, with a backward written by hand."""

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.functional.derivatives import plain_backward, plain_needed


def causal_convolution(
    x: Float[Tensor, "B N I"],
    taps: Float[Tensor, "O I"],
    bias: Float[Tensor, "I"] | None,
    same: Bool[Tensor, "O B T"] | None = None,
) -> Float[Tensor, "B T I"]:
    """y_t = bias + Σ_k taps_k∘x_{t+k}, each channel with a filter of its own; x begins O − 1 tokens before y.

    `same[k, b, t]` is False where x_{t+k} belongs to another document than y_t, and so counts as 0.
    """
    if plain_needed(x, taps, bias):
        return plain_convolution(same, x, taps, bias)
    if x.shape[1] == len(taps) and not torch.is_grad_enabled():  # decoding: one new token
        summed = (x * taps).sum(1, keepdim=True)
        return summed if bias is None else summed.add_(bias)
    return Convolution.apply(x, taps, bias, same)


def plain_convolution(
    same: Bool[Tensor, "O B T"] | None,
    x: Float[Tensor, "B N I"],
    taps: Float[Tensor, "O I"],
    bias: Float[Tensor, "I"] | None,
) -> Float[Tensor, "B T I"]:
    """`causal_convolution` in plain operations."""
    length = x.shape[1] - len(taps) + 1
    y = sum((tap_input(x, k, length, same) * tap for k, tap in enumerate(taps)), x.new_zeros(()))
    return y if bias is None else y + bias


def tap_input(x: Tensor, k: int, length: int, same: Tensor | None) -> Tensor:
    """What tap k reads for each of `length` outputs: 0 where that is another document's."""
    part = x[:, k : k + length]
    return part if same is None else part * same[k].unsqueeze(-1)


class Convolution(torch.autograd.Function):
    """Channels stay last. torch's own convolutions want them first, and transposing takes longer than convolving."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, bias: Tensor | None, same: Tensor | None) -> Tensor:
        length = x.shape[1] - len(taps) + 1
        y = x.new_zeros(len(x), length, x.shape[2]) if bias is None else bias.repeat(len(x), length, 1)
        for k, tap in enumerate(taps):
            y.addcmul_(tap_input(x, k, length, same), tap)
        ctx.save_for_backward(x, taps, bias, same)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, bias, same = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *plain_backward(partial(plain_convolution, same), (x, taps, bias), d_y), None
        length, d_x, d_taps = d_y.shape[1], torch.zeros_like(x), torch.empty_like(taps)
        for k, tap in enumerate(taps):
            own = d_y if same is None else d_y * same[k].unsqueeze(-1)
            d_x[:, k : k + length].addcmul_(own, tap)
            d_taps[k] = (d_y * tap_input(x, k, length, same)).sum((0, 1))
        return d_x, d_taps, None if bias is None else d_y.sum((0, 1)), None
