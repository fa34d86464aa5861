"""Named taps: read or replace any intermediate value of a forward pass by its path. Reading changes nothing.

A path is the place of a value in the model, the same as in `clearhead trace`: stack.blocks.0.mixer.weights. Patterns
may contain *, as in "stack.blocks.*.mixer.weights". `model.taps()` lists all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor


class Taps:
    """What to read and what to replace in one forward pass.

    read          path patterns; the values end up in `values`
    replace       path pattern -> a function from the value to its replacement, of the same shape
    on_attention  path pattern of a layer -> a callback that gets the layer's `AttentionView` and computes only the
                  rows it needs, for texts whose whole attention map would be too large

    Paths are those that `model.taps()` lists and `trace` prints; `*` matches any part of a path. One pattern may be
    given as a string. A pattern that matches nothing raises after the pass; with `strict=False` it does not.

        taps = Taps(read=["stack.blocks.*.mixer.weights"], replace={"stack.blocks.0.mixer.mixed": torch.zeros_like})
        logits = model(tokens, taps=taps)
        taps.values["stack.blocks.3.mixer.weights"]   # B H T S

    >>> model, taps = clearhead.build("tiny-gpt"), Taps(read="stack.blocks.0.mixer.weights")
    >>> _ = model(torch.tensor([[1, 2, 3]]), taps=taps)
    >>> taps.values["stack.blocks.0.mixer.weights"].shape  # B H T S
    torch.Size([1, 4, 3, 3])
    """

    def __init__(
        self,
        read: str | Iterable[str] = (),
        replace: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        on_attention: Mapping[str, Callable[[Any], None]] | None = None,
        *,
        strict: bool = True,
    ) -> None:
        self.read = (read,) if isinstance(read, str) else tuple(read)
        self.strict = strict
        self.names: set[str] = set()  # of all taps that the passes had
        self.layers: set[str] = set()  # of all layers with attention maps
        self.replace = dict(replace or {})
        self.on_attention = dict(on_attention or {})
        self.values: dict[str, Tensor] = {}

    def reads(self, path: str) -> bool:
        """Whether the value at `path` is read."""
        self.names.add(path)
        return any(fnmatchcase(path, pattern) for pattern in self.read)

    def replaces(self, path: str) -> bool:
        """Whether the value at `path` is replaced."""
        self.names.add(path)
        return any(fnmatchcase(path, pattern) for pattern in self.replace)

    def viewers(self, path: str) -> list[Callable[[Any], None]]:
        """The attention callbacks of the layer at `path`."""
        self.layers.add(path)
        return [view for pattern, view in self.on_attention.items() if fnmatchcase(path, pattern)]

    def check(self) -> None:
        """Raise if a pattern matched nothing in the passes so far. Called by the model at the end of a pass."""
        if not self.strict:
            return
        for patterns, names, what in (
            (self.read, self.names, "value"),
            (self.replace, self.names, "value"),
            (self.on_attention, self.layers, "layer with attention maps"),
        ):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    near = get_close_matches(pattern, sorted(names), n=3, cutoff=0.3) or sorted(names)[:3]
                    hint = f"the nearest names are {', '.join(near)}" if near else "this model has none"
                    raise ValueError(f"no {what} matches {pattern!r}; {hint}; model.taps() lists all values")

    def __repr__(self) -> str:
        """What is asked for, and the shape of each value that was read."""
        asked = [f"{name}={value!r}" for name, value in (("read", [*self.read]), ("replace", [*self.replace])) if value]
        read = [f"  {path}: {tuple(value.shape)}" for path, value in self.values.items()]
        return "\n".join((f"Taps({', '.join(asked)})", *read))

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
