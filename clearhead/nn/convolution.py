"""The causal convolution of Mamba and of short-convolution layers, continuing from a state.

A filter of O + 1 tokens for each channel. Decoding keeps the last O inputs. Documents do not mix: a tap that would
reach into the document before reads 0.

Every input is read O + 1 times, by itself and by the O tokens after it. A pass over a text therefore starts with the
last O inputs of the state in front, and leaves its own last O there: prefill and decoding are the same function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.functional.convolution import causal_convolution

from .packing import DenseRows


@dataclass
class ConvState:
    """The last few inputs of a causal convolution, which the next tokens read again."""

    can_rewind: ClassVar[bool] = False

    conv: Float[Tensor, "B O I"]

    def select(self, rows: Int[Tensor, "B"]) -> None:
        self.conv = self.conv[rows]


def convolve_rows(
    x: Float[Tensor, "B T I"],
    taps: Float[Tensor, "O I"],
    bias: Float[Tensor, "I"] | None,
    row: DenseRows,
    state: ConvState | None,
) -> Float[Tensor, "B T I"]:
    """Σ_k taps_k∘x_{t−O+k}, each channel with a filter of its own; before a document's first token there are zeros.

    With a state, the tokens continue those before: their last O inputs are read from it, and the new ones stored.
    """
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
    return causal_convolution(past, taps, bias, same)


def last_real(past: Float[Tensor, "B N I"], row: DenseRows, length: int, reach: int) -> Float[Tensor, "B O I"]:
    """The last `reach` inputs that are not padding, which the next token's convolution reads."""
    if row.real is None:
        return past[:, length:].clone()  # a view would keep the whole text
    at: Int[Tensor, "B O"] = row.real.sum(1, keepdim=True) + torch.arange(reach, device=past.device)
    return past.gather(1, at.unsqueeze(-1).expand(-1, -1, past.shape[2]))
