"""A finished model with its matrices in another precision: other parts in the same places."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import Blocks, Cache, Int4, ModelConfig, Precision
from clearhead.configs import precision as named_precision
from clearhead.kernels.accelerate import accelerate
from clearhead.nn.heads import LMHead, MaskedLMHead
from clearhead.nn.moe import StackedLinear
from clearhead.precision.matrix import Embedding, Linear, Packed, dense, pack

from .model import Model, SequenceModel, build_empty

HOLDERS = (Linear, Embedding, LMHead, MaskedLMHead, StackedLinear)
"""Modules whose `weight` is a matrix that may be packed."""


def quantize(model: Model, precision: Precision | str, *, tokens: Int[Tensor, "B T"] | None = None) -> Model:
    """The same model with its matrices stored as `precision` says, and read by compiled kernels where there are few
    tokens, as in decoding. Norms, biases and positions are in float32, and so is every sum.

    precision  one of `clearhead.configs`, or its name: "int8", "int4", "bfloat16", "float16", "float32"
    tokens     of a text like those the model will read: Int4 then rounds so that its outputs stay close

    >>> from clearhead import build
    >>> quantize(build("tiny-llama"), "int8").precision.kind()
    'Int8'
    """
    if not isinstance(model, Model):
        raise TypeError(f"quantize takes a model, not {model!r}; load it first with clearhead.load")
    if isinstance(precision, str):
        precision = named_precision(precision)
    if model.precision is not None and not isinstance(model.precision, Blocks):
        raise ValueError(f"the model is in {model.precision.kind()} already; quantise the model it was made from")
    model = dequantize(model)
    moments = input_moments(model, tokens) if isinstance(precision, Int4) and tokens is not None else {}
    made = assemble(model.config, precision, model.state_dict(), moments)
    made.origin = model.origin
    return made


def dequantize(model: Model) -> Model:
    """The same model with its matrices in float32, which can be trained, and saved for other programs.

    >>> dequantize(clearhead.quantize(clearhead.build("tiny-gpt"), "int8")).precision is None
    True
    """
    if model.precision is None:
        return model
    weights = model.state_dict()
    for path, module in model.named_modules():
        if isinstance(module, HOLDERS) and isinstance(module.weight, Packed):
            weights[f"{path}.weight"] = module.weight.dense()
    made = build_empty(model.config)
    made.load_state_dict({name: weights[name] for name in made.state_dict()}, assign=True)
    made.origin, made.family = model.origin, model.family
    return made.eval()


def assemble(
    config: ModelConfig, precision: Precision, weights: Mapping[str, Any], moments: Mapping[str, Tensor]
) -> Model:
    """A model with packed matrices. A weight may be packed already; vectors are copied in float32."""
    made = build_empty(config)
    replace_matrices(made, precision, weights, moments)
    rest = {name: dense(weights[name]).detach().float().clone() for name in made.state_dict() if name in weights}
    made.load_state_dict(rest, strict=False, assign=True)
    return accelerate(made.eval())


def replace_matrices(
    model: Model, precision: Precision, weights: Mapping[str, Any], moments: Mapping[str, Tensor]
) -> None:
    """Put a packed matrix in the place of each weight."""
    model.precision = precision
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if isinstance(module, HOLDERS) and module.weight is not None:
            name = f"{path}.weight"
            del module.weight
            module.weight = pack(weights[name], precision, moments.get(name))


def keep_cache_in(model: Model, cache: Cache) -> None:
    """Let a quantised model keep its keys and values in another precision."""
    assert model.precision is not None, "only a quantised model has a choice"
    model.precision = replace(model.precision, cache=cache)


def input_moments(model: Model, tokens: Int[Tensor, "B T"]) -> dict[str, Float[Tensor, "i i"]]:
    """Σ x xᵀ over the inputs x of every linear layer while the model reads `tokens`, by the weight's name."""
    if not isinstance(model, SequenceModel):
        raise ValueError("an encoder–decoder cannot be calibrated with tokens; quantise it without a text")
    moments: dict[str, Tensor] = {}

    def listen(name: str) -> Any:
        def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            x = given[0].detach().flatten(0, -2).float()
            moments[name] = moments.get(name, 0) + x.mT @ x

        return hook

    with ExitStack() as stack, torch.inference_mode():
        for path, module in model.named_modules():
            if isinstance(module, Linear):
                stack.callback(module.register_forward_pre_hook(listen(f"{path}.weight")).remove)
        for row in tokens.split(1):
            model(row)
    return moments
