"""Hiding tokens, for a model that is to tell them from the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .batches import IGNORED, Batch
from .hashing import GOLDEN, keys, mix

HIDDEN, CHANGED = 0.8, 0.1  # of the tokens that are asked for; the rest stays as it is (Devlin et al. 2019, 3.1)


@dataclass(frozen=True)
class Hiding:
    """A `share` of each row's tokens becomes targets. What is hidden in a row is a function of its number alone."""

    mask: int
    vocabulary: int
    share: float
    seed: int

    def hide(self, batch: Batch, first: int) -> Batch:
        """The rows, numbered from `first`, with tokens hidden; the targets are the hidden tokens."""
        tokens = batch.inputs
        rows, length = tokens.shape
        number = (first + np.arange(rows))[:, None] * length + np.arange(length)
        draw = keys(self.seed, number.ravel()).reshape(rows, length)
        real = np.ones(tokens.shape, dtype=bool) if batch.documents is None else batch.documents >= 0
        asked = (uniform(draw) < self.share) & real
        how = uniform(mix(draw + GOLDEN))
        anything = (mix(draw + GOLDEN + GOLDEN) % np.uint64(self.vocabulary)).astype(tokens.dtype)
        shown = np.where(how < HIDDEN, self.mask, np.where(how < HIDDEN + CHANGED, anything, tokens))
        return Batch(np.where(asked, shown, tokens), np.where(asked, tokens, IGNORED), batch.documents)


def uniform(draw: np.ndarray) -> np.ndarray:
    """From 64 random bits to a number from 0 to 1."""
    return (draw >> np.uint64(11)) * 2.0**-53
