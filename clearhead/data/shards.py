"""Token shards on disk, read through memory maps, so that opening a large corpus takes no memory.

tokens-00000.bin      token ids: uint16 if the vocabulary fits, else uint32
tokens-00000.ignored  only if needed: 1 for each token without loss, else 0
documents.bin         int64: where each document begins in the corpus
index.json            sizes and digests of the files; rewritten after each shard, so it never lists a missing file
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, UInt

from clearhead.files import file_digest, write_atomically
from clearhead.typed_json import read_json

from .corpus import DataError

VERSION = 2
DOCUMENTS = "documents.bin"


@dataclass(frozen=True)
class Shard:
    """One finished file and its part of the text."""

    tokens: int
    documents: int  # documents that begin in it
    bytes: int  # size of its text in UTF-8
    scored_bytes: int  # bytes of text with loss
    parts: int
    text: str  # fingerprint of the text from the start of the corpus to the end of this shard
    ignores: bool  # whether it has a file of ignored tokens
    digests: dict[str, str]  # of its files, by name


@dataclass
class Index:
    """The contents of `index.json`."""

    tokenizer: str  # fingerprint
    dtype: str
    shard_tokens: int
    shards: list[Shard] = field(default_factory=list)
    complete: bool = False
    documents: str = ""  # digest of documents.bin, once complete
    chats: bool = False  # whether it has conversations
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


REMOVE = "remove the folder to build it again, or choose another"


def token_file(number: int) -> str:
    return f"tokens-{number:05}.bin"


def ignored_file(number: int) -> str:
    return f"tokens-{number:05}.ignored"


def find_damage(folder: Path, number: int, shard: Shard, dtype: str, verify: bool = True) -> str:
    """What is wrong with a shard's files; "" if nothing is. With `verify`, their digests are compared too."""
    sizes = {token_file(number): shard.tokens * np.dtype(dtype).itemsize}
    if shard.ignores:
        sizes[ignored_file(number)] = shard.tokens
    for name, size in sizes.items():
        path = folder / name
        if not path.exists() or path.stat().st_size != size:
            return f"{path} is missing or cut short"
        if verify and file_digest(path) != shard.digests.get(name):
            return f"{path} was changed"
    return ""


class Shards:
    """The tokens of a split as one long row of `len(shards)` tokens, whichever files hold them.

    >>> import tempfile
    >>> from clearhead.configs import BytesConfig
    >>> from clearhead.tokenize import make
    >>> texts = [Document("a", (("to be", True),)), Document("b", (("or not", True),))]
    >>> shards = build(texts, make(BytesConfig(), []), tempfile.mkdtemp())
    >>> Shards.open(shards.folder).tokens(0, 3).tolist()
    [116, 111, 32]
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.tokenizer = index.tokenizer
        self.corpus = index.shards[-1].text
        self.bytes = index.total("bytes")
        self.scored_bytes = index.total("scored_bytes")
        self.chats = index.chats
        self.ends = np.cumsum([shard.tokens for shard in index.shards])
        self.document_starts: Int[np.ndarray, " documents"] = map_file(folder / DOCUMENTS, np.int64)
        self.arrays = [map_file(folder / token_file(n), index.dtype) for n in range(len(index.shards))]
        self.ignored_arrays = [
            map_file(folder / ignored_file(n), bool) if shard.ignores else None for n, shard in enumerate(index.shards)
        ]

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> Shards:
        """Open the shards in a folder. With `verify`, read all files once and compare their digests."""
        folder = Path(folder)
        index = Index.load(folder)
        if index is None:
            raise DataError(f"{folder} holds no token shards: it has no index.json")
        if not index.complete:
            raise DataError(f"the token shards in {folder} are not finished; build them again to continue")
        documents = folder / DOCUMENTS
        if not documents.exists() or documents.stat().st_size != 8 * index.total("documents"):
            raise DataError(f"{documents} is missing or cut short; {REMOVE}")
        if verify and index.documents != file_digest(documents):
            raise DataError(f"{documents} was changed; {REMOVE}")
        for number, shard in enumerate(index.shards):
            if problem := find_damage(folder, number, shard, index.dtype, verify):
                raise DataError(f"{problem}; build the token shards again")
        return cls(folder, index)

    def __len__(self) -> int:
        return int(self.ends[-1])

    @cached_property
    def scored(self) -> int:
        """The number of tokens with loss."""
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
        """True for tokens without loss; None if all tokens have loss."""
        if all(array is None for array in self.ignored_arrays):
            return None
        arrays = [
            np.broadcast_to(False, len(tokens)) if ignored is None else ignored
            for tokens, ignored in zip(self.arrays, self.ignored_arrays, strict=True)
        ]
        return self._gather(arrays, starts, length)

    def question_length(self) -> int:
        """How many tokens come before the first one with loss: the first question of conversations, 0 of plain text."""
        first = self.ignored_arrays[0] if self.ignored_arrays else None
        return 0 if first is None else int(np.argmin(first))

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


def map_file(path: Path, dtype: Any) -> np.ndarray:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
