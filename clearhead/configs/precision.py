"""How the matrices of a finished model are stored: as floats of some width, or as whole numbers with shared scales.

    BFloat16()          16 bits
    Int8(group=32)      w ≈ scale · q,            q in −128 … 127,  8.5 bits
    Int4(group=32)      w ≈ scale · table[q],     q in 0 … 15,      4.5 bits
    Blocks()            each matrix as a GGUF file has it: Q8_0, Q4_K, …

Only what is stored changes: every product is summed in float32, and norms, biases and positions stay in float32. The
keys and values that attention keeps while it decodes are stored too: in `cache`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .base import Config, ConfigError, nearest

Cache = Literal["float32", "float16"]


@dataclass(frozen=True)
class Float32(Config):
    """32-bit floats: the precision in which a model is computed, so nothing is rounded.

    >>> clearhead.quantize(clearhead.build("tiny-gpt"), Float32()).precision
    Float32(cache='float32')
    """

    cache: Cache = "float32"


@dataclass(frozen=True)
class BFloat16(Config):
    """The range of float32 with 8 bits of precision.

    >>> clearhead.quantize(clearhead.build("tiny-gpt"), BFloat16()).precision.cache
    'float16'
    """

    cache: Cache = "float16"


@dataclass(frozen=True)
class Float16(Config):
    """11 bits of precision, up to 65,504.

    >>> clearhead.quantize(clearhead.build("tiny-gpt"), Float16()).precision.cache
    'float16'
    """

    cache: Cache = "float16"


@dataclass(frozen=True)
class Grouped(Config):
    """Codes of few bits; each `group` columns of a row share a scale, a bfloat16."""

    group: int = 32
    cache: Cache = "float16"

    def check(self) -> None:
        if type(self) is Grouped:
            raise ConfigError("Grouped is not a precision of its own; use Int8 or Int4")
        if self.group < 32 or self.group & (self.group - 1):
            raise ConfigError(f"{self.kind()}.group is {self.group}, but must be a power of two from 32 up")


@dataclass(frozen=True)
class Int8(Grouped):
    """Whole numbers from −128 to 127.

    >>> clearhead.quantize(clearhead.build("tiny-gpt"), Int8(group=32)).precision
    Int8(group=32, cache='float16')
    """


@dataclass(frozen=True)
class Int4(Grouped):
    """Places in a table of 16 numbers, which lie closer together near zero, as weights do.

    >>> clearhead.quantize(clearhead.build("tiny-gpt"), Int4(group=32)).precision
    Int4(group=32, cache='float16')
    """


@dataclass(frozen=True)
class Blocks(Config):
    """The blocks of a GGUF file. Each matrix has the type that the file gives it, so `quantize` cannot make them.

    >>> Blocks().cache
    'float16'
    """

    cache: Cache = "float16"


Precision = Float32 | BFloat16 | Float16 | Int8 | Int4 | Blocks
PRECISIONS: dict[str, Precision] = {
    "float32": Float32(),
    "bfloat16": BFloat16(),
    "float16": Float16(),
    "int8": Int8(),
    "int4": Int4(),
}


def precision(name: str) -> Precision:
    """The precision of that name, with the usual groups.

    >>> precision("int4")
    Int4(group=32, cache='float16')
    """
    if name not in PRECISIONS:
        raise ConfigError(f"there is no precision {name!r}{nearest(name, PRECISIONS)}")
    return PRECISIONS[name]
