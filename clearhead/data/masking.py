"""Mask tokens that a model learns to predict from the tokens around them (BERT)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .batches import IGNORED, Batch
from .hashing import GOLDEN, derive_keys, mix

MASKED, RANDOM = 0.8, 0.1  # shares of the chosen tokens; the rest stay unchanged (Devlin et al. 2019, 3.1)


@dataclass(frozen=True)
class TokenMasking:
    """Choose a `share` of each row's tokens as targets. The choice depends only on the row's number and the seed.

    >>> batch = Batch(np.full((2, 50), 7), np.full((2, 50), 7))
    >>> masked = TokenMasking(mask=4, vocabulary=100, share=0.2, seed=0).mask_tokens(batch, first=0)
    >>> bool((masked.inputs == 4).any()), bool(((masked.targets == -100) | (masked.targets == 7)).all())
    (True, True)
    """

    mask: int
    vocabulary: int
    share: float
    seed: int

    def mask_tokens(self, batch: Batch, first: int) -> Batch:
        """The rows, numbered from `first`, with the chosen inputs masked; the targets are the original tokens."""
        tokens = batch.inputs
        rows, length = tokens.shape
        number = (first + np.arange(rows))[:, None] * length + np.arange(length)
        draw = derive_keys(self.seed, number.ravel()).reshape(rows, length)
        real = np.ones(tokens.shape, dtype=bool) if batch.documents is None else batch.documents >= 0
        chosen = (uniform(draw) < self.share) & real
        how = uniform(mix(draw + GOLDEN))
        anything = (mix(draw + GOLDEN + GOLDEN) % np.uint64(self.vocabulary)).astype(tokens.dtype)
        shown = np.where(how < MASKED, self.mask, np.where(how < MASKED + RANDOM, anything, tokens))
        return Batch(np.where(chosen, shown, tokens), np.where(chosen, tokens, IGNORED), batch.documents)


def uniform(draw: np.ndarray) -> np.ndarray:
    """64 random bits as a number from 0 to 1."""
    return (draw >> np.uint64(11)) * 2.0**-53
