"""Round matrices to llama.cpp's Q4_K and Q6_K blocks, with the smallest squared error.

    Q4_K   256 columns, 8 groups:   w ≈ d·s·q − e·m    q, s and m of 4, 6 and 6 bits;  4.5 bits per number
    Q6_K   256 columns, 16 groups:  w ≈ d·s·q          q and s of 6 and 8 bits;        6.5625 bits per number

d and e are float16 numbers of the block; s and m belong to a group.
"""

from __future__ import annotations

from math import inf

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from .blocks import SUPER
from .rounding import ROWS, safe

SHARES = torch.linspace(0.85, 1.1, 11)  # steps of Q4_K to try, as multiples of what covers the whole group
SIX = torch.linspace(0.9, 1.05, 7)  # scales of Q6_K to try, as multiples of what maps the largest number to −32


def quantise_blocks(weight: Float[Tensor, "o i"], kind: str) -> UInt8[Tensor, "o b"]:
    """Return the bytes of a matrix in Q4_K or Q6_K; its columns are a multiple of 256."""
    make = {"Q4_K": make_q4_k, "Q6_K": make_q6_k}[kind]
    rows = max(1, ROWS // weight.shape[1])
    return torch.cat([make(part.reshape(-1, SUPER)).view(len(part), -1) for part in weight.float().split(rows)])


def make_q4_k(blocks: Float[Tensor, "n 256"]) -> UInt8[Tensor, "n 144"]:
    groups = blocks.view(-1, 8, 32)
    step, shift = best_lines(groups)
    whole = [(each.amax(1, keepdim=True) / 63).half() for each in (step, shift)]
    wide_step, wide_shift = (each.float() for each in whole)
    scales = (step / safe(wide_step)).round().clamp(0, 63)
    offsets = (shift / safe(wide_shift)).round().clamp(0, 63)
    codes = nearest_steps(groups, (wide_step * scales)[..., None], (wide_shift * offsets)[..., None])
    packed = codes.to(torch.uint8).view(-1, 4, 2, 32)
    return torch.cat(
        (
            *(each.view(torch.uint8) for each in whole),
            pack_six_bits(scales.to(torch.uint8), offsets.to(torch.uint8)),
            (packed[:, :, 0] | packed[:, :, 1] << 4).flatten(1),
        ),
        1,
    )


def best_lines(groups: Float[Tensor, "n g k"]) -> tuple[Float[Tensor, "n g"], Float[Tensor, "n g"]]:
    """Return the step and the shift ≥ 0 of each group, w ≈ step·q − shift: the best of several, by least squares."""
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    least = torch.full_like(low, inf)
    found = torch.zeros_like(low), torch.zeros_like(low)
    for share in SHARES.tolist():
        step, shift = (high - low) * share / 15, -low
        for _ in range(2):
            codes = nearest_steps(groups, step[..., None], shift[..., None])
            mean, middle = codes.mean(-1), groups.mean(-1)
            spread = (codes - mean[..., None]).square().sum(-1)
            fitted = ((codes - mean[..., None]) * groups).sum(-1) / safe(spread)
            free = middle - fitted * mean < 0  # otherwise the best shift would be negative, and 0 is the nearest
            alone = (codes * groups).sum(-1) / safe(codes.square().sum(-1))
            step = torch.where(free, fitted, alone).clamp(min=0)
            shift = torch.where(free, step * mean - middle, 0)
            error = (step[..., None] * codes - shift[..., None] - groups).square().sum(-1)
            better = error < least
            least = torch.where(better, error, least)
            found = torch.where(better, step, found[0]), torch.where(better, shift, found[1])
    return found


def nearest_steps(
    groups: Float[Tensor, "n g k"], step: Float[Tensor, "n g 1"], shift: Float[Tensor, "n g 1"]
) -> Float[Tensor, "n g k"]:
    return ((groups + shift) / safe(step)).round().clamp(0, 15)


def pack_six_bits(scales: UInt8[Tensor, "n 8"], offsets: UInt8[Tensor, "n 8"]) -> UInt8[Tensor, "n 12"]:
    """Pack 16 numbers of six bits as Q4_K does: the last eight are split over all twelve bytes."""
    (first, second), (low, high) = scales.split(4, 1), offsets.split(4, 1)
    return torch.cat((first | second >> 4 << 6, low | high >> 4 << 6, (second & 15) | (high & 15) << 4), 1)


def make_q6_k(blocks: Float[Tensor, "n 256"]) -> UInt8[Tensor, "n 210"]:
    groups = blocks.view(-1, 16, 16)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    least, scales = torch.full_like(largest, inf), torch.zeros_like(largest)
    for share in SIX.tolist():
        codes = (groups / safe(largest * (share / -32))[..., None]).round().clamp(-32, 31)
        tried = (codes * groups).sum(-1) / safe(codes.square().sum(-1))
        error = (groups - tried[..., None] * codes).square().sum(-1)
        scales, least = torch.where(error < least, tried, scales), torch.minimum(error, least)
    widest = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    whole = (widest / -128).half()
    own = (scales / safe(whole.float())).round().clamp(-128, 127)
    codes = (groups / safe(whole.float() * own)[..., None]).round().clamp(-32, 31)
    packed = (codes + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = packed & 15
    high = packed >> 4
    return torch.cat(
        (
            torch.cat((low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), 2).flatten(1),
            (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).flatten(1),
            own.to(torch.int8).view(torch.uint8),
            whole.view(torch.uint8),
        ),
        1,
    )
