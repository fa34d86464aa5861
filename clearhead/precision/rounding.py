"""Round weights to codes and scales, with the smallest squared error."""

from __future__ import annotations

from math import inf

import torch
from jaxtyping import Float, Int
from torch import Tensor

HALF = (0.047, 0.1429, 0.2434, 0.3512, 0.4702, 0.6071, 0.7735, 1.0)
"""The positive half of the table of 16 with the least squared error over groups of 32 normally distributed numbers,
each group with its own best scale (Lloyd's algorithm, 60 rounds over 100,000 groups). The error is 0.0762 standard
deviations; a table with equal steps has 0.086."""

NEAR = 1 + torch.arange(-4, 5) / 256  # int8 scales to try, as multiples of largest/128, one bfloat16 step apart
SCALES = torch.linspace(0.8, 1.2, 9)  # int4 scales to try, as multiples of the group's largest number
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
    """Return int4 codes (indices into the table), scales, and the table.

    Without `moments`, each number gets the nearest code. `moments` is Σ x xᵀ over inputs x: later columns of a row then
    compensate for the errors of earlier ones, so that W·x stays close (GPTQ, Frantar et al. 2022, arXiv 2210.17323).
    """
    half = torch.tensor(HALF, device=weight.device).bfloat16().float()  # the kernels keep a table in bfloat16
    table = torch.cat((-half.flip(0), half))
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


def nearest_codes(
    weight: Float[Tensor, "... k"], table: Float[Tensor, "16"]
) -> tuple[Int[Tensor, "... k"], Float[Tensor, "..."]]:
    """Return the nearest codes of each group, with the best of several scales, refined by least squares."""
    largest, least, scales = weight.abs().amax(-1), weight.new_full(weight.shape[:-1], inf), weight.new_zeros(())
    for share in SCALES.tolist():
        tried = largest * share
        error = (weight - tried[..., None] * table[places(weight, tried, table)]).square().sum(-1)
        scales, least = torch.where(error < least, tried, scales), torch.minimum(error, least)
    chosen = table[places(weight, scales, table)]
    scales = ((weight * chosen).sum(-1) / safe(chosen.square().sum(-1))).bfloat16()
    return places(weight, scales.float(), table).to(torch.int8), scales


def places(
    weight: Float[Tensor, "... k"], scales: Float[Tensor, "..."], table: Float[Tensor, "16"]
) -> Int[Tensor, "... k"]:
    """Return the index of the table entry nearest to each number."""
    return torch.bucketize(weight / safe(scales)[..., None], (table[1:] + table[:-1]) / 2)


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
