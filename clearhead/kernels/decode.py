"""Parts for decoding, which compute in one call of the compiled kernels what their namesakes do in many of torch's.

Each is its namesake with the same children under the same names, and is its namesake where there is a gradient, where
somebody watches, or where many tokens leave nothing to gain; torch's own hooks on its children are called only then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import Cache
from clearhead.kernels.build import Layer, Space, Step, kernels
from clearhead.nn.attention import MultiHeadAttention, attend, merge_heads, split_heads
from clearhead.nn.cache import BlockState, CrossCache, KVCache, MambaState, Slots, StateAllocator
from clearhead.nn.context import Context
from clearhead.nn.ffn import FeedForward, GatedFeedForward
from clearhead.nn.mamba import Mamba
from clearhead.nn.norm import LayerNorm, RMSNorm
from clearhead.nn.packing import DenseRows, dense_rows
from clearhead.nn.rotary import Rotary
from clearhead.nn.stack import Block, Residual, Select, all_positions
from clearhead.precision.matrix import KINDS, Packed, kernels_for, kernels_on, linear, readable, threads_for

MOST = 32  # new tokens of a row; more are better off with torch's kernel
WIDEST = 256  # of a head, in kernels.c
CACHES = (torch.float32, torch.float16)  # that the kernels read
SCANNED = 1 << 12  # numbers of a memory that one thread updates in the time that two need to meet


@dataclass
class FollowedState(KVCache):
    """Keys and values that stay where they were written while rows come, go and change places, as beams do at every
    step: of each slot of a row it is known which row of the buffer holds it."""

    owners: Int[Tensor, "P N"] | None = None  # for as many rows as the buffer has; None: each row's own
    count: int = 0  # rows that there are, where slots have owners

    def select(self, rows: Int[Tensor, "R"]) -> None:
        buffered, _, size, _ = self.key.shape
        if len(rows) > buffered:
            self.settle()
            super().select(rows)
            return
        if self.owners is None:
            self.owners = torch.arange(buffered)[:, None].repeat(1, size)
        self.count, filled = len(rows), self.slots.filled
        self.owners[: self.count, :filled] = self.owners[rows, :filled]

    def settle(self) -> None:
        """Move all to where their row is."""
        if self.owners is None:
            return
        count, filled = self.count, self.slots.filled
        owners, self.owners = self.owners[:count, :filled], None
        moved = (owners != torch.arange(count)[:, None]).any(dim=1).nonzero()[:, 0]
        for buffer in (self.key, self.value):
            buffer[moved, :, :filled] = buffer[owners[moved], :, torch.arange(filled)].transpose(1, 2)
        self.key, self.value = self.key[:count], self.value[:count]

    def append(
        self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T U"], context: Context
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S U"], Context]:
        self.settle()
        return super().append(k, v, context)


class SteppingAttention(MultiHeadAttention):
    """`MultiHeadAttention` with the same weights, quicker where a few tokens follow many that a state holds."""

    cache: Cache = "float32"

    def init_state(self, allocator: StateAllocator) -> KVCache:
        """Keys and values in few bits where the kernels read them so."""
        if allocator.dtype != torch.float32 or allocator.device.type != "cpu" or not self.known or kernels() is None:
            return super().init_state(allocator)
        state = super().init_state(replace(allocator, dtype=getattr(torch, self.cache)))
        return FollowedState(state.slots, state.key, state.value)

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, state: KVCache | CrossCache | None = None
    ) -> Float[Tensor, "B T D"]:
        (batch, length, _), width, library = x.shape, self.heads * self.widths[1], kernels_on(x)
        if isinstance(state, CrossCache):
            if self.rotary is not None or length > MOST or not self.quick(x, context, state.key):
                return super().forward(x, context, state)
            given = self.query_norm(self.project(x, context, state)[0]).transpose(1, 2).contiguous()
            step = self.reading(given, width, context, state)
        else:
            slots = self.slots_of(x, context, state)
            if slots is None or state is None:
                return super().forward(x, context, state)
            given = self.normed(self.qkv(x))
            step = self.described(batch, length, width, context, state, slots)
        assert library is not None, "asked for in quick"
        step.qkv = given.data_ptr()
        if isinstance(state, KVCache) and length > MOST:
            library.keep_new(ctypes.byref(step), threads_for(given.numel()))
            return self.out(merge_heads(self.read_back(given, context, state)))
        out = x.new_empty(batch, length, width)
        step.out = out.data_ptr()
        library.attend(ctypes.byref(step), threads_for(step.batch * step.length * self.heads * step.filled * step.key))
        return self.out(out)

    def read_back(self, qkv: Float[Tensor, "B T R"], context: Context, state: KVCache) -> Float[Tensor, "B H T U"]:
        """Attention of many tokens, turned and kept already, by torch's kernel."""
        q, k, v = (split_heads(part, width) for part, width in zip(qkv.split(self.rows, -1), self.each, strict=True))
        filled = state.slots.filled
        if state.slots.start != 0 or filled != k.shape[2]:  # else all that is read is new, and not rounded
            k, v = (buffer[:, :, :filled].to(qkv.dtype) for buffer in (state.key, state.value))
        return attend([(q, self.mask)], k, v, state.slots.key_context(context))

    @property
    def each(self) -> tuple[int, int, int]:
        """The width of one query, key and value."""
        key, value = self.widths
        return key, key, value

    def normed(self, qkv: Float[Tensor, "B T R"]) -> Float[Tensor, "B T R"]:
        """With queries and keys normed head by head, where they are."""
        queries, keys, _ = self.rows
        if not isinstance(self.query_norm, nn.Identity):
            for norm, first, last in ((self.query_norm, 0, queries), (self.key_norm, queries, queries + keys)):
                heads = qkv[..., first:last]
                heads.copy_(norm(heads.unflatten(-1, (-1, self.widths[0]))).flatten(-2))
        return qkv

    def quick(self, x: Float[Tensor, "B T D"], context: Context, keys: Float[Tensor, "N G S K"]) -> bool:
        """Whether nobody watches, nothing learns, and the kernels know the layer and the types."""
        return (
            not self.training
            and not (torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()))
            and context.taps is None
            and context.fused
            and keys.dtype in CACHES
            and self.known
            and kernels_on(x) is not None
        )

    def slots_of(
        self, x: Float[Tensor, "B T D"], context: Context, state: KVCache | CrossCache | None
    ) -> Int[Tensor, "#B T"] | None:
        """Where the new tokens are kept; None where this is not for the kernels."""
        if not isinstance(state, KVCache) or context.source is not None or not self.quick(x, context, state.key):
            return None
        slots = state.slots
        return context.once(("slots", id(slots)), lambda: places(slots, *x.shape[:2]))

    @cached_property
    def known(self) -> bool:
        """Whether nothing but norms, rotary and mask shapes the scores, and heads are as wide as the kernels take
        them."""
        return (
            self.score_bias is None
            and (self.rotary is None or type(self.rotary) is Rotary)
            and max(self.widths) <= WIDEST
        )

    def described(
        self, batch: int, length: int, stride: int, context: Context, state: KVCache, slots: Int[Tensor, "#B T"]
    ) -> Step:
        """As the kernels see it, but for what they read and write; `context` keeps what it points to."""
        reading = state.slots.key_context(context)
        allowed, owners = None if length > MOST else reading.allowed(self.mask), None
        if isinstance(state, FollowedState):
            if state.slots.start is None or length > MOST:  # where rows write different slots, one may be another's
                state.settle()
            owners = state.owners
        if state.slots.fresh is not None:
            state.key[:, :, state.slots.fresh] = state.value[:, :, state.slots.fresh] = 0
        pairs, cos, sin = 0, None, None
        if self.rotary is not None:
            pairs = self.rotary.width // 2
            cos, sin = self.rotary.angles(context.positions, torch.float32, context)
        (key, value), size = self.widths, state.key.shape[2]
        return Step(
            batch, length, self.heads, self.groups, key, value, size, reading.key_positions.shape[1],
            pairs, self.rotary is not None and self.rotary.config.layout == "interleaved", KINDS[state.key.dtype],
            1, sum(self.rows), stride, *map(apart, (cos, slots, allowed)), key**-0.5,
            None, *map(place, (cos, sin, slots, allowed, owners)), state.key.data_ptr(), state.value.data_ptr(), None,
        )  # fmt: skip

    def reading(self, given: Float[Tensor, "B T H K"], stride: int, context: Context, state: CrossCache) -> Step:
        """The same of queries that read a source."""
        (batch, length, *_), (key, value), size = given.shape, self.widths, state.key.shape[2]
        allowed = context.allowed(self.mask)
        return Step(
            batch, length, self.heads, self.groups, key, value, size, size, 0, False, KINDS[state.key.dtype],
            state.shared, self.rows[0], stride, 0, 0, apart(allowed), key**-0.5,
            None, None, None, None, place(allowed), None, state.key.data_ptr(), state.value.data_ptr(), None,
        )  # fmt: skip


def place(x: Tensor | None) -> int | None:
    """Where the kernels find it."""
    return None if x is None else x.data_ptr()


def apart(x: Tensor | None) -> int:
    """How far a row is from the next; 0 where all rows are alike."""
    return 0 if x is None or len(x) == 1 else x[0].numel()


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
        library = kernels_on(x)
        if library is None or not x.is_contiguous() or not readable(self.weight):
            return super().forward(x)
        out, dim = torch.empty_like(x), len(self.weight)
        many, threads = x.numel() // dim, threads_for(x.numel())
        library.rms_norm(x.data_ptr(), self.weight.data_ptr(), self.eps, out.data_ptr(), dim, many, threads)
        return out


class SteppingFeedForward(GatedFeedForward):
    """down(silu(gate(x)) ⊙ up(x)): gate and up in one pass over x where it is short, and the rest in one pass over them
    where it is long."""

    def forward(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        library = kernels_on(x) if context.taps is None and self.known else None
        if library is None:
            return super().forward(x, context)
        if kernels_for(x) is None:
            opened, passed = self.gate(x), self.up(x)
            library.silu_product(opened.data_ptr(), passed.data_ptr(), opened.numel(), threads_for(opened.numel()))
            return self.down(opened)
        gate, up = cast(Packed, self.gate.weight), cast(Packed, self.up.weight)
        flat, hidden = gate.filled(x), x.new_empty(*x.shape[:-1], gate.rows)
        sizes = flat.data_ptr(), gate.width, hidden.data_ptr(), len(flat), gate.threads(len(flat))
        library.gated(gate.matrix(), up.matrix(), *sizes)
        return self.down(hidden)

    @cached_property
    def known(self) -> bool:
        """Whether it is the one that the kernels know."""
        return self.activation == "silu" and self.gate.bias is None


class SteppingPlainFeedForward(FeedForward):
    """down(max(up(x), 0)): the bias of up is added where what is below zero is cut off."""

    def forward(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        bias, known = self.up.bias, self.activation == "relu" and lie_ready(self.up.bias)
        library = kernels_on(x) if known and unwatched(context) else None
        if library is None:
            return super().forward(x, context)
        hidden = linear(x, self.up.weight)
        width, count = hidden.shape[-1], hidden.numel()
        library.relu(hidden.data_ptr(), place(bias), width, count // width, threads_for(count))
        return self.down(hidden)


class SteppingResidual(Residual):
    """`Residual` whose sum is made where it is normed, if a LayerNorm comes after it."""

    def forward(
        self, x: Float[Tensor, "B T D"], f: Callable[[Tensor], Tensor], context: Context
    ) -> Float[Tensor, "B T D"]:
        library = kernels_on(x) if self.known and unwatched(context) else None
        if library is None:
            return super().forward(x, f, context)
        x, norm = x.contiguous(), cast(LayerNorm, self.after)
        y, out = f(x).contiguous(), torch.empty_like(x)
        given = x.data_ptr(), y.data_ptr(), norm.weight.data_ptr(), place(norm.bias), norm.eps, out.data_ptr()
        library.add_norm(*given, x.shape[-1], x[..., 0].numel(), threads_for(x.numel()))
        return out

    @property
    def known(self) -> bool:
        """Whether nothing is dropped, and the one norm is the one that the kernels know."""
        norm = self.after
        plain = isinstance(self.before, nn.Identity) and isinstance(self.inside, nn.Identity) and not self.training
        return plain and type(norm) is LayerNorm and lie_ready(norm.weight, norm.bias)


def unwatched(context: Context) -> bool:
    """Whether nobody looks at what is between, and nothing learns from it."""
    return context.taps is None and not torch.is_grad_enabled()


def lie_ready(*vectors: Float[Tensor, "_"] | None) -> bool:
    """Whether the kernels can read these, of which nothing learns now."""
    return all(vector is None or readable(vector.detach()) for vector in vectors)


class Parts(NamedTuple):
    """What the kernels read of a block."""

    mixer: SteppingAttention
    matrices: tuple[Packed, ...]  # qkv, out, gate, up, down
    vectors: tuple[Tensor | None, ...]  # the biases of qkv and out, if they have any, and the gains of the two norms
    eps: tuple[float, float]
    widths: tuple[int, ...]  # of a row of qkv, of what attention gives, of what is normed, of the middle, of the hidden


class SteppingBlock(Block):
    """`Block` with the same children, in one call where they are attention and a gated feed-forward layer, each after
    an RMSNorm."""

    @cached_property
    def parts(self) -> Parts | None:
        """The children, looked up once; None where they are not those that the kernels know."""
        mixer, ffn = self.mixer, self.ffn
        residuals = [self.mixer_residual, self.ffn_residual] if ffn is not None and self.cross is None else []
        known = (
            bool(residuals)
            and isinstance(mixer, SteppingAttention)
            and isinstance(mixer.query_norm, nn.Identity)
            and isinstance(ffn, SteppingFeedForward)
            and ffn.known
            and all(isinstance(each.before, SteppingRMSNorm) for each in residuals)
            and all(isinstance(part, nn.Identity) for each in residuals for part in (each.inside, each.after))
        )
        if not known:
            return None
        norms = [each.before for each in residuals]
        matrices = tuple(each.weight for each in (mixer.qkv, mixer.out, ffn.gate, ffn.up, ffn.down))
        qkv, out, _, _, down = matrices
        vectors = mixer.qkv.bias, mixer.out.bias, *(norm.weight for norm in norms)
        widths = qkv.rows, out.width, qkv.width, out.rows, down.width
        return Parts(mixer, matrices, vectors, (norms[0].eps, norms[1].eps), widths)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        context: Context,
        state: BlockState | None = None,
        select: Select = all_positions,
    ) -> Float[Tensor, "B Chosen D"]:
        parts, kept = self.parts, None if state is None else cast(KVCache, state.mixer)
        quick = parts is not None and not self.training and all(map(readable, parts.vectors))
        library = kernels_for(x) if quick else None
        slots = None if library is None or parts is None else parts.mixer.slots_of(x, context, kept)
        if library is None or parts is None or kept is None or slots is None:
            return super().forward(x, context, state, select)
        (batch, length, _), x = x.shape, x.contiguous()
        y, many = torch.empty_like(x), batch * length
        scratch = x.new_zeros(many * sum(parts.widths))
        places = [scratch.data_ptr() + 4 * many * start for start in accumulate(parts.widths[:-1], initial=0)]
        attention = parts.mixer.described(batch, length, parts.widths[1], context, kept, slots)
        attention.qkv, attention.out = places[:2]
        layer = Layer(
            *(ctypes.pointer(packed.matrix()) for packed in parts.matrices),
            *map(place, parts.vectors),
            *parts.eps, x.data_ptr(), y.data_ptr(), *places[2:], attention,
        )  # fmt: skip
        library.block(ctypes.byref(layer), parts.matrices[2].threads(many))
        return select(y)


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
            state.conv.data_ptr(), state.ssm.data_ptr(), conv.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        library.filter(ctypes.byref(space))
        select = self.select(conv)
        step = F.softplus(self.step(select[:, : self.rank]))
        space.step, space.write = step.data_ptr(), select[:, self.rank :].data_ptr()
        space.read = select[:, self.rank + states :].data_ptr()
        library.scan(ctypes.byref(space), 1 if state.ssm.numel() < SCANNED else torch.get_num_threads())
        return self.out(out)

    def can_step(self, x: Float[Tensor, "B T D"], context: Context, state: MambaState) -> bool:
        """Whether nobody watches, nothing is padding, and the kernels know the types."""
        kept = state.ssm, state.conv
        return (
            x.shape[1] == 1
            and context.taps is None
            and context.fused
            and dense_rows(context, len(x)) == DenseRows((len(x), 1), None, None)
            and all(map(readable, (*kept, self.filter, self.filter_bias, self.decay, self.skip)))
            and kernels_for(x) is not None
        )


READY: dict[type[nn.Module], type[nn.Module]] = {
    MultiHeadAttention: SteppingAttention,
    FeedForward: SteppingPlainFeedForward,
    Residual: SteppingResidual,
}
"""What is quicker with matrices as they are."""
QUICKER: dict[type[nn.Module], type[nn.Module]] = READY | {
    Block: SteppingBlock,
    RMSNorm: SteppingRMSNorm,
    GatedFeedForward: SteppingFeedForward,
    Mamba: SteppingMamba,
}
