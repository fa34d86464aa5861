"""The short filter that Mamba and short convolutions read the last few tokens by, going on from a state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.functional.convolution import filtered

from .cache import ConvState
from .packing import DenseRows


def filtered_on(
    x: Float[Tensor, "B T I"],
    taps: Float[Tensor, "O I"],
    bias: Float[Tensor, "I"] | None,
    row: DenseRows,
    state: ConvState | None,
) -> Float[Tensor, "B T I"]:
    """Σ_k taps_k∘x_{t−k}, each channel by a filter of its own; what is before a document's start is 0."""
    batch, length, inner = x.shape
    reach = len(taps) - 1
    past = x.new_zeros(batch, reach, inner) if state is None else state.conv
    past = torch.cat((past, x), dim=1)
    if state is not None:
        state.conv = last_real(past, row, length, reach).detach()
    same = None
    if row.document is not None:
        document = F.pad(row.document, (reach, 0), value=-1)
        same = torch.stack([document[:, k : k + length] == row.document for k in range(reach + 1)])
    return filtered(past, taps, bias, same)


def last_real(past: Float[Tensor, "B N I"], row: DenseRows, length: int, reach: int) -> Float[Tensor, "B O I"]:
    """The last `reach` inputs that are no padding: those that the next token's filter reads."""
    if row.real is None:
        return past[:, length:].clone()  # a view would keep the whole text
    at: Int[Tensor, "B O"] = row.real.sum(1, keepdim=True) + torch.arange(reach, device=past.device)
    return past.gather(1, at.unsqueeze(-1).expand(-1, -1, past.shape[2]))
