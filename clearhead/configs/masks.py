"""Who may read whom: predicates over a query position i and a key position j, composed with `&` and `|`.

A mask is data. Calling it evaluates it, with comparisons and arithmetic only, so NumPy arrays, torch tensors and plain
integers all work: `mask(np.arange(9)[:, None], np.arange(9)[None])` is the picture of it.

    Causal() & Window(size=4096)            Mistral
    Window(size=257) | Global(tokens=2)     Longformer with w = 512
    Blockwise(64, Window(2) | Global(1))    the same predicates over block numbers
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .base import Config, ConfigError


@dataclass(frozen=True)
class Mask(Config):
    """A predicate: True where query i may read key j."""

    def check(self) -> None:
        if type(self) is Mask:
            raise ConfigError("Mask is not a mask of its own; use Full, Causal, Window, Global or Blockwise")

    def __call__(self, i: Any, j: Any) -> Any:
        raise TypeError(f"{self.kind()} says of no query what it may read")

    def __and__(self, other: Mask) -> Mask:
        return And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other)

    @property
    def causal(self) -> bool:
        """Whether no query reads a later key."""
        return False

    @property
    def reach(self) -> int | None:
        """How many positions back a query reads at most, itself counted; None where there is no bound."""
        return None

    def within(self, length: int) -> Mask:
        """The simplest mask that says the same of positions below `length`."""
        return self


@dataclass(frozen=True)
class Full(Mask):
    """Everyone reads everyone: encoders, and cross-attention."""

    def __call__(self, i: Any, j: Any) -> Any:
        return i - i == j - j


@dataclass(frozen=True)
class Causal(Mask):
    """No query reads a later key: j ≤ i."""

    def __call__(self, i: Any, j: Any) -> Any:
        return j <= i

    @property
    def causal(self) -> bool:
        return True


@dataclass(frozen=True)
class Window(Mask):
    """Only near keys: |i − j| < size; a position counts itself, as Mistral counts it."""

    size: int

    def check(self) -> None:
        self.require_positive("size")

    def __call__(self, i: Any, j: Any) -> Any:
        return (i - j < self.size) & (j - i < self.size)

    @property
    def reach(self) -> int | None:
        return self.size

    def within(self, length: int) -> Mask:
        return Full() if self.size >= length else self


@dataclass(frozen=True)
class Global(Mask):
    """The first `tokens` positions read all and are read by all."""

    tokens: int

    def check(self) -> None:
        if self.tokens < 0:
            raise ConfigError(f"Global.tokens is {self.tokens}, but must be at least 0")

    def __call__(self, i: Any, j: Any) -> Any:
        return (i < self.tokens) | (j < self.tokens)


@dataclass(frozen=True)
class Blockwise(Mask):
    """A mask over blocks of `size` positions: what it says of block numbers holds for all their members."""

    size: int
    mask: Mask

    def check(self) -> None:
        self.require_positive("size")

    def __call__(self, i: Any, j: Any) -> Any:
        return self.mask(i // self.size, j // self.size)

    @property
    def reach(self) -> int | None:
        return None if self.mask.reach is None else self.mask.reach * self.size


@dataclass(frozen=True)
class And(Mask):
    """Both allow it."""

    left: Mask
    right: Mask

    def __call__(self, i: Any, j: Any) -> Any:
        return self.left(i, j) & self.right(i, j)

    @property
    def causal(self) -> bool:
        return self.left.causal or self.right.causal

    @property
    def reach(self) -> int | None:
        return min((r for r in (self.left.reach, self.right.reach) if r is not None), default=None)

    def within(self, length: int) -> Mask:
        left, right = self.left.within(length), self.right.within(length)
        return right if left == Full() else left if right in (Full(), left) else And(left, right)


@dataclass(frozen=True)
class Or(Mask):
    """Either allows it."""

    left: Mask
    right: Mask

    def __call__(self, i: Any, j: Any) -> Any:
        return self.left(i, j) | self.right(i, j)

    @property
    def causal(self) -> bool:
        return self.left.causal and self.right.causal

    @property
    def reach(self) -> int | None:
        both = (self.left.reach, self.right.reach)
        return None if None in both else max(r for r in both if r is not None)

    def within(self, length: int) -> Mask:
        left, right = self.left.within(length), self.right.within(length)
        return Full() if Full() in (left, right) else left if left == right else Or(left, right)
