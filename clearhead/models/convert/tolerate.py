"""Checkpoints that differ a little from their config, as `transformers` accepts them: each difference gives a note."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clearhead.configs import ClassHeadConfig, ModelConfig, PoolerConfig, SequenceModelConfig

if TYPE_CHECKING:
    from . import Family

WRAPPERS = re.compile(r"_orig_mod\.|^(module\.)+")
"""What torch.compile and DistributedDataParallel put into the names of tensors."""


def unwrap_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors without the prefixes of wrappers that the model was saved in."""
    found = {WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}
    if found.keys() != tensors.keys() and len(found) == len(tensors):
        warnings.warn("the names of the tensors have prefixes of torch.compile or DDP; they are removed", stacklevel=3)
        return found
    return dict(tensors)


def fit_head(kind: Family, config: ModelConfig, tensors: Mapping[str, Any]) -> ModelConfig:
    """The config with the head that the tensors have: no pooler if it is missing, and as many classes as there are."""
    if not isinstance(config, SequenceModelConfig):
        return config
    shapes = {name.removeprefix(kind.prefix): tuple(tensor.shape) for name, tensor in tensors.items()}
    heads = {our: rule.theirs for rule in kind.rules(config) for our in rule.ours if our.startswith("head.")}
    if isinstance(config.head, PoolerConfig) and heads and not any(n in shapes for ns in heads.values() for n in ns):
        warnings.warn("the checkpoint has no pooler, so the model is loaded without one", stacklevel=3)
        return config.with_value("head", None)
    rows = shapes.get(heads.get("head.classes.weight", ("",))[0])
    if isinstance(config.head, ClassHeadConfig) and rows and rows[0] != config.head.classes:
        named = config.head.classes
        warnings.warn(f"config.json names {named} classes, but the classifier has {rows[0]}", stacklevel=3)
        return config.with_value("head.classes", rows[0])
    return config
