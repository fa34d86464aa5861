"""The LSTM, by torch's kernel and written out."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.functional.derivatives import plain_needed


def lstm(
    x: Float[Tensor, "... T D"],
    input_weight: Float[Tensor, "I4 D"],
    recurrent_weight: Float[Tensor, "I4 I"],
    bias: Float[Tensor, "I4"] | None = None,
) -> Float[Tensor, "... T I"]:
    """h of every token: c = f∘c + i∘g, h = o∘tanh(c), starting from zeros. The weights stack the gates i, f, g, o.

    >>> lstm(torch.ones((5, 3)), torch.ones((8, 3)), torch.ones((8, 2))).shape
    torch.Size([5, 2])
    """
    rows = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    start = x.new_zeros(len(rows), recurrent_weight.shape[1])
    sizes = torch.full((x.shape[-2],), len(rows))
    by_time = rows.transpose(0, 1).flatten(0, 1)
    hidden, _, _ = lstm_kernel(by_time, sizes, input_weight, recurrent_weight, bias, start, start)
    return hidden.unflatten(0, (x.shape[-2], len(rows))).transpose(0, 1).reshape(*x.shape[:-1], start.shape[-1])


def lstm_kernel(
    x: Float[Tensor, "W D"],
    sizes: Int[Tensor, "T"],
    input_weight: Float[Tensor, "I4 D"],
    recurrent_weight: Float[Tensor, "I4 I"],
    bias: Float[Tensor, "I4"] | None,
    h: Float[Tensor, "N I"],
    c: Float[Tensor, "N I"],
) -> tuple[Float[Tensor, "W I"], Float[Tensor, "N I"], Float[Tensor, "N I"]]:
    """h of every token, and the last h and c of every sequence.

    The tokens are packed by time: the first of all N sequences, then the second of the `sizes[1]` sequences that have
    one, and so on; the sequences are sorted by length, longest first.
    """
    half = x.dtype in (torch.float16, torch.bfloat16)  # which the kernel takes on some processors only
    if x.shape[0] == 0 or half or plain_needed(x, input_weight, recurrent_weight, bias, h, c):
        gates = F.linear(x, input_weight, bias)
        return lstm_written_out(gates, sizes, recurrent_weight, h, c)
    weights = [input_weight, recurrent_weight]
    if bias is not None:
        weights += [bias, torch.zeros_like(bias)]  # torch has a second bias, which adds nothing
    if int(sizes.min()) == len(h):  # all equally long: the kernel for whole batches is faster
        whole = x.unflatten(0, (len(sizes), len(h)))
        hidden, h_last, c_last = torch.lstm(
            whole, (h[None], c[None]), weights, bias is not None, 1, 0.0, False, False, False
        )
        return hidden.flatten(0, 1), h_last[0], c_last[0]
    hidden, h_last, c_last = torch.lstm(x, sizes, (h[None], c[None]), weights, bias is not None, 1, 0.0, False, False)
    return hidden, h_last[0], c_last[0]


def lstm_written_out(
    gates: Float[Tensor, "W I4"],
    sizes: Int[Tensor, "T"],
    recurrent_weight: Float[Tensor, "I4 I"],
    h: Float[Tensor, "N I"],
    c: Float[Tensor, "N I"],
) -> tuple[Float[Tensor, "W I"], Float[Tensor, "N I"], Float[Tensor, "N I"]]:
    """`lstm_kernel` in plain operations, token after token, from gates = x·W_X + b."""
    hidden = []
    for now in gates.split(sizes.tolist()):
        going = len(now)  # sequences that have not ended
        i, f, g, o = (now + h[:going] @ recurrent_weight.T).chunk(4, dim=-1)
        new_c = f.sigmoid() * c[:going] + i.sigmoid() * g.tanh()
        new_h = o.sigmoid() * new_c.tanh()
        h, c = torch.cat((new_h, h[going:])), torch.cat((new_c, c[going:]))
        hidden.append(new_h)
    return torch.cat(hidden) if hidden else gates.new_zeros(0, h.shape[1]), h, c
