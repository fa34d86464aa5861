"""The selective scan of Mamba: a loop over buffers that fit the processor's cache, with a backward written by hand."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.functional.derivatives import plain_backward, plain_needed
from clearhead.reference.checks import check_same_shape

ROOM = 2**18
"""Numbers in one of the loop's buffers: 1 MB, so that all of them fit a core's own cache."""


def selective_scan(
    x: Float[Tensor, "... T I"],
    step: Float[Tensor, "... T I"],
    decay: Float[Tensor, "Z I"],
    write: Float[Tensor, "... T Z"],
    read: Float[Tensor, "... T Z"],
) -> Float[Tensor, "... T I"]:
    """y = read·h with h = exp(step·decay)∘h + step·x·write, starting from h = 0; `decay` is negative.

    >>> x, step, decay = torch.ones((5, 3)), torch.ones((5, 3)), -torch.ones((2, 3))
    >>> selective_scan(x, step, decay, torch.ones((5, 2)), torch.ones((5, 2))).shape
    torch.Size([5, 3])
    """
    check_same_shape(x, step=step)
    rows = [part.reshape(-1, *part.shape[-2:]) for part in (x, step, write, read)]
    start = x.new_zeros(len(rows[0]), *decay.shape)
    return scan_from(rows[0], rows[1], decay, rows[2], rows[3], start)[0].reshape(x.shape)


def scan_from(
    x: Float[Tensor, "B T I"],
    step: Float[Tensor, "B T I"],
    decay: Float[Tensor, "Z I"],
    write: Float[Tensor, "B T Z"],
    read: Float[Tensor, "B T Z"],
    start: Float[Tensor, "B Z I"],
    continues: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T I"], Float[Tensor, "B Z I"]]:
    """y of every token, and the last h, continuing from `start`; h is reset to 0 where `continues` is False."""
    if plain_needed(x, step, decay, write, read, start):
        return scan_written_out(x, step, decay, write, read, start, continues)
    if x.shape[1] == 1 and not torch.is_grad_enabled():  # decoding
        h = (step * decay).exp_().mul_(start).addcmul_(step * x, write.mT)
        return (h.mT @ read.mT).mT, h  # read @ h takes seven times as long
    y, last = Scan.apply(x, step, decay, write, read, start, continues)
    return y, last


def scan_written_out(
    x: Float[Tensor, "B T I"],
    step: Float[Tensor, "B T I"],
    decay: Float[Tensor, "Z I"],
    write: Float[Tensor, "B T Z"],
    read: Float[Tensor, "B T Z"],
    start: Float[Tensor, "B Z I"],
    continues: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T I"], Float[Tensor, "B Z I"]]:
    """`scan_from` in plain operations, token after token: the recurrence as it is defined."""
    h, found = start, []
    for t in range(x.shape[1]):
        now = slice(t, t + 1)
        if continues is not None:
            h = h * continues[:, now, None]
        h = (step[:, now] * decay).exp() * h + (step[:, now] * x[:, now]) * write[:, now].mT
        found.append(read[:, now] @ h)
    return torch.cat(found, dim=1) if found else x, h


class Scan(torch.autograd.Function):
    """One chunk of tokens at a time, so that the chunk's h (Z × I numbers per token) stay in the cache.

    The forward stores h before each chunk only; the backward recomputes the chunk's h from it. In both, everything
    that does not depend on the token before is computed for the whole chunk at once. One operation per token is left.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        step: Tensor,
        decay: Tensor,
        write: Tensor,
        read: Tensor,
        start: Tensor,
        continues: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        batch, length, _ = x.shape
        size = chunk_size(start, length)
        y, added = torch.empty_like(x), step * x
        starts = start.new_empty(-(-length // size), *start.shape)
        buffers = [start.new_empty(batch, size, *decay.shape) for _ in range(2)]
        h = start
        for i, now in enumerate(chunks(length, size)):
            starts[i] = h
            kept = decays(step[:, now], decay, continues, now, buffers[0])
            found = torch.mul(added[:, now, None], write[:, now, :, None], out=buffers[1][:, : kept.shape[1]])
            recur(found, kept, h)
            h = found[:, -1].clone()
            y[:, now] = (read[:, now, None] @ found).squeeze(2)
        ctx.save_for_backward(x, step, decay, write, read, start, starts, continues)
        ctx.size = size
        ctx.mark_non_differentiable(h)  # a state stores values, not the graph that computed them
        return y, h

    @staticmethod
    def backward(ctx: Any, d_y: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, step, decay, write, read, start, starts, continues = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = plain_backward(
                lambda x, step, decay, write, read: scan_written_out(x, step, decay, write, read, start, continues)[0],
                (x, step, decay, write, read),
                d_y,
            )
            return *found, None, None
        batch, length, _ = x.shape
        d_x, d_step, d_write, d_read = (torch.empty_like(part) for part in (x, step, write, read))
        d_decay, added = torch.zeros_like(decay), step * x
        buffers = [x.new_empty(batch, ctx.size + 1, *decay.shape) for _ in range(3)]
        d_next: Tensor | None = None  # the gradient that the next chunk sends back to this chunk's last h
        for i, now in reversed(list(enumerate(chunks(length, ctx.size)))):
            kept = decays(step[:, now], decay, continues, now, buffers[0])
            count = kept.shape[1]
            found, d_h = buffers[1][:, : count + 1], buffers[2][:, :count]
            found[:, 0] = starts[i]
            torch.mul(added[:, now, None], write[:, now, :, None], out=found[:, 1:])
            recur(found[:, 1:], kept, starts[i])
            torch.mul(d_y[:, now, None], read[:, now, :, None], out=d_h)
            if d_next is not None:
                d_h[:, -1] += d_next
            for t in range(count - 1, 0, -1):
                d_h[:, t - 1].addcmul_(kept[:, t], d_h[:, t])
            d_next = d_h[:, 0] * kept[:, 0]
            d_read[:, now] = (found[:, 1:] @ d_y[:, now, :, None]).squeeze(-1)
            d_write[:, now] = (d_h @ added[:, now, :, None]).squeeze(-1)
            d_added = (write[:, now, None] @ d_h).squeeze(2)
            e = d_h.mul_(kept).mul_(found[:, :-1])  # the gradient of the exponents step·decay
            torch.mul(e, decay, out=kept)
            d_step[:, now] = torch.addcmul(kept.sum(2), d_added, x[:, now])
            d_decay += e.mul_(step[:, now, None]).sum((0, 1))
            torch.mul(d_added, step[:, now], out=d_x[:, now])
        return d_x, d_step, d_decay, d_write, d_read, None, None


def chunk_size(start: Tensor, length: int) -> int:
    """Tokens per chunk."""
    return max(1, min(length, 64, max(4, ROOM // max(1, start.numel()))))


def chunks(length: int, size: int) -> list[slice]:
    return [slice(at, min(at + size, length)) for at in range(0, length, size)]


def decays(step: Tensor, decay: Tensor, continues: Tensor | None, now: slice, buffer: Tensor) -> Tensor:
    """exp(step·decay) of a chunk, B C Z I; 0 where a new document begins."""
    kept = torch.mul(step.unsqueeze(2), decay, out=buffer[:, : step.shape[1]]).exp_()
    return kept if continues is None else kept.mul_(continues[:, now, None, None])


def recur(found: Tensor, kept: Tensor, h: Tensor) -> None:
    """h = kept∘h + found, token after token; every h overwrites its `found`."""
    for t in range(found.shape[1]):
        h = found[:, t].addcmul_(kept[:, t], h)
