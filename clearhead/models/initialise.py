"""Fresh weights for a model."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from clearhead.nn.stack import ParallelBlock, Residual, Stack

RESIDUAL_OUTPUTS = (
    ".mixer.out.weight",
    ".cross.out.weight",
    ".ffn.down.weight",
    ".experts.down.weight",
    ".shared.down.weight",
)
"""How the names of matrices end whose output is added to the residual stream."""


def initialise(model: nn.Module) -> None:
    """Draw fresh weights from a normal distribution.

    Token and position tables have a standard deviation of 0.02. A matrix with n inputs has a variance of 2/(5·n), about
    0.02² at GPT-2's width (Nguyen & Salazar 2019, 3.1). Matrices that write to the residual stream are divided by
    √(number of branches) (Radford et al. 2019, 2.3). Biases are 0 and gains 1. A part with an
    `init_weights` method then sets its own weights.
    """
    layers = [layer for stack in model.modules() if isinstance(stack, Stack) for layer in stack.layers()]
    branches = sum({Residual: 1, ParallelBlock: 2}.get(type(m), 0) for layer in layers for m in layer.modules())
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            dim = parameter.shape[-1]
            std = 0.02 if "tokens." in name or "position." in name else math.sqrt(2 / (5 * dim))
            if name.endswith(RESIDUAL_OUTPUTS):
                std /= math.sqrt(max(branches, 1))
            nn.init.normal_(parameter, std=std)
    for module in model.modules():
        init_weights = getattr(module, "init_weights", None)
        if callable(init_weights):
            init_weights()


class SkipInitialisation(TorchFunctionMode):
    """Makes `torch.nn.init` do nothing, for weights that are replaced at once.

    On the meta device torch would otherwise start its compiler to draw random numbers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return (args or list(kwargs.values()))[0]
        return func(*args, **(kwargs or {}))
