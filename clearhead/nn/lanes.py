"""Where tokens really follow each other, for parts that go through a text in order.

Padding is passed over and every document is a text of its own, so that a row of a batch

    place       0  1  2  3  4  5  6
    readable    ·  ▪  ▪  ▪  ▪  ▪  ·
    documents   0  0  0  1  1  1  1

holds two texts, of places 1 2 and 3 4 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .context import Context


@dataclass(frozen=True)
class Texts:
    """The texts of a batch, longest first, and their tokens by time: the first of each, the second of each, …"""

    rows: Int[Tensor, "N"]  # of the batch, in which each text stands
    tokens: Int[Tensor, "W"]  # number row·T + place of each token
    sizes: Int[Tensor, "T"]  # how many texts have a token at each time

    def take(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "W D"]:
        return x.flatten(0, 1)[self.tokens]

    def give(self, y: Float[Tensor, "W I"], like: Float[Tensor, "B T D"]) -> Float[Tensor, "B T I"]:
        """Back to the places of the batch; padding gets zeros."""
        batch, length, _ = like.shape
        return y.new_zeros(batch * length, y.shape[1]).index_copy(0, self.tokens, y).unflatten(0, (batch, length))


def texts(context: Context, batch: int) -> Texts:
    """Found once for all layers."""
    return context.once("texts", lambda: find_texts(context, batch))


def find_texts(context: Context, batch: int) -> Texts:
    length, device = context.positions.shape[1], context.positions.device
    if context.readable is None and context.documents is None:
        rows, times = torch.arange(batch, device=device), torch.arange(length, device=device)
        return Texts(rows, (rows[None] * length + times[:, None]).flatten(), torch.full((length,), batch))
    place = torch.arange(batch * length, device=device)
    document = torch.zeros_like(place) if context.documents is None else context.documents.flatten()
    if context.readable is not None:
        real = context.readable.flatten()
        place, document = place[real], document[real]
    keys, text = torch.unique(torch.stack((place // length, document)), dim=1, return_inverse=True)
    by_text = text.argsort(stable=True)
    counts = torch.bincount(text, minlength=keys.shape[1])
    first = (counts.cumsum(0) - counts)[text[by_text]]
    time = torch.empty_like(text)
    time[by_text] = torch.arange(len(text), device=device) - first
    longest = counts.argsort(descending=True, stable=True)
    rank = torch.empty_like(longest)
    rank[longest] = torch.arange(len(longest), device=device)
    by_time = (time * len(longest) + rank[text]).argsort()
    return Texts(keys[0][longest], place[by_time], torch.bincount(time).cpu())
