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
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .context import Context


@dataclass(frozen=True)
class PackedSequences:
    """The texts of a batch, longest first, and their tokens by time: the first of each, the second of each, …"""

    rows: Int[Tensor, "N"]  # of the batch, in which each text stands
    tokens: Int[Tensor, "W"]  # number row·T + place of each token
    sizes: Int[Tensor, "T"]  # how many texts have a token at each time

    def gather(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "W D"]:
        return x.flatten(0, 1)[self.tokens]

    def scatter(self, y: Float[Tensor, "W I"], like: Float[Tensor, "B T D"]) -> Float[Tensor, "B T I"]:
        """Back to the places of the batch; padding gets zeros."""
        batch, length, _ = like.shape
        return y.new_zeros(batch * length, y.shape[1]).index_copy(0, self.tokens, y).unflatten(0, (batch, length))


def packed_sequences(context: Context, batch: int) -> PackedSequences:
    """Found once for all layers."""
    return context.once("texts", lambda: find_packed_sequences(context, batch))


def find_packed_sequences(context: Context, batch: int) -> PackedSequences:
    length, device = context.positions.shape[1], context.positions.device
    if context.readable is None and context.documents is None:
        rows, times = torch.arange(batch, device=device), torch.arange(length, device=device)
        return PackedSequences(rows, (rows[None] * length + times[:, None]).flatten(), torch.full((length,), batch))
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
    return PackedSequences(keys[0][longest], place[by_time], torch.bincount(time).cpu())


@dataclass(frozen=True)
class DenseRows:
    """Rows in which real tokens come first, one after the other: the batch's own, or one for each document."""

    shape: tuple[int, int]  # B and T of the batch
    tokens: Int[Tensor, "N L"] | None  # number row·T + place of each token; None: all stand where they stood
    real: Bool[Tensor, "N L"] | None  # None: no place is padding
    document: Int[Tensor, "N L"] | None = None  # None: a row is one document

    def gather(self, x: Float[Tensor, "..."], time: int = 1) -> Float[Tensor, "..."]:
        """From the batch, whose axis of tokens is `time`."""
        if self.tokens is None:
            return x
        return x.movedim(time, 1).flatten(0, 1)[self.tokens].movedim(1, time)

    def scatter(self, y: Float[Tensor, "..."], time: int = 1) -> Float[Tensor, "..."]:
        """Back to the batch; padding gets zeros."""
        if self.tokens is None and self.real is None:
            return y
        y = y.movedim(time, 1)
        if self.tokens is not None:
            real = torch.ones_like(self.tokens, dtype=torch.bool) if self.real is None else self.real
            whole = y.new_zeros(self.shape[0] * self.shape[1], *y.shape[2:])
            y = whole.index_copy(0, self.tokens[real], y[real]).unflatten(0, self.shape)
        elif self.real is not None:
            y = y * self.real.view(*self.real.shape, *(1,) * (y.dim() - 2))
        return y.movedim(1, time)


def dense_rows(context: Context, batch: int) -> DenseRows:
    """Each row's real tokens at its front, document by document. Found once for all layers."""
    return context.once("lanes", lambda: find_dense_rows(context, batch))


def find_dense_rows(context: Context, batch: int) -> DenseRows:
    length, device = context.positions.shape[1], context.positions.device
    real, document = context.readable, context.documents
    if real is not None and bool(real.all()):
        real = None
    if real is None and document is None:
        return DenseRows((batch, length), None, None)
    places = torch.arange(length, device=device).expand(batch, length)
    key = torch.zeros_like(places) if document is None else document
    if real is not None:
        key = key.masked_fill(~real, torch.iinfo(key.dtype).max)
    order = key.argsort(dim=1, stable=True)
    document = None if document is None else document.gather(1, order)
    real = None if real is None else real.gather(1, order)
    if torch.equal(order, places):
        return DenseRows((batch, length), None, real, document)
    rows = torch.arange(batch, device=device)[:, None]
    return DenseRows((batch, length), rows * length + order, real, document)


def document_rows(context: Context, batch: int) -> DenseRows:
    """A row for each document."""
    return context.once("document_rows", lambda: find_document_rows(context, batch))


def find_document_rows(context: Context, batch: int) -> DenseRows:
    order = packed_sequences(context, batch)
    longest, count = len(order.sizes), len(order.rows)
    sizes = order.sizes.to(order.tokens.device)
    time = torch.arange(longest, device=sizes.device).repeat_interleave(sizes)
    text = torch.arange(len(order.tokens), device=sizes.device) - (sizes.cumsum(0) - sizes)[time]
    tokens = torch.zeros(count, longest, dtype=torch.long, device=sizes.device)
    real = torch.zeros(count, longest, dtype=torch.bool, device=sizes.device)
    tokens[text, time], real[text, time] = order.tokens, True
    return DenseRows((batch, context.positions.shape[1]), tokens, real)
