"""Matrices in the blocks of GGUF files (llama.cpp's Q8_0, Q4_K, …), kept exactly as the file stores them.

A block holds 32 or 256 columns of a row: codes of a few bits, and the numbers that scale and shift them,
`w = scale · code + offset`. Reading a file does not expand the blocks, so they stay memory-mapped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from clearhead.kernels.build import Matrix, kernels
from clearhead.kernels.calls import BLOCKS

from .matrix import Packed, adjoin

SUPER = 256  # columns in one block of the K types
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The table of IQ4_NL and IQ4_XS, whose codes are indices."""


@dataclass(frozen=True)
class BlockType:
    """One type of block: its size, and how its bytes become numbers."""

    columns: int
    bytes: int
    decode: Callable[[UInt8[Tensor, "n b"]], Float[Tensor, "n k"]]


def floats(raw: UInt8[Tensor, "n w"]) -> Float[Tensor, "n h"]:
    """Read bytes as float16 numbers."""
    return raw.contiguous().view(torch.float16).float()


def nibbles(raw: UInt8[Tensor, "... b"]) -> Int[Tensor, "... k"]:
    """Return the low four bits of every byte, then the high ones."""
    return torch.cat((raw & 15, raw >> 4), -1).int()


def bits(raw: UInt8[Tensor, "n 4"]) -> Int[Tensor, "n 32"]:
    """Return the 32 bits of each four bytes, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (raw[..., None] >> shifts & 1).flatten(1).int()


def decode_q8_0(raw: UInt8[Tensor, "n b"]) -> Float[Tensor, "n k"]:
    return floats(raw[:, :2]) * raw[:, 2:].view(torch.int8)


def decode_q4_0(raw: UInt8[Tensor, "n b"]) -> Float[Tensor, "n k"]:
    return floats(raw[:, :2]) * (nibbles(raw[:, 2:]) - 8)


def decode_q4_1(raw: UInt8[Tensor, "n b"]) -> Float[Tensor, "n k"]:
    scale, offset = floats(raw[:, :4]).split(1, 1)
    return scale * nibbles(raw[:, 4:]) + offset


def decode_q5_0(raw: UInt8[Tensor, "n b"]) -> Float[Tensor, "n k"]:
    return floats(raw[:, :2]) * (nibbles(raw[:, 6:]) + 16 * bits(raw[:, 2:6]) - 16)


def decode_q5_1(raw: UInt8[Tensor, "n b"]) -> Float[Tensor, "n k"]:
    scale, offset = floats(raw[:, :4]).split(1, 1)
    return scale * (nibbles(raw[:, 8:]) + 16 * bits(raw[:, 4:8])) + offset


def decode_iq4_nl(raw: UInt8[Tensor, "n b"]) -> Float[Tensor, "n k"]:
    return floats(raw[:, :2]) * torch.tensor(IQ4)[nibbles(raw[:, 2:])]


def scales_and_offsets(raw: UInt8[Tensor, "n 16"]) -> tuple[Float[Tensor, "n 8 1"], Float[Tensor, "n 8 1"]]:
    """Return the scale and the offset of each 32 columns of Q4_K and Q5_K: six bits each, times a float16."""
    whole, packed = floats(raw[:, :4]), raw[:, 4:16]
    first, second, third = packed.split(4, 1)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), 1)
    offsets = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), 1)
    return (whole[:, :1] * scales)[..., None], (whole[:, 1:] * offsets)[..., None]


def decode_q4_k(raw: UInt8[Tensor, "n b"]) -> Float[Tensor, "n k"]:
    scales, offsets = scales_and_offsets(raw[:, :16])
    codes = nibbles(raw[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32)
    return (scales * codes - offsets).flatten(1)


def decode_q5_k(raw: UInt8[Tensor, "n b"]) -> Float[Tensor, "n k"]:
    scales, offsets = scales_and_offsets(raw[:, :16])
    codes = nibbles(raw[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    high = raw[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return (scales * (codes + 16 * high.int()) - offsets).flatten(1)


def decode_q6_k(raw: UInt8[Tensor, "n b"]) -> Float[Tensor, "n k"]:
    low = nibbles(raw[:, :128].unflatten(1, (2, 64))).view(-1, 2, 4, 32)
    shifts = 2 * torch.arange(4, dtype=torch.uint8)[:, None]
    high = (raw[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3).int()
    scales = floats(raw[:, 208:]) * raw[:, 192:208].view(torch.int8)
    return (scales[..., None] * (low + 16 * high - 32).view(-1, 16, 16)).flatten(1)


def decode_q3_k(raw: UInt8[Tensor, "n b"]) -> Float[Tensor, "n k"]:
    shifts = 2 * torch.arange(4, dtype=torch.uint8)[:, None]
    low = (raw[:, 32:96].view(-1, 2, 1, 32) >> shifts & 3).view(-1, 8, 32).int()
    high = raw[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    packed = raw[:, 96:108]
    upper = (packed[:, None, 8:] >> shifts & 3).flatten(1)
    whole = (nibbles(packed[:, :8]) | upper.int() << 4) - 32
    scales = floats(raw[:, 108:]) * whole
    return (scales[..., None] * (low - 4 + 4 * high.int()).view(-1, 16, 16)).flatten(1)


def decode_q2_k(raw: UInt8[Tensor, "n b"]) -> Float[Tensor, "n k"]:
    whole, packed = floats(raw[:, 80:]), raw[:, :16]
    shifts = 2 * torch.arange(4, dtype=torch.uint8)[:, None]
    codes = (raw[:, 16:80].view(-1, 2, 1, 32) >> shifts & 3).view(-1, 16, 16)
    scales, offsets = whole[:, :1] * (packed & 15), whole[:, 1:] * (packed >> 4)
    return (scales[..., None] * codes - offsets[..., None]).flatten(1)


def decode_iq4_xs(raw: UInt8[Tensor, "n b"]) -> Float[Tensor, "n k"]:
    shifts = 2 * torch.arange(4, dtype=torch.uint8)
    low = torch.stack((raw[:, 4:8] & 15, raw[:, 4:8] >> 4), -1).flatten(1).int()
    high = (raw[:, 2:4, None] >> shifts & 3).flatten(1).int()
    scales = floats(raw[:, :2]) * ((low | high << 4) - 32)
    codes = nibbles(raw[:, 8:].unflatten(1, (8, 16)))
    return (scales[..., None] * torch.tensor(IQ4)[codes]).flatten(1)


TYPES = {
    "Q8_0": BlockType(32, 34, decode_q8_0),
    "Q4_0": BlockType(32, 18, decode_q4_0),
    "Q4_1": BlockType(32, 20, decode_q4_1),
    "Q5_0": BlockType(32, 22, decode_q5_0),
    "Q5_1": BlockType(32, 24, decode_q5_1),
    "IQ4_NL": BlockType(32, 18, decode_iq4_nl),
    "Q2_K": BlockType(SUPER, 84, decode_q2_k),
    "Q3_K": BlockType(SUPER, 110, decode_q3_k),
    "Q4_K": BlockType(SUPER, 144, decode_q4_k),
    "Q5_K": BlockType(SUPER, 176, decode_q5_k),
    "Q6_K": BlockType(SUPER, 210, decode_q6_k),
    "IQ4_XS": BlockType(SUPER, 136, decode_iq4_xs),
}
"""By llama.cpp's names. The kernels read all of them."""


class BlockMatrix(Packed):
    """Rows of blocks of one type, byte for byte as in the file."""

    values: UInt8[Tensor, "o b"]

    def __init__(self, values: UInt8[Tensor, "... b"], type_name: str) -> None:
        kind = TYPES[type_name]
        super().__init__(
            len(values) if values.dim() == 3 else None, values.shape[-2], values.shape[-1] // kind.bytes * kind.columns
        )
        self.type_name, self.kind = type_name, BLOCKS[type_name]
        self.register_buffer("values", values.flatten(0, -2))

    def matrix(self) -> Matrix:
        return Matrix(self.kind, 0, self.rows, self.columns, self.columns, self.stored["values"].data_ptr(), 0, 0)

    def dense(self) -> Float[Tensor, "..."]:
        library = kernels() if self.values.is_cpu else None
        if library is None:
            kind = TYPES[self.type_name]
            return kind.decode(self.values.reshape(-1, kind.bytes)).view(self.shape)
        out = torch.empty(self.shape)
        whole = self.matrix()
        whole.rows = len(self.values)
        library.expand(ctypes.byref(whole), out.data_ptr(), torch.get_num_threads())
        return out

    def join(self, others: Sequence[Packed]) -> Packed | None:
        """Blocks of one type become one matrix, without a copy if they follow each other in the file."""
        if any(not isinstance(other, BlockMatrix) or other.type_name != self.type_name for other in others):
            return None
        return BlockMatrix(adjoin([part.stored["values"] for part in (self, *others)]), self.type_name)
