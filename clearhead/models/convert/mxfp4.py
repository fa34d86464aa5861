"""MXFP4, as gpt-oss stores its experts: numbers of four bits in groups of 32, each group with a power of two.

    value = FP4[nibble] · 2^(scale − 127)         two nibbles in a byte, the low one first

Open Compute Project (2023), "Microscaling formats". Weights are expanded when they are loaded, so a model takes four
times the space of its file in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCKS, SCALES = "_blocks", "_scales"


def expand_mxfp4(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors with every pair `NAME_blocks`, `NAME_scales` expanded to NAME, [experts, in, out]."""
    packed = [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]
    pairs = {name: (tensors[name + BLOCKS], tensors[name + SCALES]) for name in packed if name + SCALES in tensors}
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if name.removesuffix(BLOCKS) not in pairs and name.removesuffix(SCALES) not in pairs
    }
    return kept | {name: expand(*pair, dtype).transpose(1, 2) for name, pair in pairs.items()}


def expand(
    blocks: UInt8[Tensor, "E O N 16"], scales: UInt8[Tensor, "E O N"], dtype: torch.dtype
) -> Float[Tensor, "E O I"]:
    """FP4[nibble] · 2^(scale − 127), with I = 32·N."""
    table = torch.tensor(FP4, dtype=dtype)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1)  # E O N 16 2
    values = table[pairs.int()].flatten(-2)
    return torch.ldexp(values, scales.int().unsqueeze(-1) - 127).to(dtype).flatten(-2)
