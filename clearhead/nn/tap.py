"""Named taps: read or replace any intermediate value of a forward pass by its path. Reading changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor


class Taps:
    """What to read and what to replace in one forward pass.

    read          path patterns; the values end up in `values`
    replace       path pattern -> a function from the value to its replacement, of the same shape
    on_attention  path pattern of a layer -> a callback that gets the layer's `AttentionView` and computes only the
                  rows it needs, for texts whose whole attention map would be too large

    Paths are those that `trace` prints; `*` matches any part of a path:

        taps = Taps(read=["stack.blocks.*.mixer.weights"], replace={"stack.blocks.0.mixer.mixed": torch.zeros_like})
        logits = model(tokens, taps=taps)
        taps.values["stack.blocks.3.mixer.weights"]   # B H T S
    """

    def __init__(
        self,
        read: Iterable[str] = (),
        replace: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        on_attention: Mapping[str, Callable[[Any], None]] | None = None,
    ) -> None:
        self.read = tuple(read)
        self.replace = dict(replace or {})
        self.on_attention = dict(on_attention or {})
        self.values: dict[str, Tensor] = {}

    def reads(self, path: str) -> bool:
        """Whether the value at `path` is read."""
        return any(fnmatchcase(path, pattern) for pattern in self.read)

    def replaces(self, path: str) -> bool:
        """Whether the value at `path` is replaced."""
        return any(fnmatchcase(path, pattern) for pattern in self.replace)

    def viewers(self, path: str) -> list[Callable[[Any], None]]:
        """The attention callbacks of the layer at `path`."""
        return [view for pattern, view in self.on_attention.items() if fnmatchcase(path, pattern)]

    def __call__(self, path: str, value: Tensor) -> Tensor:
        """Replace and record `value` as asked; called by every part at each of its taps."""
        for pattern, change in self.replace.items():
            if fnmatchcase(path, pattern):
                changed = change(value)
                if changed.shape != value.shape:
                    raise ValueError(f"{path} is {tuple(value.shape)}, but its replacement is {tuple(changed.shape)}")
                value = changed
        if self.reads(path):
            self.values[path] = value
        return value
