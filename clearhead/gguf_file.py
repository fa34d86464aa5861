"""Open GGUF files, the one-file format of llama.cpp: metadata, and the tensors where they are on the disk.

The file is memory-mapped. Opening reads only the header; long lists of texts are decoded when they are used.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"GGUF"
ALIGNMENT = 32  # of the tensors, if the file does not say
NUMBERS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}
"""NumPy's dtype of each metadata type that is a number."""
TEXT, LIST = 8, 9
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""The tensor types by their numbers: name, numbers in a block, bytes of a block."""
FLOATS = {"F32": "<f4", "F16": "<f2"}


class GGUFError(ValueError):
    """A file is not GGUF, is damaged, or cannot be read."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a file. `data` is mapped: floats in the tensor's shape, or the bytes of each row."""

    name: str
    kind: str
    shape: tuple[int, ...]  # as in NumPy: the last axis is contiguous
    data: np.ndarray


class Texts(Sequence[str]):
    """A list of texts that are decoded when they are used."""

    def __init__(self, data: mmap.mmap, starts: list[int]) -> None:
        self.data, self.starts = data, starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, which: Any) -> Any:
        at = self.starts[which]
        return [self.decode(one) for one in at] if isinstance(which, slice) else self.decode(at)

    def __iter__(self) -> Iterator[str]:
        return map(self.decode, self.starts)

    def decode(self, at: int) -> str:
        (size,) = struct.unpack_from("<Q", self.data, at)
        return self.data[at + 8 : at + 8 + size].decode("utf-8", "replace")


@dataclass(frozen=True)
class GGUFFile:
    """The metadata of a file, and its tensors by name."""

    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file, or all files of a model that is split into several."""
    whole = open_one(path)
    count = whole.fields.get("split.count", 1)
    if count <= 1:
        return whole
    if not (found := re.fullmatch(r"(.*)-00001-of-(\d{5})", path.stem)):
        raise GGUFError(f"{path} is one of {count} files of a model; give the first, …-00001-of-{count:05}.gguf")
    tensors = dict(whole.tensors)
    for i in range(2, count + 1):
        tensors |= open_one(path.with_name(f"{found[1]}-{i:05}-of-{count:05}.gguf")).tensors
    return GGUFFile(whole.fields, tensors)


def open_one(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory that may be written
        return Header(data).read()
    except OSError as error:
        raise GGUFError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        reason = str(error) if isinstance(error, GGUFError) else "the header does not fit the file"
        raise GGUFError(f"{path} is not a GGUF file, or has been cut short: {reason}") from None


class Header:
    """The position in a file while its header is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def read(self) -> GGUFFile:
        if self.data[:4] != MAGIC:
            raise GGUFError("it does not begin with GGUF")
        self.at = 4
        version = self.number("<I")
        if version not in (2, 3):
            raise GGUFError(f"it has version {version}; versions 2 and 3 are supported")
        many, pairs = self.number("<Q"), self.number("<Q")
        fields = {}
        for _ in range(pairs):
            name = self.text()
            fields[name] = self.value(self.number("<I"))
        places = [self.place() for _ in range(many)]
        step = int(fields.get("general.alignment", ALIGNMENT))
        first = -(-self.at // step) * step
        return GGUFFile(fields, {place[0]: self.tensor(*place, first) for place in places})

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self) -> str:
        size = self.number("<Q")
        self.at += size
        if self.at > len(self.data):
            raise GGUFError("a text goes beyond the end")
        return self.data[self.at - size : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            return self.values(self.number("<I"), self.number("<Q"))
        return plain(self.numbers(NUMBERS[kind], 1)[0])

    def values(self, kind: int, count: int) -> Any:
        if kind == LIST:
            return [self.values(self.number("<I"), self.number("<Q")) for _ in range(count)]
        if kind != TEXT:
            return self.numbers(NUMBERS[kind], count).tolist()
        starts, unpack, data, at = [], struct.Struct("<Q").unpack_from, self.data, self.at
        for _ in range(count):
            starts.append(at)
            at += 8 + unpack(data, at)[0]
        if at > len(data):
            raise GGUFError("a list goes beyond the end")
        self.at = at
        return Texts(data, starts)

    def numbers(self, dtype: str, count: int) -> np.ndarray:
        found = np.frombuffer(self.data, dtype, count, self.at)
        self.at += found.nbytes
        return found

    def place(self) -> tuple[str, tuple[int, ...], int, int]:
        """The next tensor's name, shape, type and offset."""
        name, axes = self.text(), self.number("<I")
        if axes > 4:
            raise GGUFError(f"the tensor {name} has {axes} axes")
        shape = tuple(self.number("<Q") for _ in range(axes))[::-1]
        return name, shape, self.number("<I"), self.number("<Q")

    def tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int, first: int) -> GGUFTensor:
        if number not in TYPES:
            raise GGUFError(f"the tensor {name} has the unknown type {number}")
        kind, block, size = TYPES[number]
        if not shape or shape[-1] % block:
            raise GGUFError(f"the tensor {name} of shape {shape} is not a whole number of {kind} blocks")
        count = 1
        for axis in shape:
            count *= axis
        if first + offset + count // block * size > len(self.data):
            raise GGUFError(f"the tensor {name} goes beyond the end")
        if kind in FLOATS:
            data = np.frombuffer(self.data, FLOATS[kind], count, first + offset).reshape(shape)
        else:
            data = np.frombuffer(self.data, np.uint8, count // block * size, first + offset)
            data = data.reshape(*shape[:-1], shape[-1] // block * size)
        return GGUFTensor(name, kind, shape, data)


def plain(number: Any) -> Any:
    """A Python number. Floats have 32 bits: return the shortest equal one, 1e-05 instead of 9.999999747378752e-06."""
    return float(str(number)) if isinstance(number, np.float32) else number.item()
