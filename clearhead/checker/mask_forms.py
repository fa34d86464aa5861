"""The conventions for attention masks: what their values mean, and their shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

Array = np.ndarray
# what a mask's values can mean; our own convention, `allowed`, is True where a query may read a key
SENSES: dict[str, Callable[[Array], Array]] = {
    "true_allows": lambda allowed: allowed,
    "true_blocks": lambda allowed: ~allowed,
    "one_allows": lambda allowed: allowed.astype(float),
    "one_blocks": lambda allowed: (~allowed).astype(float),
    "additive": lambda allowed: np.where(allowed, 0.0, -np.inf),
    "additive_finite": lambda allowed: np.where(allowed, 0.0, -1e9),
}
ALLOWING = ("true_allows", "one_allows")
BLOCKING = ("true_blocks", "one_blocks")


@dataclass(frozen=True)
class MaskForm:
    """A convention for masks. `kind` is what the shape can express: "shared" over the batch, "keys" only, or "any"."""

    sense: str
    shape: str
    kind: str

    @property
    def finite(self) -> MaskForm:
        """The same form with -1e9 in place of -inf: if a whole row is -inf, NaN is the caller's fault."""
        return replace(self, sense="additive_finite") if self.sense == "additive" else self

    def __call__(self, allowed: Array) -> Array:
        """Convert our mask, allowed [B, 1, T, S], to this form."""
        heads_off = allowed[:, 0]
        by_shape = {
            "T S": allowed[0, 0],
            "1 T S": allowed[:1, 0],
            "1 1 T S": allowed[:1],
            "B T S": heads_off,
            "B 1 T S": allowed,
            "B S": heads_off[:, 0],
            "B 1 S": heads_off[:, :1],
            "B 1 1 S": allowed[:, :, :1],
        }
        return SENSES[self.sense](by_shape[self.shape])


SHAPES = (
    ("B 1 T S", "any"),
    ("B T S", "any"),
    ("T S", "shared"),
    ("1 1 T S", "shared"),
    ("1 T S", "shared"),
    ("B S", "keys"),
    ("B 1 1 S", "keys"),
    ("B 1 S", "keys"),
)


def mask_forms(shapes: tuple[tuple[str, str], ...] = SHAPES) -> Iterator[MaskForm]:
    for shape, kind in shapes:
        for sense in SENSES:
            yield MaskForm(sense, shape, kind)


def pattern(kind: str, B: int, T: int, S: int, seed: int = 3) -> Array:
    """Return a random mask [B, 1, T, S] in which every query has at least one allowed and one hidden key."""
    generator = np.random.default_rng(seed)
    shape = {"shared": (1, 1, T, S), "keys": (B, 1, 1, S), "any": (B, 1, T, S)}[kind]
    allowed = generator.random(shape) < 0.55
    spot = generator.integers(0, S, shape[:-1])
    at = np.arange(S)
    allowed = (allowed | (at == spot[..., None])) & ~(at == ((spot + 1) % S)[..., None])
    return np.broadcast_to(allowed, (B, 1, T, S)).copy()


ALLOWS = (
    r"(true|1s?|ones?|non-?zero)\b[^.,;01\n]{0,24}?(attend|keep|kept|allow|visible|valid|may|can|real|read|see|unmasked|参与|可见|保留)|"
    r"(false|0s?|zeros?)\b[^.,;01\n]{0,24}?(blocked|masked|hidden|ignore|pad|mask(s|ed)? out|forbid|屏蔽|遮)"
)
BLOCKS = (
    r"(true|1s?|ones?)\b[^.,;01\n]{0,24}?"
    r"(block|masked|hidden|hide|ignore|pad|mask(s|ed)? out|forbid|not attend|屏蔽|遮)|"
    r"(false|0s?|zeros?)\b[^.,;01\n]{0,24}?(attend|keep|kept|allow|visible|valid|may|can|read|see|参与|可见)"
)


def documented_sense(source: str) -> str | None:
    """Return the convention that comments and docstrings state: "allows", "blocks" or None."""
    words = [m.group(0) for m in re.finditer(r"#.*|\"\"\"[\s\S]*?\"\"\"|'''[\s\S]*?'''", source)]
    text = " ".join(words).lower()
    allows, blocks = bool(re.search(ALLOWS, text)), bool(re.search(BLOCKS, text))
    if allows == blocks:
        return None
    return "allows" if allows else "blocks"
