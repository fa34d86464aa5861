"""Weights set by hand, in models that are like any other: real embeddings, blocks and heads of this package."""

from __future__ import annotations

import torch

from clearhead.configs import RMSNormConfig, SequenceModelConfig, StackConfig
from clearhead.models.assemble import SequenceModel, build
from clearhead.nn.norm import RMSNorm

SILENT, GAIN = RMSNormConfig(eps=2.0**100), 2.0**50
"""A norm whose ε drowns what it reads: γ·x/√(mean(x²) + 2¹⁰⁰) with γ = 2⁵⁰ is x to the bit while mean(x²) < 2⁴⁷."""


class Fields:
    """Names for parts of the residual stream: `Fields(token=4, copied=8)["copied"]` is a slice."""

    def __init__(self, **widths: int) -> None:
        self.places: dict[str, slice] = {}
        self.dim = 0
        for name, width in widths.items():
            self.places[name] = slice(self.dim, self.dim + width)
            self.dim += width

    def __getitem__(self, name: str) -> slice:
        return self.places[name]

    def at(self, name: str, i: int = 0) -> int:
        """The place of one number."""
        return self.places[name].start + i


def blank(config: SequenceModelConfig, dtype: torch.dtype) -> SequenceModel:
    """A model all of whose weights are 0, and whose norms do nothing."""
    model = build(config)
    assert isinstance(model, SequenceModel), "a sequence config builds a sequence model"
    clear(model)
    return model.to(dtype).eval()


@torch.no_grad()
def clear(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.zero_()
    for module in model.modules():
        if isinstance(module, RMSNorm):
            assert module.eps == SILENT.eps, "a model made by hand has silent norms"
            module.weight.fill_(GAIN)


def silent_stack(dim: int, *blocks: object) -> StackConfig:
    """A stack of these blocks, one after the other."""
    return StackConfig(dim=dim, first=blocks[:-1], pattern=blocks[-1:], repeats=1)  # type: ignore[arg-type]
