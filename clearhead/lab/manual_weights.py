"""Helpers for models with hand-set weights, built from the package's own embeddings, blocks and heads."""

from __future__ import annotations

import torch

from clearhead.configs import RMSNormConfig, SequenceModelConfig, StackConfig
from clearhead.models.model import SequenceModel, build
from clearhead.nn.norm import RMSNorm

IDENTITY_NORM, GAIN = RMSNormConfig(eps=2.0**100), 2.0**50
"""A norm with a huge ε acts as the identity: γ·x/√(mean(x²) + 2¹⁰⁰) with γ = 2⁵⁰ is exactly x while mean(x²) < 2⁴⁷."""


class Fields:
    """Named slices of the residual stream: `Fields(token=4, copied=8)["copied"]` is a slice."""

    def __init__(self, **widths: int) -> None:
        self.places: dict[str, slice] = {}
        self.dim = 0
        for name, width in widths.items():
            self.places[name] = slice(self.dim, self.dim + width)
            self.dim += width

    def __getitem__(self, name: str) -> slice:
        return self.places[name]

    def at(self, name: str, i: int = 0) -> int:
        """The index of number `i` of a field."""
        return self.places[name].start + i


def zero_model(config: SequenceModelConfig, dtype: torch.dtype) -> SequenceModel:
    """A model with zero weights and norms that act as the identity."""
    model = build(config)
    assert isinstance(model, SequenceModel), "a sequence config builds a sequence model"
    zero_weights(model)
    return model.to(dtype).eval()


@torch.no_grad()
def zero_weights(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.zero_()
    for module in model.modules():
        if isinstance(module, RMSNorm):
            assert module.eps == IDENTITY_NORM.eps, "a model with hand-set weights uses identity norms"
            module.weight.fill_(GAIN)


def stack_of(dim: int, *blocks: object) -> StackConfig:
    """A stack of the given blocks, in order."""
    return StackConfig(dim=dim, first=blocks[:-1], pattern=blocks[-1:], repeats=1)  # type: ignore[arg-type]
