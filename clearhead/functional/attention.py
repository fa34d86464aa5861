"""Scaled dot-product attention: written out, and through the best fused kernel the machine has."""

from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Real
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead.functional.positions import causal_mask
from clearhead.functional.softmax import narrow, softmax, widen_alike
from clearhead.reference.attention import Shape, check_attention, default_scale, lead_shape

Mask = Bool[Tensor, "... #T #S"] | Bool[Tensor, "#S"]
Bias = Real[Tensor, "... #T #S"] | Real[Tensor, "#S"]
Mixed = Float[Tensor, "... T U"]
if TYPE_CHECKING:
    MixedMaybeWeights = Any  # one tensor or two, by `return_weights`
else:
    MixedMaybeWeights = Mixed | tuple[Mixed, Float[Tensor, "... T S"]]


def attention(
    q: Real[Tensor, "... T K"],
    k: Real[Tensor, "... S K"],
    v: Real[Tensor, "... S U"],
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    rng: torch.Generator | None = None,
    return_weights: bool = False,
) -> MixedMaybeWeights:
    """softmax(scale · q kᵀ + bias) v, with scale = 1/√K, in plain tensor operations.

    mask is True where a query may read a key; causal hides the future, the last query seeing the last key.
    A query that may read nothing gets zeros. Leading dimensions broadcast: GQA is q [B,G,R,T,K] with k [B,G,1,S,K].
    The weights returned are those before dropout; rng None is torch's global generator.
    """
    check_attention(q, k, v, mask=mask, bias=bias)
    wide_q, wide_k, wide_v = widen_alike(q, k, v)
    weights = attention_weights(attention_scores(wide_q, wide_k, bias, scale), mask, causal)
    kept, wide_v = widen_alike(drop(weights, dropout, rng), wide_v)
    mixed = narrow(kept @ wide_v, q, k, v)
    return (mixed, narrow(weights, q, k, v)) if return_weights else mixed


def attention_scores(
    q: Real[Tensor, "... T K"], k: Real[Tensor, "... S K"], bias: Bias | None = None, scale: float | None = None
) -> Float[Tensor, "... T S"]:
    """scale · q kᵀ + bias, in float32 or wider."""
    wide_q, wide_k = widen_alike(q, k)
    scores = wide_q @ wide_k.mT * default_scale(q, scale)
    return scores if bias is None else scores + bias


def attention_weights(
    scores: Float[Tensor, "... T S"], mask: Mask | None = None, causal: bool = False
) -> Float[Tensor, "... T S"]:
    """softmax over the keys that may be read: each row sums to 1, or to 0 where nothing may."""
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf)
    if causal:
        scores = torch.where(causal_mask(*scores.shape[-2:]).to(scores.device), scores, -torch.inf)
    return softmax(scores)


def drop(weights: Float[Tensor, "..."], dropout: float, rng: torch.Generator | None = None) -> Float[Tensor, "..."]:
    """Inverted dropout: zero with probability `dropout`, the rest scaled up so that the mean stays."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is a probability in [0, 1), not {dropout}")
    if dropout == 0:
        return weights
    kept = torch.rand(weights.shape, generator=rng, device=weights.device) >= dropout
    return weights * kept / (1 - dropout)


def flash_attention(
    q: Real[Tensor, "... T K"],
    k: Real[Tensor, "... S K"],
    v: Real[Tensor, "... S U"],
    *,
    mask: Mask | None = None,
    causal: bool = False,
    scale: float | None = None,
    block: int = 128,
) -> Mixed:
    """`attention` in O(T + S) extra memory, by `F.scaled_dot_product_attention`.

    A mask, or causal with T ≠ S, goes by `block` queries at a time, so that only block × S of it is ever widened.
    """
    check_attention(q, k, v, mask=mask, block=block)
    lead = lead_shape(q, k, v, mask)
    (T, K), (S, U) = q.shape[-2:], v.shape[-2:]
    given = q, k, v
    scale = default_scale(q, scale)
    if len({x.dtype for x in given}) > 1 or not q.is_floating_point():  # float16 the kernel sums in float32 by itself
        q, k, v = widen_alike(q, k, v)
    # The fused kernel wants four dimensions and one width; with anything else torch makes the T × S pattern.
    q, k, v = (_to_4d(F.pad(x, (0, max(K, U) - x.shape[-1])), lead) for x in (q, k, v))
    if 0 in (T, S):
        mixed = attention(q, k, v)  # without keys the kernel leaves its output unwritten
    elif mask is None and (not causal or T in (1, S)):
        mixed = _whole(q, k, v, causal and T > 1, scale)
    else:
        mask = torch.ones(1, 1, dtype=torch.bool, device=q.device) if mask is None else mask
        mixed = _by_rows(q, k, v, _mask_to_4d(mask, lead), causal, scale, block)
    return narrow(mixed[..., :U].reshape(*lead, T, U), *given)


# The kernel for CPUs makes zeros of a row of NaN scores (pytorch/pytorch#141128), and NaN of a hidden NaN key. Below,
# `in_q` and `in_k` tell where q and k have a NaN, and the rows that may read one get it back.


def _whole(
    q: Float[Tensor, "B H T W"],
    k: Float[Tensor, "B H S W"],
    v: Float[Tensor, "B H S W"],
    causal: bool,
    scale: float,
) -> Float[Tensor, "B H T W"]:
    """All queries at once; causal only if T = S, because torch aligns the first query with the first key."""
    in_q, in_k = q.isnan().any(-1), k.isnan().any(-1)
    readable = in_k.cumsum(-1) > 0 if causal else in_k.any(-1, keepdim=True)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return mixed.masked_fill((in_q | readable)[..., None], torch.nan)


def _by_rows(
    q: Float[Tensor, "B H T W"],
    k: Float[Tensor, "B H S W"],
    v: Float[Tensor, "B H S W"],
    mask: Bool[Tensor, "#B #H #T #S"],
    causal: bool,
    scale: float,
    block: int,
) -> Float[Tensor, "B H T W"]:
    """`block` queries at a time. Backward, each block is computed anew, so that no mask outlives its block."""
    T, S = q.shape[-2], k.shape[-2]
    in_q, in_k = q.isnan().any(-1)[..., :, None], k.isnan().any(-1)[..., None, :]
    k = k.masked_fill(in_k.mT, 0)
    mask = mask.expand(*mask.shape[:2], T, S)

    def rows(start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stop = min(start + block, T)
        reach = max(0, stop + S - T) if causal else S
        q, k, v = q[..., start:stop, :], k[..., :reach, :], v[..., :reach, :]
        if reach == 0:
            return attention(q, k, v)
        allowed = mask[..., start:stop, :reach]
        if causal:
            allowed = allowed & causal_mask(stop - start, reach).to(q.device)
        readable = (allowed & (in_q[..., start:stop, :] | in_k[..., :reach])).any(-1, keepdim=True)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale)
        return mixed.masked_fill(readable, torch.nan)

    # Last block first: the longest reach, so that what the later blocks allocate fits into what it freed.
    starts = range(0, T, block)[::-1]
    mixed = [checkpoint(rows, start, q, k, v, use_reentrant=False, preserve_rng_state=False) for start in starts]
    return torch.cat(mixed[::-1], -2)


def _to_4d(x: Float[Tensor, "..."], lead: Shape) -> Float[Tensor, "B H M W"]:
    """All leading dimensions but the last in one: K and V of grouped queries, repeated along the last, stay views."""
    lead = (1, *lead)
    return x.expand(*lead, *x.shape[-2:]).reshape(prod(lead[:-1]), lead[-1], *x.shape[-2:])


def _mask_to_4d(mask: Mask, lead: Shape) -> Bool[Tensor, "B H M W"]:
    """Likewise, but what broadcasts stays of size 1: a mask is repeated only if leading dimensions must be merged."""
    lead = (1, *lead)
    mask = mask.reshape((1,) * (len(lead) + 2 - mask.ndim) + mask.shape)
    outer = lead[:-1] if prod(mask.shape[:-3]) != 1 else (1,) * len(lead[:-1])
    return mask.expand(*outer, *mask.shape[-3:]).reshape(prod(outer), *mask.shape[-3:])
