"""Scaled dot-product attention: written out, and through the best fused kernel the machine has."""

from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Real
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead.functional.derivatives import plain_backward, plain_needed
from clearhead.functional.positions import causal_mask
from clearhead.functional.softmax import narrow, softmax, widen_alike
from clearhead.reference.attention import Shape, check_attention, default_scale, lead_shape

Mask = Bool[Tensor, "... #T #S"] | Bool[Tensor, "#S"]
Bias = Real[Tensor, "... #T #S"] | Real[Tensor, "#S"]
Sinks = Float[Tensor, "... #T 1"]
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
    softcap: float | None = None,
    sinks: Sinks | None = None,
    dropout: float = 0.0,
    rng: torch.Generator | None = None,
    return_weights: bool = False,
) -> MixedMaybeWeights:
    """softmax(scale · q kᵀ + bias) v, with scale = 1/√K by default, in plain tensor operations.

    mask            True where a query may read a key. A query that may read nothing gets zeros.
    causal          hide the future; the last query reads the last key
    bias            added to the scores, such as ALiBi
    softcap         scores become softcap · tanh(scores/softcap) before the bias (Gemma 2)
    sinks           one more score in each row, of a key without a value: reading nothing (gpt-oss)
    dropout         share of weights set to 0; `rng`: its generator (default: torch's global one)
    return_weights  also return the weights, before dropout

    Leading dimensions broadcast: for grouped-query attention pass q [B,G,R,T,K] and k [B,G,1,S,K].

    >>> x = torch.randn(2, 5, 8)
    >>> out, weights = attention(x, x, x, causal=True, return_weights=True)
    >>> out.shape, weights[0, 0]
    (torch.Size([2, 5, 8]), tensor([1., 0., 0., 0., 0.]))
    """
    check_attention(q, k, v, mask=mask, bias=bias, softcap=softcap)
    wide_q, wide_k, wide_v = widen_alike(q, k, v)
    weights = attention_weights(attention_scores(wide_q, wide_k, bias, scale, softcap), mask, causal, sinks)
    kept, wide_v = widen_alike(drop(weights, dropout, rng), wide_v)
    mixed = narrow(kept @ wide_v, q, k, v)
    return (mixed, narrow(weights, q, k, v)) if return_weights else mixed


def attention_scores(
    q: Real[Tensor, "... T K"],
    k: Real[Tensor, "... S K"],
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "... T S"]:
    """scale · q kᵀ, capped, + bias, in float32 or wider."""
    wide_q, wide_k = widen_alike(q, k)
    scores = wide_q @ wide_k.mT * default_scale(q, scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores if bias is None else scores + bias


def attention_weights(
    scores: Float[Tensor, "... T S"], mask: Mask | None = None, causal: bool = False, sinks: Sinks | None = None
) -> Float[Tensor, "... T S"]:
    """softmax over the keys that may be read: each row sums to 1, to less with sinks, or to 0 if it may read none."""
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf)
    if causal:
        scores = torch.where(causal_mask(*scores.shape[-2:]).to(scores.device), scores, -torch.inf)
    if sinks is None:
        return softmax(scores)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return softmax(torch.cat((scores, column), -1))[..., :-1]


def drop(weights: Float[Tensor, "..."], dropout: float, rng: torch.Generator | None = None) -> Float[Tensor, "..."]:
    """Inverted dropout: zero with probability `dropout`, the rest scaled up so that the mean stays."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}, but must be a probability in [0, 1)")
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
    bias: Bias | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 128,
) -> Mixed:
    """`attention` in O(T + S) extra memory, by torch's fused kernel.

    With a mask, a bias, a softcap, or causal with T ≠ S, `block` queries at a time are computed, so that only
    block × S scores ever exist.

    >>> q, k, v = torch.ones((3, 4, 2))
    >>> flash_attention(q, k, v, causal=True).shape
    torch.Size([4, 2])
    """
    check_attention(q, k, v, mask=mask, bias=bias, softcap=softcap, block=block)
    given = q, k, v
    if plain_needed(*given, bias):
        return attention(q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, softcap=softcap)
    lead = lead_shape(q, k, v, mask, bias)
    (T, K), (S, U) = q.shape[-2:], v.shape[-2:]
    scale = default_scale(q, scale)
    if len({x.dtype for x in given}) > 1 or not q.is_floating_point():  # float16 is summed in float32 by the kernel
        q, k, v = widen_alike(q, k, v)
    # The fused kernel wants four dimensions and one width; with anything else torch makes all T × S weights.
    q, k, v = (_to_4d(F.pad(x, (0, max(K, U) - x.shape[-1])), lead) for x in (q, k, v))
    if 0 in (*lead, T, S):
        mixed = 0 * (q + k.sum() + v.sum())  # without keys the kernel leaves its output unwritten; gradients are zeros
    elif mask is None and bias is None and softcap is None and (not causal or T in (1, S)):
        mixed = fused_sdpa(q, k, v, None, causal and T > 1, scale)  # causal aligns the first query with the first key
    else:
        mask = torch.ones(1, 1, dtype=torch.bool, device=q.device) if mask is None else mask
        extra = None if bias is None else _mask_to_4d(bias, lead)
        mixed = _by_rows(q, k, v, _mask_to_4d(mask, lead), extra, causal, scale, softcap, block)
    return narrow(mixed[..., :U].reshape(*lead, T, U), *given)


def _by_rows(
    q: Float[Tensor, "B H T W"],
    k: Float[Tensor, "B H S W"],
    v: Float[Tensor, "B H S W"],
    mask: Bool[Tensor, "#B #H #T #S"],
    bias: Float[Tensor, "#B #H #T #S"] | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    block: int,
) -> Float[Tensor, "B H T W"]:
    """`block` queries at a time. The backward recomputes each block, so that no mask outlives its block."""
    T, S = q.shape[-2], k.shape[-2]
    mask = mask.expand(*mask.shape[:2], T, S)
    bias = None if bias is None else bias.expand(*bias.shape[:2], T, S)

    def rows(start: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        stop = min(start + block, T)
        reach = max(0, stop + S - T) if causal else S
        q, k, v = q[..., start:stop, :], k[..., :reach, :], v[..., :reach, :]
        if reach == 0:
            return torch.zeros_like(q)
        allowed = mask[..., start:stop, :reach]
        added = None if bias is None else bias[..., start:stop, :reach]
        if causal:
            allowed = allowed & causal_mask(stop - start, reach).to(q.device)
        if softcap is not None:
            return attention(q, k, v, mask=allowed, bias=added, scale=scale, softcap=softcap)
        table = allowed if added is None else torch.where(allowed, added.to(q.dtype), -torch.inf)
        return fused_sdpa(q, k, v, table, False, scale)

    # Last block first: it reaches furthest, so what the other blocks allocate fits into what it freed.
    starts = range(0, T, block)[::-1]
    mixed = [checkpoint(rows, start, q, k, v, bias, use_reentrant=False, preserve_rng_state=False) for start in starts]
    return torch.cat(mixed[::-1], -2)


def fused_sdpa(
    q: Float[Tensor, "B H T W"],
    k: Float[Tensor, "B H S W"],
    v: Float[Tensor, "B H S W"],
    mask: Bool[Tensor, "#B #H T S"] | Float[Tensor, "#B #H T S"] | None,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T W"]:
    """`F.scaled_dot_product_attention`, with second derivatives, torch.func, and NaN where NaN belongs.

    torch's fused kernels have no second derivative: a gradient of a gradient raises. So the kernel's graph is kept
    aside, and in a backward with `create_graph=True` the plain formula takes its place. On CPUs the kernel returns
    zeros for a row of NaN scores (pytorch/pytorch#141128), so NaN in q or k takes the plain formula too.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and (
        plain_needed(q, k, v, mask) or (q.device.type == "cpu" and bool((q.sum() + k.sum()).isnan()))
    ):
        allowed, bias = split_mask(mask)
        return attention(q, k, v, mask=allowed, bias=bias, causal=causal, scale=scale, dropout=dropout)
    if causal and scale <= 0:  # the kernel multiplies its −∞ by the scale: 0·(−∞) is NaN, and −1·(−∞) is not masked
        q, scale = q * scale, 1.0
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, mask))
    if not learns or dropout or compiling:  # with dropout, torch uses plain operations already
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale)
    return FusedSDPA.apply(q, k, v, mask, causal, scale)


def split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A mask that is boolean, and one that is added to the scores: what torch passes in one argument."""
    return (mask, None) if mask is not None and mask.dtype == torch.bool else (None, mask)


class FusedSDPA(torch.autograd.Function):
    """The first backward is the kernel's own; the second is that of plain attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.causal, ctx.scale = causal, scale
        with torch.enable_grad():
            own_q, own_k, own_v = (x.detach().requires_grad_(x.requires_grad) for x in (q, k, v))
            own_mask = None if mask is None else mask.detach().requires_grad_(mask.requires_grad)
            ctx.out = F.scaled_dot_product_attention(own_q, own_k, own_v, own_mask, 0.0, causal, scale=scale)
        # a mask that is kept here would outlive its block: a checkpoint frees only what a graph saves
        ctx.own = [x if x is not None and x.requires_grad else None for x in (own_q, own_k, own_v, own_mask)]
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():

            def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
                allowed, bias = split_mask(mask)
                return attention(q, k, v, mask=allowed, bias=bias, causal=ctx.causal, scale=ctx.scale)

            return *plain_backward(plain, ctx.saved_tensors, d_out), None, None
        wanted = [x for x in ctx.own if x is not None]
        found = iter(torch.autograd.grad(ctx.out, wanted, d_out, retain_graph=True))
        gradients = [None if x is None else next(found) for x in ctx.own]
        return *gradients, None, None


def _to_4d(x: Float[Tensor, "..."], lead: Shape) -> Float[Tensor, "B H M W"]:
    """Merge all leading dimensions but the last. Repeated K and V of grouped queries stay views."""
    lead = (1, *lead)
    return x.expand(*lead, *x.shape[-2:]).reshape(prod(lead[:-1]), lead[-1], *x.shape[-2:])


def _mask_to_4d(mask: Mask | Bias, lead: Shape) -> Real[Tensor, "B H M W"] | Bool[Tensor, "B H M W"]:
    """Merge the leading dimensions of a mask or bias. Axes that broadcast stay of size 1 where that is possible."""
    lead = (1, *lead)
    mask = mask.reshape((1,) * (len(lead) + 2 - mask.ndim) + mask.shape)
    outer = lead[:-1] if prod(mask.shape[:-3]) != 1 else (1,) * len(lead[:-1])
    return mask.expand(*outer, *mask.shape[-3:]).reshape(prod(outer), *mask.shape[-3:])
