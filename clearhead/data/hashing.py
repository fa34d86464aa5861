"""Pseudo-random numbers as functions of their input: integer arithmetic, the same on every machine."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Int, UInt64

ROUNDS = 3
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
TURNS = np.arange(1, 2 * ROUNDS + 1, dtype=np.uint64) * GOLDEN


def mix(x: UInt64[np.ndarray, "*n"]) -> UInt64[np.ndarray, "*n"]:
    """SplitMix64's output function (Steele, Lea & Flood 2014, fig. 17): each bit of x changes half of all bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derive_keys(seed: int, numbers: Int[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """A 64-bit key for each number, different for every seed."""
    start = mix(np.array([seed % 2**64], dtype=np.uint64) + GOLDEN)
    return mix((start ^ numbers.astype(np.uint64)) + GOLDEN)


def derive_key(seed: int, number: int) -> int:
    """The key of a single number."""
    return int(derive_keys(seed, np.array([number]))[0])


def permute(places: Int[np.ndarray, " n"], count: int, key: UInt64[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Where a random permutation of range(count), one for each key, sends each place, without a table of it.

    A Feistel network over (row, column) pairs permutes rows × columns ≥ count places, whatever its round function
    (Luby & Rackoff 1988). Repeating it until the result is below count permutes count places (Black & Rogaway 2002,
    §4).
    """
    rows = math.isqrt(count - 1) + 1
    columns = -(-count // rows)
    size_r, size_c = np.uint64(rows), np.uint64(columns)
    result = places.astype(np.uint64)
    outside = np.ones(len(places), dtype=bool)
    while outside.any():
        row, column = np.divmod(result, size_c)
        for turn in range(ROUNDS):
            row = (row + mix(key + column + TURNS[2 * turn])) % size_r
            column = (column + mix(key + row + TURNS[2 * turn + 1])) % size_c
        result = np.where(outside, row * size_c + column, result)
        outside = result >= count
    return result.astype(np.int64)
