"""What every mixer has in common: the part of a block that moves information between tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Part

if TYPE_CHECKING:
    from .masks import Mask


@dataclass(frozen=True, kw_only=True)
class MixerConfig(Part, abstract=True):
    """The base of every mixer. A block accepts any subclass, also one defined outside the package.

    It has `mask`, which says which positions a token may read: a field or a property.

    >>> isinstance(MambaConfig(), MixerConfig), MambaConfig().mask
    (True, Causal())
    """

    if TYPE_CHECKING:

        @property
        def mask(self) -> Mask: ...

    @property
    def reads_distances(self) -> bool:
        """Whether the mixer reads the distance vectors of its stack."""
        return False

    @property
    def longest(self) -> int | None:
        """The longest text that the mixer can read, in positions; None if there is no limit."""
        return None
