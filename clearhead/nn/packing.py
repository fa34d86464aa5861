"""Which tokens follow each other, for parts that read a text in order: recurrences and convolutions.

Padding is skipped, and every document is a sequence of its own. This row of a batch

    place       0  1  2  3  4  5  6
    readable    ·  ▪  ▪  ▪  ▪  ▪  ·
    documents   0  0  0  1  1  1  1

holds two sequences: places 1 2, and places 3 4 5. `PackedSequences` orders their tokens by time, as torch's LSTM wants
them; `DenseRows` moves the real tokens of each row to its front, so that whole rows can be computed at once.

Attention needs none of this: its mask hides padding and other documents. A recurrence has no mask, only an order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .context import Context


@dataclass(frozen=True)
class PackedSequences:
    """The sequences of a batch, longest first, and their tokens by time: all first tokens, all second tokens, …"""

    rows: Int[Tensor, "N"]  # the batch row of each sequence
    tokens: Int[Tensor, "W"]  # index row·T + place of each token
    sizes: Int[Tensor, "T"]  # how many sequences have a token at each time

    def gather(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "W D"]:
        """The tokens of the batch in this order."""
        return x.flatten(0, 1)[self.tokens]

    def scatter(self, y: Float[Tensor, "W I"], like: Float[Tensor, "B T D"]) -> Float[Tensor, "B T I"]:
        """Put the results back in their places in the batch. Padding gets zeros."""
        batch, length, _ = like.shape
        return y.new_zeros(batch * length, y.shape[1]).index_copy(0, self.tokens, y).unflatten(0, (batch, length))


def packed_sequences(context: Context, batch: int) -> PackedSequences:
    """The sequences of this pass; computed once for all layers."""
    return context.once("packed_sequences", lambda: find_packed_sequences(context, batch))


def find_packed_sequences(context: Context, batch: int) -> PackedSequences:
    """Sort real tokens by (time within their sequence, rank of the sequence by length)."""
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
    """Rows whose real tokens come first, without gaps: the batch's own rows, or one row for each document."""

    shape: tuple[int, int]  # B and T of the batch
    tokens: Int[Tensor, "N L"] | None  # index row·T + place of each token; None: nothing moves
    real: Bool[Tensor, "N L"] | None  # None: there is no padding
    document: Int[Tensor, "N L"] | None = None  # None: each row is one document

    def gather(self, x: Float[Tensor, "..."], time: int = 1) -> Float[Tensor, "..."]:
        """The tokens of the batch in these rows; `time` is the axis of tokens."""
        if self.tokens is None:
            return x
        return x.movedim(time, 1).flatten(0, 1)[self.tokens].movedim(1, time)

    def scatter(self, y: Float[Tensor, "..."], time: int = 1) -> Float[Tensor, "..."]:
        """Put the results back in their places in the batch. Padding gets zeros."""
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
    """Each row's real tokens at its front, document by document. Computed once for all layers."""
    return context.once("dense_rows", lambda: find_dense_rows(context, batch))


def find_dense_rows(context: Context, batch: int) -> DenseRows:
    """Sort each row by document, padding last; the sort is stable, so order within a document stays."""
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
    """One row for each document. Computed once for all layers."""
    return context.once("document_rows", lambda: find_document_rows(context, batch))


def find_document_rows(context: Context, batch: int) -> DenseRows:
    """Unpack the sequences into rows as long as the longest, padded at the end."""
    order = packed_sequences(context, batch)
    longest, count = len(order.sizes), len(order.rows)
    sizes = order.sizes.to(order.tokens.device)
    time = torch.arange(longest, device=sizes.device).repeat_interleave(sizes)
    text = torch.arange(len(order.tokens), device=sizes.device) - (sizes.cumsum(0) - sizes)[time]
    tokens = torch.zeros(count, longest, dtype=torch.long, device=sizes.device)
    real = torch.zeros(count, longest, dtype=torch.bool, device=sizes.device)
    tokens[text, time], real[text, time] = order.tokens, True
    return DenseRows((batch, context.positions.shape[1]), tokens, real)
