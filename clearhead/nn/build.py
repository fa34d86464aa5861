"""From a config to its module: the module lives in the file of `clearhead.nn` that is named like the config's."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from torch import nn

from clearhead.configs import Config

MODULES: dict[type[Config], Callable[[Any, int], nn.Module]] = {}

Module = TypeVar("Module", bound=type[nn.Module])


def builds(config: type[Config]) -> Callable[[Module], Module]:
    """Class decorator: this module is what that config describes."""

    def register(module: Module) -> Module:
        MODULES[config] = module
        return module

    return register


def build_part(config: Config | None, dim: int) -> Any:
    """The module of one node in a model of width `dim`; an absent norm or position is the identity."""
    if config is None:
        return nn.Identity()
    if type(config) not in MODULES:
        import_module(f"clearhead.nn.{type(config).__module__.rpartition('.')[2]}")
    return MODULES[type(config)](config, dim)
