"""LayerNorm and RMSNorm over the last axis. Statistics are computed in float32 whatever the input's precision.

A norm works on each position alone: x and the result have the same shape, any leading dimensions, and D last. The gain
has D numbers. Where norms stand in a block is decided by `Residual` in `stack.py`.

    LayerNorm        γ ∘ (x − μ)/√(σ² + ε) + β       GPT-2, BERT
    RMSNorm          γ ∘ x/√(mean(x²) + ε)           LLaMA, Mistral, Qwen
    OffsetRMSNorm    (1 + γ) ∘ x/√(mean(x²) + ε)     Gemma
    ProjectionNorm   one of these over all heads     OLMo 2, for queries and keys
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead import functional
from clearhead.configs import (
    HeadwiseNormConfig,
    LayerNormConfig,
    OffsetRMSNormConfig,
    PlainLayerNormConfig,
    PlainRMSNormConfig,
    ProjectionNormConfig,
    RMSNormConfig,
)
from clearhead.functional.softmax import widen

from .build import build_part, builds


@builds(LayerNormConfig)
class LayerNorm(nn.Module):
    """γ·(x − μ)/√(σ² + ε) + β (GPT-2, BERT)."""

    def __init__(self, config: LayerNormConfig, dim: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if config.bias else None

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        """The normalised x, in the dtype of x."""
        return functional.layer_norm(x, self.weight, self.bias, self.eps)


@builds(RMSNormConfig)
class RMSNorm(nn.Module):
    """γ·x/√(mean(x²) + ε): no mean is subtracted, no bias added (LLaMA)."""

    def __init__(self, config: RMSNormConfig, dim: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        """The normalised x, in the dtype of x. The backward pass is one fused function."""
        return functional.rms_norm(x, self.weight, self.eps)


@builds(OffsetRMSNormConfig)
class OffsetRMSNorm(nn.Module):
    """(1 + γ)·x/√(mean(x²) + ε): weights start at 0, and weight decay pulls the gain to 1 (Gemma)."""

    def __init__(self, config: OffsetRMSNormConfig, dim: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        """The normalised x. 1 is added in float32: in bfloat16 a gain of 1.003 would become 1."""
        return functional.rms_norm(x, 1 + widen(self.weight), self.eps)


@builds(ProjectionNormConfig)
class ProjectionNorm(nn.Module):
    """A norm over all heads together; `dim` is their joint width.

    Per-head norms see x as B H T K and normalise K numbers. This one joins the heads first, B T H·K, so heads keep
    their relative sizes.
    """

    def __init__(self, config: ProjectionNormConfig, dim: int) -> None:
        super().__init__()
        self.norm = build_part(config.norm, dim)

    def forward(self, x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
        """B H T K -> B T H·K, normalised over all H·K numbers, and back."""
        joint = self.norm(x.transpose(1, 2).flatten(2))
        return joint.unflatten(-1, (-1, x.shape[-1])).transpose(1, 2)


@builds(PlainLayerNormConfig)
class PlainLayerNorm(nn.Module):
    """(x − μ)/√(σ² + ε), without weights (OLMo)."""

    def __init__(self, config: PlainLayerNormConfig, dim: int) -> None:
        super().__init__()
        self.eps = config.eps

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return functional.layer_norm(x, x.new_ones(x.shape[-1]), None, self.eps)


@builds(PlainRMSNormConfig)
class PlainRMSNorm(nn.Module):
    """x/√(mean(x²) + ε), without weights (Llama 4, of queries and keys)."""

    def __init__(self, config: PlainRMSNormConfig, dim: int) -> None:
        super().__init__()
        self.eps = config.eps

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return functional.rms_norm(x, x.new_ones(x.shape[-1]), self.eps)


@builds(HeadwiseNormConfig)
class HeadwiseNorm(nn.Module):
    """A LayerNorm of each head, with gains of its own for every head (Cohere, StableLM)."""

    def __init__(self, config: HeadwiseNormConfig, dim: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.ones(dim // config.width, config.width))

    def forward(self, x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
        ones = self.weight.new_ones(x.shape[-1])
        return functional.layer_norm(x, ones, None, self.eps) * self.weight[:, None]
