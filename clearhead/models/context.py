"""What a model prepares before its first layer runs: the context of one pass, and an empty KV cache."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.configs import Precision
from clearhead.nn.cache import BlockState, DecodeState, StateAllocator, count_positions
from clearhead.nn.context import Context
from clearhead.nn.stack import Stack
from clearhead.nn.tap import Taps


def make_context(
    batch: int,
    length: int,
    device: torch.device,
    *,
    readable: Bool[Tensor, "B T"] | None = None,
    documents: Int[Tensor, "B T"] | None = None,
    positions: Int[Tensor, "B T"] | None = None,
    state: DecodeState | None = None,
    taps: Taps | None = None,
    fused: bool = True,
) -> Context:
    """Build the context of one pass. With a state, positions continue after the tokens it holds."""
    for name, given in {"readable": readable, "documents": documents, "positions": positions}.items():
        if given is not None and given.shape != (batch, length):
            raise ValueError(f"{name} is {tuple(given.shape)}, but there are {batch} rows of {length} tokens")
    if readable is not None and readable.dtype != torch.bool:
        raise ValueError(f"readable is {readable.dtype}, but must be boolean, True where a token is real")
    if state is not None and len(state.lengths) != batch:
        raise ValueError(f"the state holds {len(state.lengths)} rows, but the inputs have {batch}")
    if state is not None and documents is not None:
        raise ValueError("documents cannot be used with a state: each row of a state is one document")
    fresh = state is None or all(slots.filled == 0 for slots in state.slots)
    aligned = fresh and positions is None and readable is None
    if positions is None and state is not None:
        positions = state.next_positions(readable, length)
    elif positions is None:
        positions = count_positions(readable, batch, length, device)
    return Context(positions, positions, readable, documents, aligned=aligned, taps=taps, fused=fused)


def make_state(
    stack: Stack, batch: int, length: int, spare: int, precision: Precision | None, pages: int | None = None
) -> DecodeState:
    """Allocate an empty KV cache for `batch` rows of up to `length` tokens."""
    weight = next(stack.parameters())
    kv_dtype = None if precision is None else getattr(torch, precision.cache)
    allocator = StateAllocator(batch, length, weight.dtype, weight.device, spare, kv_dtype, pages)
    blocks: list[BlockState] = stack.init_state(allocator)
    return DecodeState(
        blocks, list(allocator.slots.values()), torch.zeros(batch, dtype=torch.long, device=weight.device)
    )


def last_real(x: Float[Tensor, "B T D"], readable: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B 1 D"]:
    """The last position of each row that is not padding."""
    if readable is None:
        return x[:, -1:]
    places = torch.arange(x.shape[1], device=x.device)
    last = torch.where(readable, places, 0).argmax(dim=1)
    return x[torch.arange(len(x), device=x.device), last][:, None]


def check_ids(tokens: Tensor) -> None:
    """Raise unless `tokens` are whole numbers of shape [batch, length]."""
    if tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.dim() != 2:
        kind = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        raise ValueError(f"token ids are {kind}, but must be whole numbers of shape [batch, length]")
