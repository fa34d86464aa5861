"""Positions: sinusoids added to the input, ALiBi added to the scores, and the causal mask.

Angles and distances are computed in float64 and returned in torch's default dtype, on its default device.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.reference.positions import alibi_slopes


def sinusoidal_positions(
    length: int, dim: int, base: float = 10000.0, layout: str = "interleaved"
) -> Float[Tensor, "{length} {dim}"]:
    """PE(pos, 2i) = sin(pos / base^(2i/D)), PE(pos, 2i+1) = cos(pos / base^(2i/D)); "halves" has all sines first.

    >>> sinusoidal_positions(3, 4).round(decimals=2)
    tensor([[ 0.0000,  1.0000,  0.0000,  1.0000],
            [ 0.8400,  0.5400,  0.0100,  1.0000],
            [ 0.9100, -0.4200,  0.0200,  1.0000]])
    """
    return sinusoids(torch.arange(length), dim, base, layout)


def sinusoids(
    positions: Int[Tensor, "... T"],
    dim: int,
    base: float = 10000.0,
    layout: str = "interleaved",
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "... T {dim}"]:
    """The same vectors for any positions, in any order."""
    if layout not in ("interleaved", "halves"):
        raise ValueError(f'layout is {layout!r}, but must be "interleaved" or "halves"')
    exact = torch.float32 if positions.device.type == "mps" else torch.float64  # MPS has no float64
    pair = torch.arange(dim, dtype=exact, device=positions.device) // 2
    angles = positions.to(exact)[..., None] * base ** (-2 * pair / max(dim, 1))
    sines, cosines = angles[..., 0::2].sin(), angles[..., 1::2].cos()
    out = torch.cat((sines, cosines), -1)
    if layout == "interleaved":
        out = angles.clone()
        out[..., 0::2], out[..., 1::2] = sines, cosines
    return out.to(dtype or torch.get_default_dtype())


def alibi_bias(heads: int, queries: int, keys: int) -> Float[Tensor, "{heads} {queries} {keys}"]:
    """−slope_h · |distance|, added to the scores; the last query stands at the last key.

    >>> alibi_bias(2, 3, 3)[0]
    tensor([[-0.0000, -0.0625, -0.1250],
            [-0.0625, -0.0000, -0.0625],
            [-0.1250, -0.0625, -0.0000]])
    """
    if heads < 1:
        raise ValueError(f"alibi_bias needs at least one head, not {heads}")
    i = torch.arange(keys - queries, keys, dtype=torch.float64)[:, None]
    j = torch.arange(keys, dtype=torch.float64)
    slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float64)[:, None, None]
    return (-slopes * (i - j).abs()).to(torch.get_default_dtype())


def relative_bias(
    distance: Int[Tensor, "... T S"], table: Float[Tensor, "H N"], starts: Int[Tensor, "M"], mirrored: bool
) -> Float[Tensor, "... H T S"]:
    """table[h, bucket(j − i)], added to the scores of head h: T5's learned positions.

    >>> i, j = torch.arange(3)[:, None], torch.arange(3)
    >>> relative_bias(j - i, torch.arange(4.0)[None], starts=torch.tensor([0, 2]), mirrored=True)[0]
    tensor([[0., 2., 3.],
            [0., 0., 2.],
            [1., 0., 0.]])
    """
    apart = distance.abs() if mirrored else (-distance).clamp(min=0)
    buckets = torch.bucketize(apart.contiguous(), starts, right=True) - 1 + (distance > 0) * mirrored * len(starts)
    return table.t()[buckets].movedim(-1, -3)


def causal_mask(queries: int, keys: int | None = None) -> Bool[Tensor, "{queries} S"]:
    """j ≤ i + S − T: a query may read its own position and the past; the last query sees the last key.

    >>> causal_mask(3)
    tensor([[ True, False, False],
            [ True,  True, False],
            [ True,  True,  True]])
    """
    keys = queries if keys is None else keys
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
