"""Named taps: any intermediate value can be read or replaced by its path, and reading changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor


class Taps:
    """What to read and what to replace in one forward pass, by path pattern; the values read end up in `values`.

    taps = Taps(read=["stack.blocks.*.mixer.weights"], replace={"stack.blocks.0.mixer.mixed": torch.zeros_like})
    logits = model(tokens, taps=taps)
    taps.values["stack.blocks.3.mixer.weights"]   # B H T S

    The paths are those that `trace` prints. `look` is for attention whose whole map would be too much: by the path of
    a layer, such as `stack.blocks.*.mixer`, who is handed what it reads (`Attending`) and writes out the rows he likes.
    """

    def __init__(
        self,
        read: Iterable[str] = (),
        replace: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        look: Mapping[str, Callable[[Any], None]] | None = None,
    ) -> None:
        self.read = tuple(read)
        self.replace = dict(replace or {})
        self.look = dict(look or {})
        self.values: dict[str, Tensor] = {}

    def reads(self, path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in self.read)

    def replaces(self, path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in self.replace)

    def looks(self, path: str) -> list[Callable[[Any], None]]:
        return [look for pattern, look in self.look.items() if fnmatchcase(path, pattern)]

    def __call__(self, path: str, value: Tensor) -> Tensor:
        for pattern, change in self.replace.items():
            if fnmatchcase(path, pattern):
                changed = change(value)
                if changed.shape != value.shape:
                    raise ValueError(f"{path} is {tuple(value.shape)}, but its replacement is {tuple(changed.shape)}")
                value = changed
        if self.reads(path):
            self.values[path] = value
        return value
