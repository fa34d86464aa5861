"""Detect operations that mix tensors of different devices. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operations that may mix devices: CPU indices, and copies from one device to another
MAY = ("aten::index", "aten::index_put", "aten::index_put_", "aten::copy_", "aten::_to_copy")


class DeviceMismatch(Exception):
    """An operation mixed a CPU tensor with one on another device."""


class RequireOneDevice(TorchDispatchMode):
    """Raise DeviceMismatch where a GPU would fail. The `meta` device alone allows some mixed operations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        if len({tensor.device.type for tensor in given if tensor.ndim}) > 1 and func._schema.name not in MAY:
            raise DeviceMismatch(func._schema.name)
        return func(*args, **(kwargs or {}))
