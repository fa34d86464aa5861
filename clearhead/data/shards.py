"""Token shards on disk, read through memory maps: a corpus of any size costs no memory to open.

tokens-00000.bin      token ids, uint16 where the vocabulary allows, else uint32
tokens-00000.ignored  only where it is needed: 1 for each token on which no loss is taken, else 0
documents.bin         int64: where each document begins in the whole
index.json            what was made from what; written anew after each shard, so it never names what is not there
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, UInt

from clearhead.files import write_atomically
from clearhead.typed_json import read_json

from .corpus import DataError

VERSION = 1


@dataclass(frozen=True)
class Shard:
    """One finished file, and how far in the text it ends."""

    tokens: int
    documents: int  # that begin in it
    bytes: int  # of its text in UTF-8
    scored_bytes: int  # of them, those on which the loss is taken
    parts: int
    text: str  # fingerprint of the text from the very beginning to the end of this shard
    ignores: bool  # whether there is a file of ignored tokens beside it


@dataclass
class Index:
    """The contents of `index.json`."""

    tokenizer: str  # fingerprint
    dtype: str
    shard_tokens: int
    shards: list[Shard] = field(default_factory=list)
    complete: bool = False
    chats: bool = False  # whether any of it is a conversation
    version: int = VERSION

    @classmethod
    def load(cls, folder: Path) -> Index | None:
        try:
            return read_json(folder / "index.json", cls)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DataError(f"{folder / 'index.json'} is damaged or of another version ({error}); {REMOVE}") from None

    def save(self, folder: Path) -> None:
        write_atomically(folder / "index.json", json.dumps(asdict(self), indent=1) + "\n")

    def total(self, name: str) -> int:
        return sum(getattr(shard, name) for shard in self.shards)


REMOVE = "remove the folder to have it made anew, or name another"


def token_file(number: int) -> str:
    return f"tokens-{number:05}.bin"


def ignored_file(number: int) -> str:
    return f"tokens-{number:05}.ignored"


def is_whole(folder: Path, number: int, shard: Shard, dtype: str) -> bool:
    sizes = {token_file(number): shard.tokens * np.dtype(dtype).itemsize}
    if shard.ignores:
        sizes[ignored_file(number)] = shard.tokens
    return all((folder / name).exists() and (folder / name).stat().st_size == size for name, size in sizes.items())


class Shards:
    """The tokens of a split as one long row, `len(shards)` of them, whichever files they are in."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.tokenizer = index.tokenizer
        self.corpus = index.shards[-1].text
        self.bytes = index.total("bytes")
        self.scored_bytes = index.total("scored_bytes")
        self.chats = index.chats
        self.ends = np.cumsum([shard.tokens for shard in index.shards])
        self.document_starts: Int[np.ndarray, " documents"] = mapped(folder / "documents.bin", np.int64)
        self.arrays = [mapped(folder / token_file(n), index.dtype) for n in range(len(index.shards))]
        self.ignored_arrays = [
            mapped(folder / ignored_file(n), bool) if shard.ignores else None for n, shard in enumerate(index.shards)
        ]

    @classmethod
    def open(cls, folder: str | Path) -> Shards:
        folder = Path(folder)
        index = Index.load(folder)
        if index is None:
            raise DataError(f"there are no token shards in {folder}: it has no index.json")
        if not index.complete:
            raise DataError(f"the token shards in {folder} were not finished; build them again to continue")
        documents = folder / "documents.bin"
        if not documents.exists() or documents.stat().st_size != 8 * index.total("documents"):
            raise DataError(f"{documents} is missing or cut short; {REMOVE}")
        for number, shard in enumerate(index.shards):
            if not is_whole(folder, number, shard, index.dtype):
                raise DataError(f"{folder / token_file(number)} is missing or cut short; build the shards again")
        return cls(folder, index)

    def __len__(self) -> int:
        return int(self.ends[-1])

    @cached_property
    def scored(self) -> int:
        """The tokens on which the loss is taken."""
        return len(self) - sum(int(np.count_nonzero(array)) for array in self.ignored_arrays if array is not None)

    @property
    def documents(self) -> int:
        return len(self.document_starts)

    def tokens(self, start: int, stop: int) -> UInt[np.ndarray, " n"]:
        return self.rows(np.array([start]), stop - start)[0]

    def rows(self, starts: Int[np.ndarray, " B"], length: int) -> UInt[np.ndarray, "B length"]:
        """`length` tokens from each start."""
        return self._gather(self.arrays, starts, length)

    def ignored_rows(self, starts: Int[np.ndarray, " B"], length: int) -> Bool[np.ndarray, "B length"] | None:
        """Where no loss is taken on these tokens; None where it is taken on all."""
        if all(array is None for array in self.ignored_arrays):
            return None
        arrays = [
            np.broadcast_to(False, len(tokens)) if ignored is None else ignored
            for tokens, ignored in zip(self.arrays, self.ignored_arrays, strict=True)
        ]
        return self._gather(arrays, starts, length)

    def _gather(self, arrays: list[np.ndarray], starts: Int[np.ndarray, " B"], length: int) -> Any:
        if len(arrays) == 1:
            return arrays[0][starts[:, None] + np.arange(length)]
        return np.stack([self._slice(arrays, int(start), int(start) + length) for start in starts])

    def _slice(self, arrays: list[np.ndarray], start: int, stop: int) -> np.ndarray:
        found = []
        number = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            array, begins = arrays[number], int(self.ends[number]) - len(arrays[number])
            found.append(array[start - begins : stop - begins])
            start, number = begins + len(array), number + 1
        return found[0] if len(found) == 1 else np.concatenate(found)


def mapped(path: Path, dtype: Any) -> np.ndarray:
    if path.stat().st_size == 0:  # which cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
