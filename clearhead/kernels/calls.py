"""When the compiled kernels can be called, and with how many threads."""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from .build import kernels

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `enum kind` of kernels.c
INT8, INT4 = 3, 4
BLOCK_NAMES = "Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 IQ4_NL Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS"
BLOCKS = {name: INT4 + 1 + i for i, name in enumerate(BLOCK_NAMES.split())}  # types of blocks in GGUF files
JOINED = INT4 + 1 + len(BLOCKS)
SMALL = 1 << 16  # multiplications that one thread does in the time it takes to start a second one
PRODUCT_ROWS = 64  # rows of x up to which a float32 matrix is multiplied by the kernels; torch's product takes more
QUERIES = 32  # new tokens of each row up to which the kernels compute attention; torch is faster for more
WIDEST = 256  # widest head, as in kernels.c


def kernels_on(x: Float[Tensor, "..."]) -> ctypes.CDLL | None:
    """The compiled kernels if they can read x: float32 on the CPU, and no gradient is needed."""
    fits = x.numel() > 0 and x.dtype == torch.float32 and x.is_cpu and not torch.is_autocast_enabled("cpu")
    return kernels() if fits and not (x.requires_grad and torch.is_grad_enabled()) else None


def threads_for(work: int) -> int:
    """Threads for this many multiplications: one if starting more would take longer than they save."""
    return 1 if work < SMALL else torch.get_num_threads()


def readable(vector: Float[Tensor, "..."] | None) -> bool:
    """Whether the kernels can read a bias or a gain in place: contiguous float32 on the CPU, not being trained."""
    if vector is None:
        return True
    return vector.dtype == torch.float32 and vector.is_cpu and vector.is_contiguous() and not vector.requires_grad


def address(x: Tensor | None) -> int | None:
    """The memory address of a tensor, for a pointer in C. Never keep it: tensors are replaced by `load_state_dict`."""
    return None if x is None else x.data_ptr()
