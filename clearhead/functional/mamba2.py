"""The recurrence of Mamba-2, chunk by chunk in matrix products.

Within a chunk the recurrence is an attention: token t reads token s with the weight read_t·write_s, times what is left
of s after the tokens between. Between chunks h carries the rest. Plain operations only, so torch differentiates them.
Dao & Gu (2024), "Transformers are SSMs", section 6.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

CHUNK = 64
"""Tokens per chunk: the work within a chunk grows with it, the work between chunks shrinks."""


def dual_scan(
    x: Float[Tensor, "B T H K"],
    step: Float[Tensor, "B T H"],
    decay: Float[Tensor, "H"],
    write: Float[Tensor, "B T H Z"],
    read: Float[Tensor, "B T H Z"],
    start: Float[Tensor, "B H Z K"],
    continues: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B H Z K"]]:
    """y = read·h of every token, and the last h; h = exp(step·decay)·h + step·write ⊗ x, continuing from `start`.

    h is reset to 0 where `continues` is False.
    """
    h, found = start, []
    for now in (slice(at, at + CHUNK) for at in range(0, x.shape[1], CHUNK)):
        again = None if continues is None else continues[:, now]
        y, h = dual_chunk(x[:, now], step[:, now], decay, write[:, now], read[:, now], h, again)
        found.append(y)
    return torch.cat(found, dim=1) if found else x, h


def dual_chunk(
    x: Float[Tensor, "B T H K"],
    step: Float[Tensor, "B T H"],
    decay: Float[Tensor, "H"],
    write: Float[Tensor, "B T H Z"],
    read: Float[Tensor, "B T H Z"],
    h: Float[Tensor, "B H Z K"],
    continues: Bool[Tensor, "B T"] | None,
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B H Z K"]]:
    """The same for one chunk."""
    length = x.shape[1]
    total = (step * decay).cumsum(1).transpose(1, 2)  # B H T: the logarithm of what is left of h
    kept, left = total.exp(), (total[..., -1:] - total).exp()  # of the first h at t, and of t at the end
    allowed = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    if continues is not None:
        document = (~continues).cumsum(1)  # 0 until the first reset
        allowed = allowed & (document[:, None, :, None] == document[:, None, None, :])
        kept = kept * (document == 0)[:, None]
        left = left * (document == document[:, -1:])[:, None]
    apart = (total[..., :, None] - total[..., None, :]).masked_fill(~allowed, -torch.inf).exp()  # B H T S
    added = x * step.unsqueeze(-1)
    weights = torch.einsum("bthz,bshz->bhts", read, write) * apart
    y = torch.einsum("bhts,bshk->bthk", weights, added)
    y = y + torch.einsum("bthz,bhzk->bthk", read, h) * kept.transpose(1, 2).unsqueeze(-1)
    new = torch.einsum("bshz,bshk->bhzk", write * left.transpose(1, 2).unsqueeze(-1), added)
    return y, kept[..., -1, None, None] * h + new


def dual_scan_written_out(
    x: Float[Tensor, "B T H K"],
    step: Float[Tensor, "B T H"],
    decay: Float[Tensor, "H"],
    write: Float[Tensor, "B T H Z"],
    read: Float[Tensor, "B T H Z"],
    start: Float[Tensor, "B H Z K"],
    continues: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B H Z K"]]:
    """`dual_scan` token after token, as it is defined."""
    h, found = start, []
    for t in range(x.shape[1]):
        if continues is not None:
            h = h * continues[:, t, None, None, None]
        added = write[:, t].unsqueeze(-1) * (step[:, t].unsqueeze(-1) * x[:, t]).unsqueeze(-2)  # B H Z K
        h = (step[:, t] * decay).exp()[..., None, None] * h + added
        found.append((read[:, t].unsqueeze(-2) @ h).squeeze(-2))
    return torch.stack(found, dim=1) if found else x, h
