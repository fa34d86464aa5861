"""Packed matrices: weights stored in low precision and multiplied by the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from copy import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from clearhead.configs import BFloat16, Blocks, Float16, Float32, Int8, Precision
from clearhead.kernels.build import Matrix, kernels
from clearhead.kernels.calls import INT4, INT8, JOINED, KINDS, PRODUCT_ROWS, address, kernels_on, readable, threads_for

from .rounding import round_int4, round_int8

FLOATS = {Float32: torch.float32, BFloat16: torch.bfloat16, Float16: torch.float16}


class Packed(nn.Module):
    """A matrix `[rows, columns]`, or a stack of matrices of the same shape. Each subclass is one storage format."""

    kind: int

    def __init__(self, stacked: int | None, rows: int, columns: int) -> None:
        super().__init__()
        self.stacked, self.rows, self.columns = stacked, rows, columns

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, self.columns) if self.stacked is None else (self.stacked, self.rows, self.columns)

    def linear(self, x: Float[Tensor, "... i"], bias: Float[Tensor, "o"] | None = None) -> Float[Tensor, "... o"]:
        """x Wᵀ + b. The kernels read the packed W. If a gradient is needed, torch multiplies by W in float32."""
        library = kernels_on(x) if readable(bias) and self.multiplies(x) else None
        if library is None:
            return F.linear(x, self.dense().to(x.dtype), bias)
        flat, out = self.pad_rows(x), x.new_empty(*x.shape[:-1], self.rows)
        given = address(bias), flat.data_ptr(), self.width, out.data_ptr(), len(flat)
        library.linear(self.matrix(), *given, self.threads(len(flat)))
        return out

    def multiplies(self, x: Float[Tensor, "... i"]) -> bool:
        """Return whether the kernels are at least as fast as torch for this many rows."""
        return True

    def pad_rows(self, x: Float[Tensor, "... i"]) -> Float[Tensor, "n w"]:
        """Flatten x to rows and pad them to the width that the kernels read."""
        missing = self.width - self.columns
        return (F.pad(x, (0, missing)) if missing else x).reshape(-1, self.width).contiguous()

    def threads(self, many: int) -> int:
        return threads_for(self.rows * self.columns * many)

    @property
    def stored(self) -> dict[str, Tensor]:
        """The buffers; faster than attribute lookup on a module."""
        return cast("dict[str, Tensor]", self._buffers)

    @property
    def width(self) -> int:
        """The number of columns including padding."""
        return self.columns

    def matrix(self) -> Matrix:
        """Return the struct that the kernels read, with the tensors' current addresses."""
        raise NotImplementedError

    def _apply(self, fn: Any, recurse: bool = True) -> Packed:
        """Move to another device but keep the dtypes, which the precision determines."""
        for name, tensor in self.stored.items():
            self._buffers[name] = tensor.to(fn(tensor).device)
        return self

    def dense(self) -> Float[Tensor, "..."]:
        """Return the matrix in float32."""
        raise NotImplementedError

    def look_up(self, ids: Int[Tensor, "..."]) -> Float[Tensor, "... i"]:
        """Look up rows of an embedding table."""
        rows = self.gather(ids.flatten()).dense()
        return rows.view(*ids.shape, self.columns)

    def gather(self, ids: Int[Tensor, "n"] | slice) -> Packed:
        """Return a matrix of these rows; a view if `ids` is a slice."""
        some = copy(self)
        some._buffers = {name: tensor if name == "table" else tensor[ids] for name, tensor in self.stored.items()}
        some.stacked, some.rows = None, len(some.stored["values"])
        return some

    def __getitem__(self, which: int | slice) -> Packed:
        """Return one matrix of a stack, or a slice of rows."""
        return self.gather(slice(which * self.rows, (which + 1) * self.rows) if isinstance(which, int) else which)

    def join(self, others: Sequence[Packed]) -> Packed | None:
        """Put others under this matrix in one piece of storage; None if their formats do not allow that."""
        return None

    def concatenate(self, parts: Sequence[Packed]) -> Packed:
        """Return the rows of several matrices under each other. The name is that of NumPy and torch."""
        return join_rows(parts)

    def stack(self, parts: Sequence[Packed]) -> Packed:
        """Stack matrices of the same shape and format, such as those of experts."""
        stacked = copy(parts[0])
        stacked._buffers = {"values": adjoin([part.stored["values"] for part in parts])}
        stacked.stacked = len(parts)
        return stacked

    def extra_repr(self) -> str:
        return "×".join(map(str, self.shape))


class FloatMatrix(Packed):
    """Floats of 32 or 16 bits, row by row."""

    values: Float[Tensor, "o i"]

    def __init__(self, weight: Float[Tensor, "..."], precision: Float32 | BFloat16 | Float16) -> None:
        super().__init__(*sizes(weight))
        self.register_buffer(
            "values", weight.detach().reshape(-1, self.columns).to(FLOATS[type(precision)]).contiguous()
        )

    def matrix(self) -> Matrix:
        values = self.stored["values"]
        return Matrix(KINDS[values.dtype], 0, self.rows, self.columns, self.columns, values.data_ptr(), 0, 0)

    def multiplies(self, x: Float[Tensor, "... i"]) -> bool:
        return self.stored["values"].dtype != torch.float32 or x.numel() <= PRODUCT_ROWS * x.shape[-1]

    def dense(self) -> Float[Tensor, "..."]:
        return self.values.float().view(self.shape)


class GroupMatrix(Packed):
    """Codes in groups of columns that share a scale. Rows are padded with zeros to whole groups and strides."""

    values: Int[Tensor, "o w"]
    scales: Float[Tensor, "o g"]
    table: Float[Tensor, "16"]
    run: int  # columns in one stride of the kernel

    def __init__(self, weight: Float[Tensor, "..."], group: int, moments: Float[Tensor, "i i"] | None = None) -> None:
        super().__init__(*sizes(weight))
        self.group = group
        flat = weight.detach().reshape(-1, self.columns).float()
        for name, tensor in self.store(F.pad(flat, (0, self.width - self.columns)), moments).items():
            self.register_buffer(name, tensor)

    def store(self, weight: Float[Tensor, "o w"], moments: Float[Tensor, "i i"] | None) -> dict[str, Tensor]:
        """Return the buffers for a padded matrix."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        step = max(self.group, self.run)
        return -(-self.columns // step) * step

    def matrix(self) -> Matrix:
        stored = self.stored
        table = stored["table"].data_ptr() if "table" in stored else 0
        shift = self.group.bit_length() - 1
        values, scales = stored["values"].data_ptr(), stored["scales"].data_ptr()
        return Matrix(self.kind, shift, self.rows, self.columns, self.width, values, scales, table)

    def dense(self) -> Float[Tensor, "..."]:
        library = kernels() if self.values.is_cpu else None
        if library is None:
            scaled = self.codes().unflatten(1, (-1, self.group)) * self.scales.float()[..., None]
            return scaled.flatten(1)[:, : self.columns].reshape(self.shape)
        out = torch.empty(self.shape, dtype=torch.float32, device=self.values.device)
        whole = self.matrix()
        whole.rows = len(self.values)
        library.expand(ctypes.byref(whole), out.data_ptr(), torch.get_num_threads())
        return out

    def codes(self) -> Float[Tensor, "o w"]:
        """Return the unscaled values, which the scales multiply."""
        raise NotImplementedError


class Int8Matrix(GroupMatrix):
    """Integers from −128 to 127, one byte each."""

    kind, run = INT8, 64

    def store(self, weight: Float[Tensor, "o w"], moments: Float[Tensor, "i i"] | None) -> dict[str, Tensor]:
        values, scales = round_int8(weight, self.group)
        return {"values": values, "scales": scales}

    def codes(self) -> Float[Tensor, "o w"]:
        return self.values.float()


class Int4Matrix(GroupMatrix):
    """Indices into a table of 16, eight per word. In each 128 columns, word i holds columns i, 16 + i, … 112 + i."""

    kind, run = INT4, 128

    def store(self, weight: Float[Tensor, "o w"], moments: Float[Tensor, "i i"] | None) -> dict[str, Tensor]:
        places, scales, table = round_int4(weight, self.group, moments)
        words = places.int().view(len(weight), -1, 8, 16)
        shifts = 4 * torch.arange(8, dtype=torch.int32, device=weight.device)[:, None]
        return {"values": (words << shifts).sum(2, dtype=torch.int32).flatten(1), "scales": scales, "table": table}

    def codes(self) -> Float[Tensor, "o w"]:
        shifts = 4 * torch.arange(8, dtype=torch.int32, device=self.values.device)[:, None]
        places = (self.values.view(len(self.values), -1, 1, 16) >> shifts) & 15
        return self.table.bfloat16().float()[places.flatten(1)]


class JoinedMatrix(Packed):
    """The rows of several matrices under each other, each in its own format: a layer's queries, keys and values."""

    kind = JOINED

    def __init__(self, parts: Sequence[Packed]) -> None:
        super().__init__(None, sum(part.rows for part in parts), parts[0].columns)
        self.parts = nn.ModuleList(parts)

    def matrix(self) -> Matrix:
        parts = (Matrix * len(self.parts))(*(cast(Packed, part).matrix() for part in self.parts))
        made = Matrix(self.kind, len(parts), self.rows, self.columns, self.width, 0, 0, 0)
        made.parts = ctypes.cast(parts, ctypes.POINTER(Matrix))  # ctypes keeps the array as long as the struct
        return made

    def dense(self) -> Float[Tensor, "o i"]:
        return torch.cat([cast(Packed, part).dense() for part in self.parts])

    def gather(self, ids: Int[Tensor, "n"] | slice) -> Packed:
        """Return a matrix of the rows of a slice."""
        assert isinstance(ids, slice), "only embedding tables are read by single rows, and they are not joined"
        first, last, _ = ids.indices(self.rows)
        chosen, at = [], 0
        for part in self.parts:
            assert isinstance(part, Packed)
            low, high = max(first - at, 0), min(last - at, part.rows)
            if low < high:
                chosen.append(part if high - low == part.rows else part.gather(slice(low, high)))
            at += part.rows
        return join_rows(chosen)


def join_rows(parts: Sequence[Packed]) -> Packed:
    """Put matrices of the same width under each other, in one piece of storage if their formats allow it."""
    if len(parts) == 1:
        return parts[0]
    joined = parts[0].join(parts[1:])
    return JoinedMatrix(parts) if joined is None else joined


def adjoin(tensors: Sequence[UInt8[Tensor, "_ b"]]) -> UInt8[Tensor, "_ b"]:
    """Concatenate rows of bytes; without a copy if they follow each other in memory, as a file's experts do."""
    first, at = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != at or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(tensors))
        at += tensor.nbytes
    return first.as_strided((sum(map(len, tensors)), first.shape[1]), first.stride())


def pack(weight: Any, precision: Precision, moments: Float[Tensor, "i i"] | None = None) -> Packed:
    """Pack the weight in this precision. `moments`, Σ x xᵀ over inputs x, weights the rounding errors.

    A weight that is packed already, as blocks of a GGUF file are, stays as it is.
    """
    if isinstance(weight, Packed):
        return weight
    if isinstance(precision, Float32 | BFloat16 | Float16):
        return FloatMatrix(weight, precision)
    if isinstance(precision, Blocks):
        raise ValueError("only GGUF files hold blocks; quantise to float16, bfloat16, int8 or int4")
    kind = Int8Matrix if isinstance(precision, Int8) else Int4Matrix
    return kind(weight, precision.group, moments)


def sizes(weight: Float[Tensor, "..."]) -> tuple[int | None, int, int]:
    """Return the number of matrices (None for a single one), rows and columns."""
    if weight.dim() not in (2, 3):
        raise ValueError(f"a weight of shape {tuple(weight.shape)} is no matrix, so it has no rows to pack")
    return len(weight) if weight.dim() == 3 else None, *weight.shape[-2:]


class Linear(nn.Linear):
    """A linear layer whose weight may be packed. Layers that must stay in float32, such as routers, use `nn.Linear`."""

    weight: Any

    def forward(self, x: Float[Tensor, "... i"]) -> Float[Tensor, "... o"]:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """An embedding table whose rows may be packed."""

    weight: Any

    def forward(self, ids: Int[Tensor, "..."]) -> Float[Tensor, "... D"]:
        return F.embedding(ids, self.weight) if isinstance(self.weight, Tensor) else self.weight.look_up(ids)


def linear(x: Float[Tensor, "... i"], weight: Any, bias: Float[Tensor, "o"] | None = None) -> Float[Tensor, "... o"]:
    """x Wᵀ + b for a tensor or a packed matrix."""
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight.linear(x, bias)


def dense(weight: Any) -> Float[Tensor, "..."]:
    """Return the weight as a dense tensor."""
    return weight if isinstance(weight, Tensor) else weight.dense()
