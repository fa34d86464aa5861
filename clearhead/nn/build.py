"""Build the module of a config. Both are in files of the same name: `configs/lstm.py` and `nn/lstm.py`.

    @builds(LSTMConfig)
    class LSTM(nn.Module): …

    build_part(LSTMConfig(), dim=64)        imports clearhead.nn.lstm if it has to, and makes an LSTM

So configs do not import torch, and a new part does not have to be added to a list.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from torch import nn

from clearhead.configs import Config

MODULES: dict[type[Config], Callable[[Any, int], nn.Module]] = {}
"""The module of each kind of config, filled in by `builds`."""

Module = TypeVar("Module", bound=type[nn.Module])


def builds(config: type[Config]) -> Callable[[Module], Module]:
    """Class decorator: register the class as the module that `config` describes.

    The class takes `(config, dim)`: its own config, and the width of the model.
    """

    def register(module: Module) -> Module:
        MODULES[config] = module
        return module

    return register


def build_part(config: Config | None, dim: int) -> Any:
    """The module of one config in a model of width `dim`. None, such as an absent norm, becomes the identity.

    The module's file is imported on first use, so a new part needs no list of modules.
    """
    if config is None:
        return nn.Identity()
    if type(config) not in MODULES:
        import_module(f"clearhead.nn.{type(config).__module__.rpartition('.')[2]}")
    return MODULES[type(config)](config, dim)
