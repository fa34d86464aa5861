"""The layers of `clearhead.nn` for use in your own torch code: sizes and options in, a module of `x` out.

Each is the module of a config, with the same weights under the same names; only the constructor and `forward` differ.
A model built from a config passes a `Context` through its parts. Here the context is made from what you give: nothing
but x, or which tokens are padding (`readable`), or which document each belongs to (`documents`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch import nn as torch_nn

from clearhead.configs import (
    AttentionConfig,
    Causal,
    DotConfig,
    EluConfig,
    FavorConfig,
    FeedForwardConfig,
    Full,
    GatedFeedForwardConfig,
    LatentAttentionConfig,
    LayerNormConfig,
    LinearAttentionConfig,
    LSTMConfig,
    MambaConfig,
    MoEConfig,
    RMSNormConfig,
    RotaryConfig,
    ShortConvConfig,
)
from clearhead.configs.ffn import Activation
from clearhead.configs.stack import PLACES
from clearhead.functional.attention import attention, flash_attention

from . import attention as attention_part
from . import ffn as ffn_part
from . import latent as latent_part
from . import linear_attention as linear_attention_part
from . import lstm as lstm_part
from . import mamba as mamba_part
from . import moe as moe_part
from . import norm as norm_part
from . import shortconv as shortconv_part
from . import stack as stack_part
from .attention import merge_heads
from .cache import count_positions
from .context import Context
from .tap import Taps


class Layer(torch_nn.Module):
    """What the layers below share: a context made from the tensors at hand."""

    def __init__(self, config: Any, dim: int) -> None:
        super().__init__(config, dim)
        self.width = dim

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        readable: Bool[Tensor, "B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
        taps: Taps | None = None,
    ) -> Float[Tensor, "B T D"]:
        """The layer's output.

        readable   False where a token is padding
        documents  a number for each token; tokens of different documents do not read each other
        taps       intermediate values to read or replace
        """
        return super().forward(check_input(x, self.width), layer_context(x, readable, documents, taps))


class MultiHeadAttention(attention_part.MultiHeadAttention):
    """Multi-head attention; with `kv_heads` < `heads`, grouped-query attention.

    >>> layer = MultiHeadAttention(64, heads=4, causal=True)
    >>> x = torch.randn(2, 9, 64)
    >>> layer(x).shape
    torch.Size([2, 9, 64])
    >>> layer(x, return_weights=True)[1].shape
    torch.Size([2, 4, 9, 9])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        rotary: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        """dim: width of x. kv_heads: key/value heads (default: heads). rotary: rotary positions on q and k."""
        config = AttentionConfig(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mask=Causal() if causal else Full(),
            rotary=RotaryConfig() if rotary else None,
            qkv_bias=bias,
            out_bias=bias,
            dropout=dropout,
        )
        super().__init__(config, dim)
        self.width = dim

    def forward(  # type: ignore[override]
        self,
        x: Float[Tensor, "B T D"],
        *,
        source: Float[Tensor, "B S D"] | None = None,
        mask: Bool[Tensor, "*mask #T #S"] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """The output [B, T, D], and with `return_weights` also the weights [B, heads, T, S].

        source  what keys and values are computed from (cross-attention); default: x itself
        mask    True where a query may read a key: [T, S], [B, T, S] or [B, heads, T, S]; sizes of 1 broadcast.
                A query that may read nothing gets zeros.
        """
        check_input(x, self.width)
        if source is not None:
            check_input(source, self.width)
        context = layer_context(x, None, None, None)
        q, k, v = self.project(
            x, context if source is None else Context(context.positions, context.positions, source=source), None
        )
        q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary is not None:
            ((q, _),) = self.rotary.queries(q, self.mask, context)
            keys = context if source is None else layer_context(source, None, None, None)
            k = self.rotary.keys(k, keys)
        mixed, weights = self.attend(q, k, v, mask, return_weights)
        out = self.out(merge_heads(mixed))
        return (out, weights) if return_weights else out

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, return_weights: bool
    ) -> tuple[Float[Tensor, "B H T U"], Float[Tensor, "B H T S"] | None]:
        """Attention of all heads; the query heads of a group share one key head."""
        groups = (self.groups, self.heads // self.groups)
        q, k, v = q.unflatten(1, groups), k.unsqueeze(2), v.unsqueeze(2)  # B G R T K, B G 1 S K
        if mask is not None:
            if mask.dtype != torch.bool:
                raise TypeError(f"mask is {mask.dtype}, but must be boolean, True where a query may read a key")
            if mask.dim() == 3:
                mask = mask[:, None, None]
            elif mask.dim() == 4:
                mask = mask.unflatten(1, groups) if mask.shape[1] > 1 else mask[:, :, None]
        options: dict[str, Any] = {"mask": mask, "causal": self.mask.causal}
        dropout = self.dropout if self.training else 0.0
        if not (return_weights or dropout):
            return flash_attention(q, k, v, **options).flatten(1, 2), None
        mixed, weights = attention(q, k, v, dropout=dropout, return_weights=True, **options)
        return mixed.flatten(1, 2), weights.flatten(1, 2)


class LatentAttention(Layer, latent_part.LatentAttention):  # type: ignore[misc]  # forward takes tensors, not a context
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads from one small latent per position.

    >>> LatentAttention(64, heads=4)(torch.randn(2, 9, 64)).shape
    torch.Size([2, 9, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        latent_dim: int | None = None,
        plain_dim: int | None = None,
        rope_dim: int | None = None,
        value_dim: int | None = None,
        causal: bool = True,
        dropout: float = 0.0,
    ) -> None:
        """latent_dim: numbers kept per position. plain_dim, rope_dim: parts of a key without and with position.

        The defaults are the paper's proportions (DeepSeek-V2, section 2.1.3): plain_dim = dim / heads,
        latent_dim = 4 plain_dim, rope_dim = plain_dim / 2.
        """
        plain_dim = plain_dim or dim // heads
        config = LatentAttentionConfig(
            heads=heads,
            latent_dim=latent_dim or 4 * plain_dim,
            plain_dim=plain_dim,
            rope_dim=rope_dim or 2 * max(plain_dim // 4, 1),
            value_dim=value_dim or plain_dim,
            mask=Causal() if causal else Full(),
            dropout=dropout,
        )
        super().__init__(config, dim)


class LinearAttention(Layer, linear_attention_part.LinearAttention):  # type: ignore[misc]  # forward takes tensors, not a context
    """Linear attention: O(n) in the length. kernel "elu" (default), "dot", or "favor", a Performer.

    >>> LinearAttention(64, heads=4, causal=True)(torch.randn(2, 9, 64)).shape
    torch.Size([2, 9, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = False,
        kernel: Literal["elu", "dot", "favor"] = "elu",
        features: int = 64,
        bias: bool = False,
    ) -> None:
        """features: random features of "favor"; more are more exact."""
        kernels: dict[str, EluConfig | DotConfig | FavorConfig] = {"elu": EluConfig(), "dot": DotConfig()}
        kernels["favor"] = FavorConfig(features=features)
        if kernel not in kernels:
            raise ValueError(f'kernel is {kernel!r}, but must be "elu", "dot" or "favor"')
        mask = Causal() if causal else Full()
        config = LinearAttentionConfig(heads=heads, mask=mask, kernel=kernels[kernel], qkv_bias=bias, out_bias=bias)
        super().__init__(config, dim)


class Mamba(Layer, mamba_part.Mamba):  # type: ignore[misc]  # forward takes tensors, not a context
    """Mamba, a selective state-space model: O(n), causal, and of constant state in decoding.

    >>> Mamba(64)(torch.randn(2, 9, 64)).shape
    torch.Size([2, 9, 64])
    """

    def __init__(self, dim: int, *, inner: int | None = None, state_dim: int = 16, conv: int = 4) -> None:
        """inner: channels (default: 2·dim). state_dim: numbers that each remembers. conv: tokens it convolves."""
        super().__init__(MambaConfig(inner=inner, state_dim=state_dim, conv=conv), dim)
        self.init_weights()
        if self.filter_bias is not None:
            torch_nn.init.zeros_(self.filter_bias)


class LSTM(Layer, lstm_part.LSTM):  # type: ignore[misc]  # forward takes tensors, not a context
    """One LSTM layer with a projection back to width `dim`.

    >>> LSTM(64, hidden=32)(torch.randn(2, 9, 64)).shape
    torch.Size([2, 9, 64])
    """

    def __init__(self, dim: int, *, hidden: int | None = None) -> None:
        """hidden: width of h and c (default: dim)."""
        super().__init__(LSTMConfig(hidden=hidden), dim)
        self.init_weights()


class ShortConv(Layer, shortconv_part.ShortConv):  # type: ignore[misc]  # forward takes tensors, not a context
    """A causal convolution over a few tokens between two gates.

    >>> ShortConv(64)(torch.randn(2, 9, 64)).shape
    torch.Size([2, 9, 64])
    """

    def __init__(self, dim: int, *, conv: int = 3) -> None:
        """conv: tokens that the convolution reads, the newest included."""
        super().__init__(ShortConvConfig(conv=conv), dim)
        self.init_weights()


class LayerNorm(norm_part.LayerNorm):
    """γ·(x − μ)/√(σ² + ε) + β over the last axis, in float32 or wider.

    >>> LayerNorm(2)(torch.tensor([1.0, 3.0])).round().tolist()
    [-1.0, 1.0]
    """

    def __init__(self, dim: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(LayerNormConfig(eps=eps, bias=bias), dim)


class RMSNorm(norm_part.RMSNorm):
    """γ·x/√(mean(x²) + ε) over the last axis, in float32 or wider.

    >>> RMSNorm(2)(torch.tensor([3.0, 3.0])).round().tolist()
    [1.0, 1.0]
    """

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(RMSNormConfig(eps=eps), dim)


class FeedForward(Layer, ffn_part.FeedForward):  # type: ignore[misc]  # forward takes tensors, not a context
    """down(activation(up(x))).

    >>> FeedForward(64, activation="relu")(torch.randn(2, 9, 64)).shape
    torch.Size([2, 9, 64])
    """

    def __init__(
        self, dim: int, hidden: int | None = None, *, activation: Activation = "gelu", bias: bool = True
    ) -> None:
        """hidden: inner width (default: 4·dim)."""
        super().__init__(FeedForwardConfig(hidden=hidden, activation=activation, bias=bias), dim)


class GatedFeedForward(Layer, ffn_part.GatedFeedForward):  # type: ignore[misc]  # forward takes tensors, not a context
    """down(activation(gate(x)) ⊙ up(x)); with silu it is SwiGLU, with gelu GEGLU.

    >>> GatedFeedForward(64, activation="gelu")(torch.randn(2, 9, 64)).shape
    torch.Size([2, 9, 64])
    """

    def __init__(
        self, dim: int, hidden: int | None = None, *, activation: Activation = "silu", bias: bool = False
    ) -> None:
        """hidden: inner width (default: 8/3·dim)."""
        super().__init__(GatedFeedForwardConfig(hidden=hidden, activation=activation, bias=bias), dim)


class SwiGLU(GatedFeedForward):
    """down(silu(gate(x)) ⊙ up(x)), the feed-forward layer of LLaMA.

    >>> SwiGLU(64, hidden=172)(torch.randn(2, 9, 64)).shape
    torch.Size([2, 9, 64])
    """

    def __init__(self, dim: int, hidden: int | None = None, *, bias: bool = False) -> None:
        super().__init__(dim, hidden, activation="silu", bias=bias)


class MoE(Layer, moe_part.MoE):  # type: ignore[misc]  # forward takes tensors, not a context
    """A mixture of SwiGLU experts: each token passes the `active` best of `experts`.

    >>> MoE(64, experts=8, active=2)(torch.randn(2, 9, 64)).shape
    torch.Size([2, 9, 64])
    """

    def __init__(self, dim: int, *, experts: int, active: int, hidden: int | None = None) -> None:
        """hidden: inner width of each expert (default: 8/3·dim)."""
        super().__init__(MoEConfig(expert=GatedFeedForwardConfig(hidden=hidden), experts=experts, active=active), dim)
        for name, weight in self.experts.named_parameters():
            if name.endswith("weight"):
                torch_nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)


class Block(torch_nn.Module):
    """A Transformer block: x + mixer(norm(x)), then x + ffn(norm(x)); "post" puts the norm after the sum.

    >>> x = torch.randn(2, 9, 64)
    >>> Block(64, heads=4, causal=True)(x).shape
    torch.Size([2, 9, 64])
    >>> Block(64, mixer=Mamba(64), ffn=SwiGLU(64))(x).shape
    torch.Size([2, 9, 64])
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int | None = None,
        causal: bool = False,
        mixer: torch_nn.Module | None = None,
        ffn: torch_nn.Module | None = None,
        norm: Literal["layer", "rms"] = "rms",
        placement: Literal["pre", "post", "sandwich"] = "pre",
        dropout: float = 0.0,
    ) -> None:
        """Give `heads` for attention, or any `mixer` that maps [B, T, D] to [B, T, D]; ffn: default SwiGLU."""
        super().__init__()
        if (heads is None) == (mixer is None):
            raise ValueError("a Block takes either heads= (attention) or mixer= (any layer), not both and not neither")
        for name, part in (("mixer", mixer), ("ffn", ffn)):
            if part is not None and not callable(part):
                raise TypeError(f"{name} is {part!r}, but must be a layer such as nn.Mamba({dim}) or nn.SwiGLU({dim})")
        if norm not in ("layer", "rms"):
            raise ValueError(f'norm is {norm!r}, but must be "layer" or "rms"')
        config = LayerNormConfig() if norm == "layer" else RMSNormConfig()
        self.width = dim
        self.mixer = MultiHeadAttention(dim, heads, causal=causal) if mixer is None and heads is not None else mixer
        self.ffn = SwiGLU(dim) if ffn is None else ffn
        self.mixer_residual = stack_part.Residual(config, PLACES[placement], dim, dropout)
        self.ffn_residual = stack_part.Residual(config, PLACES[placement], dim, dropout)

    def forward(self, x: Float[Tensor, "B T D"], **options: Any) -> Float[Tensor, "B T D"]:
        """The output [B, T, D]; `options`, such as mask=, go to the mixer."""
        context, mixer = layer_context(check_input(x, self.width), None, None, None), self.mixer
        assert mixer is not None
        x = self.mixer_residual(x, lambda h: mixer(h, **options), context)
        return self.ffn_residual(x, self.ffn, context)


def layer_context(
    x: Float[Tensor, "B T D"],
    readable: Bool[Tensor, "B T"] | None,
    documents: Int[Tensor, "B T"] | None,
    taps: Taps | None,
) -> Context:
    """The context of one layer on its own: positions 0, 1, 2 … of the real tokens."""
    positions = count_positions(readable, x.shape[0], x.shape[1], x.device)
    return Context(positions, positions, readable, documents, aligned=readable is None, taps=taps)


def check_input(x: Tensor, dim: int) -> Float[Tensor, "B T D"]:
    """Raise one clear sentence if x is not a batch of sequences of vectors of width `dim`."""
    if not isinstance(x, Tensor) or x.dim() != 3 or not x.is_floating_point() or x.shape[2] != dim:
        given = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(f"a layer of dim={dim} takes a float tensor of shape [batch, length, dim], not {given}")
    return x
