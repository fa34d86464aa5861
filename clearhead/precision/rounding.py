"""Round weights to codes and scales, with the smallest squared error."""

from __future__ import annotations

import ctypes
from math import inf

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.kernels.calls import kernels_on, threads_for

GAUSSIAN = (
    *(-1.0, -0.787, -0.631, -0.499, -0.38, -0.272, -0.17, -0.073),
    *(0.019, 0.108, 0.199, 0.294, 0.398, 0.519, 0.667, 0.868),
)
"""The table from which `learn_table` starts: the best one for groups of 32 normally distributed numbers.

It is not symmetric, and a scale may be negative, so a group uses the side that reaches further for its largest number.
The error is 0.0729 standard deviations. The best symmetric table has 0.0762, and one with equal steps 0.086."""

NEAR = 1 + torch.arange(-4, 5) / 256  # int8 scales to try, as multiples of largest/128, one bfloat16 step apart
SCALES = torch.linspace(0.8, 1.2, 9)  # int4 scales to try, as multiples of what maps the largest number to an end
FEW_SCALES = torch.tensor([0.85, 0.95, 1.05])  # the same while a table is learned
ENOUGH = 1024  # groups; a table that is learned from fewer fits their noise, and the outputs are further off
SAMPLE, ROUNDS = 4096, 8  # groups, and rounds of Lloyd's algorithm, from which a table is learned
ROWS = 1 << 21  # numbers rounded at once
DAMPING = 0.01  # share of the mean squared input that is added to every input, so that rare inputs still count


def round_int8(weight: Float[Tensor, "o w"], group: int) -> tuple[Int[Tensor, "o w"], Float[Tensor, "o g"]]:
    """Return int8 codes and bfloat16 scales.

    Each group uses the best of several scales that map its largest number to about −128. bfloat16 is coarse, so the
    next scale up or down can have a smaller error.
    """
    parts = [nearest_int8(part.unflatten(1, (-1, group))) for part in weight.split(max(1, ROWS // weight.shape[1]))]
    codes, scales = (torch.cat(some) for some in zip(*parts, strict=True))
    return codes.flatten(1), scales


def nearest_int8(weight: Float[Tensor, "... k"]) -> tuple[Int[Tensor, "... k"], Float[Tensor, "..."]]:
    largest = weight.gather(-1, weight.abs().argmax(-1, keepdim=True))[..., 0]
    least, scales = weight.new_full(largest.shape, inf), largest.bfloat16()
    for share in NEAR.tolist():
        tried = (largest * (share / -128)).bfloat16()
        wide = tried.float()[..., None]
        error = (weight - multiples(weight, wide) * wide).square().sum(-1)
        scales, least = torch.where(error < least, tried, scales), torch.minimum(error, least)
    return multiples(weight, scales.float()[..., None]).to(torch.int8), scales


def multiples(weight: Float[Tensor, "... k"], scales: Float[Tensor, "... 1"]) -> Float[Tensor, "... k"]:
    return (weight / safe(scales)).round().clamp(-128, 127)


def round_int4(
    weight: Float[Tensor, "o w"], group: int, moments: Float[Tensor, "i i"] | None = None
) -> tuple[Int[Tensor, "o w"], Float[Tensor, "o g"], Float[Tensor, "16"]]:
    """Return int4 codes (indices into the table), scales, and the table, which is learned for this matrix.

    Without `moments`, each number gets the nearest code. `moments` is Σ x xᵀ over inputs x: later columns of a row then
    compensate for the errors of earlier ones, so that W·x stays close (GPTQ, Frantar et al. 2022, arXiv 2210.17323).
    """
    table = learn_table(weight.reshape(-1, group)).bfloat16().float()  # the kernels keep a table in bfloat16
    rows = max(1, ROWS // weight.shape[1])
    spread = None if moments is None else error_spread(moments, weight.shape[1])
    parts = [
        nearest_codes(part.unflatten(1, (-1, group)), table)
        if spread is None
        else round_with_compensation(part, group, table, spread)
        for part in weight.split(rows)
    ]
    places, scales = (torch.cat(some) for some in zip(*parts, strict=True))
    return places.flatten(1), scales, table


def learn_table(groups: Float[Tensor, "n k"]) -> Float[Tensor, "16"]:
    """Return the table with the least squared error over a sample of these groups, by Lloyd's algorithm.

    Each round gives every group its best scale, then moves each entry to the best place for the numbers that use it.
    """
    table = torch.tensor(GAUSSIAN, device=groups.device)
    if len(groups) < ENOUGH:
        return table
    sample = groups
    if len(groups) > SAMPLE:
        sample = groups[torch.randint(len(groups), (SAMPLE,), generator=torch.Generator().manual_seed(0))]
    for _ in range(ROUNDS):
        scales = best_scales(sample, table, FEW_SCALES)[:, None].expand_as(sample)
        codes = places(sample, scales[:, 0], table).flatten()
        moved, weights = (
            groups.new_zeros(16).index_add_(0, codes, values.flatten()) for values in (sample * scales, scales.square())
        )
        table = torch.where(weights > 0, moved / safe(weights), table).sort().values
    return table


def nearest_codes(
    weight: Float[Tensor, "... k"], table: Float[Tensor, "16"]
) -> tuple[Int[Tensor, "... k"], Float[Tensor, "..."]]:
    """Return the nearest codes of each group, and its scale."""
    scales = best_scales(weight, table, SCALES).bfloat16()
    return places(weight, scales.float(), table).to(torch.int8), scales


def best_scales(
    weight: Float[Tensor, "... k"], table: Float[Tensor, "16"], shares: Float[Tensor, "s"]
) -> Float[Tensor, "..."]:
    """Return the best of several scales for each group, of both signs, each refined by least squares.

    For codes c, the scale Σwc/Σc² is best, and the squared error falls by (Σwc)²/Σc² below Σw².
    """
    if (library := kernels_for(weight)) is not None:
        weight, table, shares = weight.contiguous(), table.contiguous(), shares.contiguous()
        scales = torch.empty(weight.shape[:-1])
        library.int4_scales(
            *(weight.data_ptr(), scales.numel(), weight.shape[-1], table.data_ptr(), shares.data_ptr(), len(shares)),
            *(scales.data_ptr(), threads_for(weight.numel() * len(shares))),
        )
        return scales
    largest = weight.gather(-1, weight.abs().argmax(-1, keepdim=True))[..., 0]
    best, scales = torch.full_like(largest, -1.0), torch.zeros_like(largest)
    for end in (table[-1], table[0]):  # the end of the table that the largest number is mapped to
        for share in shares.tolist():
            codes = table[places(weight, largest / end * share, table)]
            product, square = (weight * codes).sum(-1), safe(codes.square().sum(-1))
            gain = product.square() / square
            scales, best = torch.where(gain > best, product / square, scales), torch.maximum(gain, best)
    return scales


def places(
    weight: Float[Tensor, "... k"], scales: Float[Tensor, "..."], table: Float[Tensor, "16"]
) -> Int[Tensor, "... k"]:
    """Return the index of the table entry nearest to each number."""
    if (library := kernels_for(weight)) is not None:
        weight, table, scales = weight.contiguous(), table.contiguous(), scales.contiguous()
        codes = torch.empty(weight.shape, dtype=torch.uint8)
        library.int4_codes(
            *(weight.data_ptr(), scales.numel(), weight.shape[-1], table.data_ptr(), scales.data_ptr()),
            *(codes.data_ptr(), threads_for(weight.numel())),
        )
        return codes.int()
    return torch.bucketize(weight / safe(scales)[..., None], (table[1:] + table[:-1]) / 2)


def kernels_for(weight: Float[Tensor, "... k"]) -> ctypes.CDLL | None:
    """The compiled kernels if they can round these groups: whole vectors of numbers."""
    return kernels_on(weight) if weight.shape[-1] % 32 == 0 else None


def error_spread(moments: Float[Tensor, "i i"], width: int) -> Float[Tensor, "w w"]:
    """Return U with UᵀU = H⁻¹. Row j says how the columns after j best compensate for an error in column j."""
    full = torch.eye(width, device=moments.device)
    full[: len(moments), : len(moments)] = moments
    full.diagonal().add_(DAMPING * moments.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(full.double()))
    return torch.linalg.cholesky(inverse, upper=True).float()


def round_with_compensation(
    weight: Float[Tensor, "o w"], group: int, table: Float[Tensor, "16"], spread: Float[Tensor, "w w"]
) -> tuple[Int[Tensor, "o g k"], Float[Tensor, "o g"]]:
    """Round column after column, and subtract the effect of each rounding error from the columns that follow."""
    weight = weight.clone()
    found, scales = [], []
    for first in range(0, weight.shape[1], group):
        last = first + group
        scale = nearest_codes(weight[:, first:last], table)[1]
        errors = torch.empty_like(weight[:, first:last])
        for j in range(first, last):
            place = places(weight[:, j : j + 1], scale.float(), table)
            errors[:, j - first] = (weight[:, j] - scale.float() * table[place[:, 0]]) / spread[j, j]
            weight[:, j:last] -= errors[:, j - first, None] * spread[j, j:last]
            found.append(place.to(torch.int8))
        weight[:, last:] -= errors @ spread[first:last, last:]
        scales.append(scale)
    return torch.cat(found, 1).unflatten(1, (-1, group)), torch.stack(scales, 1)


def safe(divisor: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Replace 0 by 1 in a divisor: a group of zeros has scale 0 and must stay zero."""
    return torch.where(divisor == 0, 1, divisor)
