"""What a forward pass knows besides x: where queries and keys are, which keys are real, and who is watching."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.configs import Full, Mask

from .tap import Taps

Made = TypeVar("Made")


@dataclass(frozen=True)
class Context:
    """Passed down through every part; a part that reads other keys passes on a changed copy."""

    positions: Int[Tensor, "#B T"]  # of the queries
    key_positions: Int[Tensor, "#B S"]
    readable: Bool[Tensor, "B S"] | None = None  # False where a key is padding; None: all are real
    documents: Int[Tensor, "B T"] | None = None  # only tokens of one document read each other; None: all do
    aligned: bool = False  # queries and keys are the same 0 … T−1 in every row
    source: Float[Tensor, "B S D"] | None = None  # what cross-attention reads
    cross: Context | None = None  # the context for reading it
    fused: bool = True  # False: attention is written out in plain operations
    taps: Taps | None = None
    path: str = ""
    memo: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)  # lives for one forward pass

    def named(self, name: str) -> str:
        """The path of a value of this part."""
        return ".".join(part for part in (self.path, name) if part)

    def at(self, name: str) -> Context:
        """The context of a child, whose taps are called by its place."""
        if self.taps is None:
            return self
        path = self.named(name)
        cross = None if self.cross is None else replace(self.cross, path=path)
        return replace(self, path=path, cross=cross)

    def tap(self, name: str, value: Tensor) -> Tensor:
        """A point where `value` can be read or replaced."""
        return value if self.taps is None else self.taps(self.named(name), value)

    def reads(self, *names: str) -> bool:
        return self.taps is not None and any(self.taps.reads(self.named(name)) for name in names)

    def replaces(self, *names: str) -> bool:
        return self.taps is not None and any(self.taps.replaces(self.named(name)) for name in names)

    def looks(self) -> Sequence[Callable[[Any], None]]:
        """Who looks at what the attention of this part reads."""
        return () if self.taps is None else self.taps.looks(self.path)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """A value that all layers share, made by the first that asks."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def reading(self, key_positions: Int[Tensor, "#B S"], readable: Bool[Tensor, "B S"] | None) -> Context:
        """The same queries over other keys: those that a state holds."""
        aligned = self.aligned and key_positions.shape[1] == self.positions.shape[1]
        return replace(self, key_positions=key_positions, readable=readable, aligned=aligned)

    def allowed(self, mask: Mask) -> Bool[Tensor, "#B 1 T S"] | None:
        """Who may read whom: the mask, padding and documents together; None where everyone may."""
        return self.once(("allowed", mask, id(self.key_positions)), lambda: self.allowed_rows(mask, slice(None)))

    def allowed_rows(self, mask: Mask, rows: slice | list[int]) -> Bool[Tensor, "#B 1 Rows S"] | None:
        """The same of some queries only."""
        if mask == Full() and self.readable is None and self.documents is None:
            return None
        allowed = mask(self.positions[:, None, rows, None], self.key_positions[:, None, None, :])
        if self.readable is not None:
            allowed = allowed & self.readable[:, None, None, :]
        if self.documents is not None:
            allowed = allowed & (self.documents[:, None, rows, None] == self.documents[:, None, None, :])
        return None if bool(allowed.all()) else allowed

    def plainly_causal(self, mask: Mask) -> bool:
        """Whether the mask is the lower triangle and nothing else, which kernels know without a tensor."""
        return self.aligned and self.readable is None and self.documents is None and mask.kind() == "Causal"
