"""Parts for decoding, which compute in one call of the compiled kernels what their namesakes do in many of torch's.

Each is its namesake with the same children under the same names, and is its namesake where there are many tokens, a
gradient, or somebody who watches.
"""

from __future__ import annotations

import ctypes
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.precision.kernels import Space, Step
from clearhead.precision.matrix import SMALL, Packed, kernels_for

from .attention import MultiHeadAttention
from .context import Context
from .ffn import GatedFeedForward
from .lanes import Lanes, lanes
from .mamba import Mamba
from .norm import RMSNorm
from .rotary import Rotary
from .state import KVState, MambaState, Slots, SourceState

MOST = 8  # new tokens of a row; more are better off with torch's kernel
WIDEST = 256  # of a head, in kernels.c
SCANNED = 1 << 12  # numbers of a memory that one thread updates in the time that two need to meet


class SteppingAttention(MultiHeadAttention):
    """`MultiHeadAttention` with the same weights, quicker where a few tokens follow many that a state holds."""

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, state: KVState | SourceState | None = None
    ) -> Float[Tensor, "B T D"]:
        if not isinstance(state, KVState) or x.shape[1] > MOST or not self.can_step(x, context, state):
            return super().forward(x, context, state)
        slots = context.once(("slots", id(state.slots)), lambda: places(state.slots, *x.shape[:2]))
        if slots is None:
            return super().forward(x, context, state)
        return self.out(self.step(self.qkv(x), context, state, slots))

    def can_step(self, x: Float[Tensor, "B T D"], context: Context, state: KVState) -> bool:
        """Whether nobody watches, nothing but rotary and mask shapes the scores, and the kernels know the types."""
        return (
            context.taps is None
            and context.fused
            and context.source is None
            and self.score_bias is None
            and (self.rotary is None or type(self.rotary) is Rotary)
            and isinstance(self.query_norm, nn.Identity)
            and max(self.widths) <= WIDEST
            and state.key.dtype == torch.float32
            and kernels_for(x) is not None
        )

    def step(
        self, qkv: Float[Tensor, "B T J"], context: Context, state: KVState, slots: Int[Tensor, "#B T"]
    ) -> Float[Tensor, "B T HU"]:
        (batch, length, _), (key, value) = qkv.shape, self.widths
        reading = state.slots.reading(context)
        allowed = reading.allowed(self.mask)
        pairs, cos, sin = 0, None, None
        if self.rotary is not None:
            pairs = self.rotary.width // 2
            cos, sin = self.rotary.angles(context.positions, torch.float32, context)
        out = qkv.new_empty(batch, length, self.heads * value)
        step = Step(
            batch, length, self.heads, self.groups, key, value, state.key.shape[2], reading.key_positions.shape[1],
            pairs, self.rotary is not None and self.rotary.config.layout == "interleaved",
            *(0 if each is None or len(each) == 1 else each[0].numel() for each in (cos, slots, allowed)),
            key**-0.5,
            qkv.data_ptr(),
            *(0 if each is None else each.data_ptr() for each in (cos, sin, slots, allowed)),
            state.key.data_ptr(), state.value.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        library = kernels_for(qkv)
        assert library is not None, "asked for in can_step"
        small = batch * length * self.heads * reading.key_positions.shape[1] * key < SMALL
        library.attend(ctypes.byref(step), 1 if small else torch.get_num_threads())
        return out


def places(slots: Slots, batch: int, length: int) -> Int[Tensor, "#B T"] | None:
    """The slot of each new token; None where some are not kept, or are read from beside the cache."""
    if slots.beside:
        return None
    if slots.start is not None:
        return torch.arange(slots.start, slots.start + length)[None]
    return slots.slots.view(batch, length) if slots.slots is not None and len(slots.slots) == batch * length else None


class SteppingRMSNorm(RMSNorm):
    """γ·x/√(mean(x²) + ε)."""

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        library = kernels_for(x)
        if library is None or not x.is_contiguous() or self.weight.requires_grad:
            return super().forward(x)
        out, dim = torch.empty_like(x), len(self.weight)
        many = x.numel() // dim
        library.rms_norm(x.data_ptr(), self.weight.data_ptr(), self.eps, out.data_ptr(), dim, many)
        return out


class SteppingFeedForward(GatedFeedForward):
    """down(silu(gate(x)) ⊙ up(x)), gate and up in one pass over x."""

    def forward(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        library = kernels_for(x) if context.taps is None and self.activation == "silu" else None
        if library is None or self.gate.bias is not None:
            return super().forward(x, context)
        gate, up = cast(Packed, self.gate.weight), cast(Packed, self.up.weight)
        flat, hidden = gate.filled(x), x.new_empty(*x.shape[:-1], gate.rows)
        sizes = flat.data_ptr(), gate.width, hidden.data_ptr(), len(flat), gate.threads(len(flat))
        library.gated(gate.matrix(), up.matrix(), *sizes)
        return self.down(hidden)


class SteppingMamba(Mamba):
    """`Mamba` with the same weights, quicker where one token follows what a state holds."""

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, state: MambaState | None = None
    ) -> Float[Tensor, "B T D"]:
        if state is None or not self.can_step(x, context, state):
            return super().forward(x, context, state)
        library, (states, inner), given = kernels_for(x), self.decay.shape, self.input(x)
        assert library is not None, "asked for in can_step"
        conv, out = x.new_empty(len(x), inner), x.new_empty(len(x), 1, inner)
        bias = 0 if self.filter_bias is None else self.filter_bias.data_ptr()
        space = Space(
            len(x), inner, states, len(self.filter) - 1, 2 * inner, self.rank + 2 * states,
            given.data_ptr(), self.filter.data_ptr(), bias, 0, 0, 0, self.decay.data_ptr(), self.skip.data_ptr(),
            state.recent.data_ptr(), state.memory.data_ptr(), conv.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        library.filter(ctypes.byref(space))
        select = self.select(conv)
        step = F.softplus(self.step(select[:, : self.rank]))
        space.step, space.write = step.data_ptr(), select[:, self.rank :].data_ptr()
        space.read = select[:, self.rank + states :].data_ptr()
        library.scan(ctypes.byref(space), 1 if state.memory.numel() < SCANNED else torch.get_num_threads())
        return self.out(out)

    def can_step(self, x: Float[Tensor, "B T D"], context: Context, state: MambaState) -> bool:
        """Whether nobody watches, nothing is padding, and the kernels know the types."""
        kept = state.memory, state.recent
        return (
            x.shape[1] == 1
            and context.taps is None
            and context.fused
            and lanes(context, len(x)) == Lanes((len(x), 1), None, None)
            and all(part.dtype == torch.float32 and part.is_contiguous() for part in kept)
            and kernels_for(x) is not None
        )


QUICKER: dict[type[nn.Module], type[nn.Module]] = {
    MultiHeadAttention: SteppingAttention,
    RMSNorm: SteppingRMSNorm,
    GatedFeedForward: SteppingFeedForward,
    Mamba: SteppingMamba,
}
