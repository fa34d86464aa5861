"""Write documents as token shards: on all cores, in bounded memory, and resumable."""

from __future__ import annotations

import hashlib
import os
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import IO

import numpy as np
from tokenizers import Encoding

from clearhead.files import file_digest, open_own
from clearhead.tokenize import Tokenizer, TokenizerError

from .chat import ANSWER
from .corpus import DataError, Document
from .parts import PART, parts
from .shards import DOCUMENTS, REMOVE, Index, Shard, Shards, find_damage, ignored_file, token_file

Progress = Callable[[int, int], object]  # bytes of text and tokens so far

SHARD_FILES = (DOCUMENTS, "tokens-*.bin", "tokens-*.ignored")
BATCH = 4 * PART * (os.cpu_count() or 1)  # characters given to the tokenizer's threads at once
IN_FLIGHT = 2  # batches encoded while a third is written, so no core waits


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of one piece of a document, encoded at once."""

    name: str
    text: str
    loss: bool
    begins: bool  # a document begins here
    ends: bool = False


def build(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    shard_tokens: int = 2**27,
    progress: Progress | None = None,
) -> Shards:
    """Write the documents as shards, each followed by the end-of-text token if the tokenizer has one.

    If it is killed and called again, it keeps the finished shards, skips their text and continues; the files are the
    same to the byte. A folder made from other text or by another tokenizer is refused.

    >>> import tempfile
    >>> from clearhead.configs import BytesConfig
    >>> from clearhead.tokenize import make
    >>> texts = [Document("a", (("to be", True),)), Document("b", (("or not", True),))]
    >>> shards = build(texts, make(BytesConfig(), []), tempfile.mkdtemp())
    >>> len(shards), shards.documents
    (13, 2)
    """
    folder = Path(folder)
    dtype = "uint16" if tokenizer.vocabulary <= 2**16 else "uint32"
    index = resume_index(folder, Index(tokenizer=tokenizer.fingerprint, dtype=dtype, shard_tokens=shard_tokens))
    stream, text = all_parts(documents), hashlib.blake2b(digest_size=16)
    skip(stream, text, index, folder)
    if index.complete:
        return Shards.open(folder, verify=False)  # just verified
    try:
        folder.mkdir(parents=True, exist_ok=True)
        index.save(folder)  # marks the folder as ours before anything else is written there
        with ExitStack() as files:
            writer = Writer(folder, index, tokenizer.end, text, files)
            for batch in encode_in_parallel(stream, tokenizer):
                for part, ids in batch:
                    writer.add(part, ids)
                writer.flush()
                if progress is not None:
                    progress(writer.bytes_before + writer.bytes, writer.tokens_before + writer.tokens)
            writer.close()
    except OSError as error:
        raise DataError(
            f"cannot write token shards to {folder}: {error.strerror}; finished shards are kept, and running it again "
            "continues after them"
        ) from None
    if not index.total("tokens"):
        raise DataError("the corpus is empty: its text has no tokens; give files with text to --data")
    index.complete, index.documents = True, file_digest(folder / DOCUMENTS)
    index.save(folder)
    return Shards.open(folder, verify=False)


def resume_index(folder: Path, new: Index) -> Index:
    """The index that an earlier call left in the folder, as far as its shards are undamaged, or the new one."""
    old = Index.load(folder)
    if old is None:
        found = sorted(path for pattern in SHARD_FILES for path in folder.glob(pattern))
        if found:
            raise DataError(
                f"{found[0]} was not written by Clearhead: there is no index.json beside it; name another folder"
            )
        return new
    if old.tokenizer != new.tokenizer:
        raise DataError(f"the token shards in {folder} were made by another tokenizer; {REMOVE}")
    if old.version != new.version:
        raise DataError(f"the token shards in {folder} are of version {old.version}, not {new.version}; {REMOVE}")
    if old.documents and old.documents != file_digest(folder / DOCUMENTS):
        warnings.warn(f"{folder / DOCUMENTS} was changed; building the token shards again", stacklevel=2)
        old.shards, old.complete, old.documents = [], False, ""
    for number, shard in enumerate(old.shards):
        if problem := find_damage(folder, number, shard, old.dtype):
            warnings.warn(f"{problem}; building the token shards again from there", stacklevel=2)
            old.shards, old.complete, old.documents = old.shards[:number], False, ""
            break
    if old.complete:
        return old
    if old.shard_tokens != new.shard_tokens:
        raise DataError(
            f"the token shards in {folder} have {old.shard_tokens:,} tokens each, not {new.shard_tokens:,}; {REMOVE}"
        )
    return old


def skip(stream: Iterator[Chunk], text: hashlib.blake2b, index: Index, folder: Path) -> None:
    """Skip the text of the finished shards, and check that it is the same text."""
    if not index.shards:
        return
    for part in islice(stream, index.total("parts")):
        add_to_fingerprint(text, part)
    same = text.hexdigest() == index.shards[-1].text
    if not same or (index.complete and next(stream, None) is not None):
        raise DataError(f"the token shards in {folder} were made from other text; {REMOVE}")


def all_parts(documents: Iterable[Document]) -> Iterator[Chunk]:
    def begin() -> Iterator[Chunk]:
        for document in documents:
            begins = not document.continues
            for piece, loss in document.pieces:
                for text in parts(piece):
                    if text:
                        yield Chunk(document.name, text, loss, begins)
                        begins = False

    for part, after in pairwise(chain(begin(), [None])):
        assert part is not None
        yield Chunk(part.name, part.text, part.loss, part.begins, ends=after is None or after.begins)


def add_to_fingerprint(text: hashlib.blake2b, part: Chunk) -> int:
    """Add a part to the fingerprint of the text; its size in bytes."""
    data = part.text.encode()
    text.update(b"%d %d %d " % (part.begins, part.loss, len(data)))
    text.update(data)
    return len(data)


def encode_in_parallel(stream: Iterator[Chunk], tokenizer: Tokenizer) -> Iterator[list[tuple[Chunk, list[int]]]]:
    """Batches of parts with their ids, in order, while the tokenizer's threads encode the next ones."""

    def result(batch: list[Chunk], encodings: Future[list[Encoding]]) -> list[tuple[Chunk, list[int]]]:
        return [(part, encoding.ids) for part, encoding in zip(batch, encodings.result(), strict=True)]

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        waiting: deque[tuple[list[Chunk], Future[list[Encoding]]]] = deque()
        for batch in batches(stream):
            waiting.append((batch, pool.submit(encode, batch, tokenizer)))
            if len(waiting) > IN_FLIGHT:
                yield result(*waiting.popleft())
        while waiting:
            yield result(*waiting.popleft())


def batches(stream: Iterator[Chunk]) -> Iterator[list[Chunk]]:
    batch: list[Chunk] = []
    characters = 0
    for part in stream:
        batch.append(part)
        characters += len(part.text)
        if characters >= BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode(batch: list[Chunk], tokenizer: Tokenizer) -> list[Encoding]:
    try:
        return tokenizer.encodings([part.text for part in batch])
    except TokenizerError:
        for part in batch:  # find the part that failed
            try:
                tokenizer.encodings([part.text])
            except TokenizerError as error:
                raise DataError(f"{part.name}: {error}") from None
        raise


class Writer:
    """Appends to the current shard, and starts another when it is full."""

    def __init__(self, folder: Path, index: Index, end: int | None, text: hashlib.blake2b, files: ExitStack) -> None:
        self.folder, self.index, self.end, self.text, self.files = folder, index, end, text, files
        self.documents = files.enter_context(open_own(folder / DOCUMENTS, "ab"))
        self.documents.truncate(index.total("documents") * np.dtype(np.int64).itemsize)
        self.bytes_before, self.tokens_before = index.total("bytes"), index.total("tokens")
        self.open()

    def open(self) -> None:
        number = len(self.index.shards)
        self.token_path, self.ignored_path = self.folder / token_file(number), self.folder / ignored_file(number)
        self.file = self.files.enter_context(open_own(part_of(self.token_path), "wb"))
        self.ignored: IO[bytes] | None = None
        self.ids, self.starts = array("I"), array("q")  # not yet written
        self.tokens = self.documents_started = self.bytes = self.scored_bytes = self.parts = 0

    def add(self, part: Chunk, ids: list[int]) -> None:
        if self.tokens >= self.index.shard_tokens:
            self.close()
            self.open()
        size = add_to_fingerprint(self.text, part)
        if part.begins:
            self.starts.append(self.tokens_before + self.tokens)
            self.documents_started += 1
        if part.ends and self.end is not None:
            ids.append(self.end)
        self.ids.fromlist(ids)
        if not part.loss:
            self.ignore(len(ids))
            self.index.chats |= part.text.endswith(ANSWER)
        self.tokens += len(ids)
        self.bytes += size
        self.scored_bytes += size if part.loss else 0
        self.parts += 1

    def ignore(self, count: int) -> None:
        """Mark the next tokens as ignored; what is never marked is a hole in the file, which reads as zeros."""
        if self.ignored is None:
            self.ignored = self.files.enter_context(open_own(part_of(self.ignored_path), "wb"))
        self.ignored.seek(self.tokens)
        self.ignored.write(b"\1" * count)

    def paths(self) -> list[Path]:
        """The files of the current shard."""
        return [self.token_path, *([] if self.ignored is None else [self.ignored_path])]

    def flush(self) -> None:
        self.file.write(np.frombuffer(self.ids, dtype=np.uint32).astype(self.index.dtype).tobytes())
        self.documents.write(self.starts.tobytes())
        self.ids, self.starts = array("I"), array("q")

    def close(self) -> None:
        """Rename the shard's finished files, then add them to the index."""
        self.flush()
        sync(self.documents)
        sync(self.file)
        self.file.close()
        part_of(self.token_path).replace(self.token_path)
        if self.ignored is not None:
            self.ignored.truncate(self.tokens)
            sync(self.ignored)
            self.ignored.close()
            part_of(self.ignored_path).replace(self.ignored_path)
        shard = Shard(
            tokens=self.tokens,
            documents=self.documents_started,
            bytes=self.bytes,
            scored_bytes=self.scored_bytes,
            parts=self.parts,
            text=self.text.hexdigest(),
            ignores=self.ignored is not None,
            digests={path.name: file_digest(path) for path in self.paths()},
        )
        self.index.shards.append(shard)
        self.index.save(self.folder)
        self.tokens_before += self.tokens
        self.bytes_before += self.bytes


def part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def sync(file: IO[bytes]) -> None:
    """Flush the file to disk."""
    file.flush()
    os.fsync(file.fileno())
