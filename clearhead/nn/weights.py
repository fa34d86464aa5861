"""Weights that are not numbers: which layer has them."""

from __future__ import annotations

import re

from torch import nn


def first_nan_weight(model: nn.Module) -> str | None:
    """The name of the first weight of a model that contains NaN; None if all are finite numbers or infinities.

    >>> first_nan_weight(nn.Linear(2, 2)) is None
    True
    """
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and bool(weight.isnan().any()):
            return name
    return None


def check_weights_finite(model: nn.Module) -> None:
    """Raise one clear sentence if a weight contains NaN: `layer 3's weights contain NaN (stack.blocks.3.…)`.

    Every output of such a model is NaN, so a command that would print or save it calls this first.

    >>> layer = torch.nn.Linear(2, 2)
    >>> _ = layer.weight.data.fill_(torch.nan)
    >>> try:
    ...     check_weights_finite(layer)
    ... except ValueError as error:
    ...     print(error)
    the weights contain NaN (weight), so every output would be NaN; use an earlier checkpoint
    """
    name = first_nan_weight(model)
    if name is None:
        return
    layer = re.search(r"blocks\.(\d+)\.", name)
    where = f"layer {layer[1]}'s weights contain" if layer else "the weights contain"
    raise ValueError(f"{where} NaN ({name}), so every output would be NaN; use an earlier checkpoint")
