"""Masks: which key position j a query position i may read. They compose with `&` and `|`.

A mask is data. Calling it evaluates it, with comparisons and arithmetic only, so NumPy arrays, torch tensors and plain
integers all work: `mask(np.arange(9)[:, None], np.arange(9)[None])` is the picture of it.

    Causal() & Window(size=4096)            Mistral
    Window(size=257) | Global(tokens=2)     Longformer with w = 512
    Blockwise(64, Window(2) | Global(1) | Scattered(3, among=64))     BigBird, for up to 64 blocks
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .base import Config, ConfigError

Span = tuple[Any, Any]
"""The first and the last position of a range."""


@dataclass(frozen=True)
class Mask(Config):
    """A predicate: True where query i may read key j.

    >>> mask = Causal() & Window(2)
    >>> i, j = np.arange(4)[:, None], np.arange(4)
    >>> mask(i, j).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1]])
    """

    def check(self) -> None:
        if type(self) is Mask:
            raise ConfigError(
                "Mask is not a mask of its own; use Full, Causal, Window, Band, Global, Scattered or Blockwise"
            )

    def __call__(self, i: Any, j: Any) -> Any:
        raise TypeError(f"{self.kind()} says of no query what it may read")

    def over(self, i: Span, j: Span) -> tuple[Any, Any]:
        """For ranges of queries and keys, as arrays: whether any query may read any key, and whether all may read all.

        What is not known is (True, False). Attention by blocks skips a block only where the first is False.
        """
        known = i[0] - i[0] != j[0] - j[0]
        return ~known, known

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
        """How many positions a query reads at most, counted back from itself and including it; None: unlimited."""
        return None

    def within(self, length: int) -> Mask:
        """The simplest mask that is the same below `length`: a window wider than the text is no window."""
        return self

    def resolve(self) -> Mask:
        """A fixed order of `&` and `|`, so that equal masks compare equal however they were written."""
        return self


@dataclass(frozen=True)
class Full(Mask):
    """Every query reads every key: encoders, and cross-attention.

    >>> bool(Full()(0, 3))  # position 0 may read position 3
    True
    """

    def __call__(self, i: Any, j: Any) -> Any:
        return i - i == j - j

    def over(self, i: Span, j: Span) -> tuple[Any, Any]:
        return self(i[0], j[0]), self(i[0], j[0])


@dataclass(frozen=True)
class Causal(Mask):
    """No query reads a later key: j ≤ i.

    >>> bool(Causal()(3, 1)), bool(Causal()(1, 3))
    (True, False)
    """

    def __call__(self, i: Any, j: Any) -> Any:
        return j <= i

    def over(self, i: Span, j: Span) -> tuple[Any, Any]:
        return self(i[1], j[0]), self(i[0], j[1])

    @property
    def causal(self) -> bool:
        return True


@dataclass(frozen=True)
class Window(Mask):
    """A sliding window: |i − j| < size. The position itself counts, as in Mistral.

    >>> i, j = np.arange(4)[:, None], np.arange(4)
    >>> Window(2)(i, j).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 1, 0],
           [0, 1, 1, 1],
           [0, 0, 1, 1]])
    """

    size: int

    def check(self) -> None:
        self.require_positive("size")

    def __call__(self, i: Any, j: Any) -> Any:
        return (i - j < self.size) & (j - i < self.size)

    def over(self, i: Span, j: Span) -> tuple[Any, Any]:
        near = (i[0] - j[1] < self.size) & (j[0] - i[1] < self.size)
        return near, (i[1] - j[0] < self.size) & (j[1] - i[0] < self.size)

    @property
    def reach(self) -> int | None:
        return self.size

    def within(self, length: int) -> Mask:
        return Full() if self.size >= length else self


@dataclass(frozen=True)
class Global(Mask):
    """Global tokens: the first `tokens` positions read everything and are read by everyone.

    >>> i, j = np.arange(4)[:, None], np.arange(4)
    >>> Global(1)(i, j).astype(int)
    array([[1, 1, 1, 1],
           [1, 0, 0, 0],
           [1, 0, 0, 0],
           [1, 0, 0, 0]])
    """

    tokens: int

    def check(self) -> None:
        if self.tokens < 0:
            raise ConfigError(f"Global.tokens is {self.tokens}, but must be at least 0")

    def __call__(self, i: Any, j: Any) -> Any:
        return (i < self.tokens) | (j < self.tokens)

    def over(self, i: Span, j: Span) -> tuple[Any, Any]:
        return self(i[0], j[0]), self(i[1], j[1])


@dataclass(frozen=True)
class Band(Mask):
    """Keys at a certain distance behind the query: least ≤ i − j ≤ most; most None: no limit.

    >>> [j for j in range(8) if Band(1, 3)(5, j)]
    [2, 3, 4]
    """

    least: int
    most: int | None = None

    def check(self) -> None:
        if self.most is not None and self.most < self.least:
            raise ConfigError(f"Band.most is {self.most}, but must be at least {self.least}, its least")

    def __call__(self, i: Any, j: Any) -> Any:
        far = i - j >= self.least
        return far if self.most is None else far & (i - j <= self.most)

    def over(self, i: Span, j: Span) -> tuple[Any, Any]:
        some, every = i[1] - j[0] >= self.least, i[0] - j[1] >= self.least
        if self.most is None:
            return some, every
        return some & (i[0] - j[1] <= self.most), every & (i[1] - j[0] <= self.most)

    @property
    def causal(self) -> bool:
        return self.least >= 0

    @property
    def reach(self) -> int | None:
        return None if self.most is None else max(self.most, 0) + 1


@dataclass(frozen=True)
class Scattered(Mask):
    """Random keys (BigBird): `keys` for each query, drawn without repetition from the first `among` by the seed.

    Over blocks these are BigBird's random blocks: `Blockwise(64, Scattered(3, among=length // 64))`. In a shorter text
    those that were drawn past its end are missing. Query i past `among` reads what query i mod `among` reads.

    >>> int(Scattered(2, among=8)(np.array([[3]]), np.arange(8)).sum())  # position 3 reads 2 of 8 keys
    2
    """

    keys: int
    among: int
    seed: int = 0

    def check(self) -> None:
        self.require_positive("among")
        if not 1 <= self.keys <= self.among:
            raise ConfigError(f"Scattered.keys is {self.keys}, but must be between 1 and among={self.among}")
        if self.seed < 0:
            raise ConfigError(f"Scattered.seed is {self.seed}, but must be at least 0")

    def __call__(self, i: Any, j: Any) -> Any:
        allowed = i - i != j - j
        for drawn in draw(self.keys, self.among, self.seed):
            allowed = allowed | (j == getattr(i, "new_tensor", np.asarray)(drawn)[i % self.among])
        return allowed

    def over(self, i: Span, j: Span) -> tuple[Any, Any]:
        some = i[0] - i[0] != j[0] - j[0]
        for step in range(int((i[1] - i[0]).max(initial=0)) + 1):
            query = np.minimum(i[0] + step, i[1]) % self.among
            for drawn in draw(self.keys, self.among, self.seed):
                some = some | ((j[0] <= drawn[query]) & (drawn[query] <= j[1]))
        return some, some & (i[0] == i[1]) & (j[0] == j[1])


@lru_cache(maxsize=16)
def draw(keys: int, among: int, seed: int) -> np.ndarray:
    """For each of `keys` draws, what every query drew."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.choice(among, keys, replace=False) for _ in range(among)], axis=1)


@dataclass(frozen=True)
class Blockwise(Mask):
    """A mask over blocks of `size` positions: the inner mask is applied to block numbers (BigBird).

    >>> i, j = np.arange(4)[:, None], np.arange(4)
    >>> Blockwise(2, Causal())(i, j).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 1],
           [1, 1, 1, 1]])
    """

    size: int
    mask: Mask

    def check(self) -> None:
        self.require_positive("size")

    def __call__(self, i: Any, j: Any) -> Any:
        return self.mask(i // self.size, j // self.size)

    def over(self, i: Span, j: Span) -> tuple[Any, Any]:
        return self.mask.over((i[0] // self.size, i[1] // self.size), (j[0] // self.size, j[1] // self.size))

    @property
    def reach(self) -> int | None:
        return None if self.mask.reach is None else self.mask.reach * self.size


@dataclass(frozen=True)
class And(Mask):
    """True where both masks are: `a & b`.

    >>> Causal() & Window(2)
    And(left=Causal(), right=Window(size=2))
    """

    left: Mask
    right: Mask

    def __call__(self, i: Any, j: Any) -> Any:
        return self.left(i, j) & self.right(i, j)

    def over(self, i: Span, j: Span) -> tuple[Any, Any]:
        left, right = self.left.over(i, j), self.right.over(i, j)
        return left[0] & right[0], left[1] & right[1]

    @property
    def causal(self) -> bool:
        return self.left.causal or self.right.causal

    @property
    def reach(self) -> int | None:
        return min((r for r in (self.left.reach, self.right.reach) if r is not None), default=None)

    def within(self, length: int) -> Mask:
        left, right = self.left.within(length), self.right.within(length)
        return right if left == Full() else left if right in (Full(), left) else And(left, right)

    def resolve(self) -> Mask:
        return And(self.right, self.left) if self.left.kind() > self.right.kind() else self


@dataclass(frozen=True)
class Or(Mask):
    """True where either mask is: `a | b`.

    >>> Window(2) | Global(1)
    Or(left=Window(size=2), right=Global(tokens=1))
    """

    left: Mask
    right: Mask

    def __call__(self, i: Any, j: Any) -> Any:
        return self.left(i, j) | self.right(i, j)

    def over(self, i: Span, j: Span) -> tuple[Any, Any]:
        left, right = self.left.over(i, j), self.right.over(i, j)
        return left[0] | right[0], left[1] | right[1]

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


def check_causal(mask: Mask) -> None:
    if not mask.causal:
        raise ValueError(f"the mask {mask} reads later tokens, so the model cannot be run piece by piece with a state")
