"""Whether tensors that meet are on one device. Loads torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# indices may stay on the CPU, and copying from one device to another is what copying is for
MAY = ("aten::index", "aten::index_put", "aten::index_put_", "aten::copy_", "aten::_to_copy")


class TwoDevices(Exception):
    """A tensor on the CPU met one that is elsewhere."""


class OneDevice(TorchDispatchMode):
    """Every operation as a GPU would take it: `meta` alone lets some pairs through."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        if len({tensor.device.type for tensor in given if tensor.ndim}) > 1 and func._schema.name not in MAY:
            raise TwoDevices(func._schema.name)
        return func(*args, **(kwargs or {}))
