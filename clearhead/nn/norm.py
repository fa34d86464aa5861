"""LayerNorm and RMSNorm over the last axis. Statistics are computed in float32 whatever the input's precision."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead import functional
from clearhead.configs import (
    HeadwiseNormConfig,
    LayerNormConfig,
    OffsetRMSNormConfig,
    PlainLayerNormConfig,
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
        return functional.layer_norm(x, self.weight, self.bias, self.eps)


@builds(RMSNormConfig)
class RMSNorm(nn.Module):
    """γ·x/√(mean(x²) + ε): no mean is subtracted, no bias added (LLaMA)."""

    def __init__(self, config: RMSNormConfig, dim: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return functional.rms_norm(x, self.weight, self.eps)


@builds(OffsetRMSNormConfig)
class OffsetRMSNorm(nn.Module):
    """(1 + γ)·x/√(mean(x²) + ε): weights start at 0, and weight decay pulls the gain to 1 (Gemma)."""

    def __init__(self, config: OffsetRMSNormConfig, dim: int) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return functional.rms_norm(x, 1 + widen(self.weight), self.eps)


@builds(ProjectionNormConfig)
class ProjectionNorm(nn.Module):
    """A norm over all heads together; `dim` is their joint width."""

    def __init__(self, config: ProjectionNormConfig, dim: int) -> None:
        super().__init__()
        self.norm = build_part(config.norm, dim)

    def forward(self, x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
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
