"""Parts of a model that run on the compiled kernels: the same weights under the same names, one call instead of many.

Each part falls back to its base class if a gradient is needed, a tap reads or replaces a value, or there are so many
tokens that torch is as fast. PyTorch hooks on a part's children run only in that case. Nothing is remembered between
calls: every call reads the tensors that the part holds at that moment.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import GatedFeedForwardConfig
from clearhead.configs.masks import check_causal
from clearhead.nn.attention import MultiHeadAttention, attend, merge_heads, split_heads
from clearhead.nn.cache import BlockState, CrossCache, KVCache, PagedKVCache, Slots, StateAllocator
from clearhead.nn.context import Context
from clearhead.nn.ffn import FeedForward, GatedFeedForward
from clearhead.nn.mamba import Mamba, MambaState
from clearhead.nn.norm import HeadwiseNorm, LayerNorm, ProjectionNorm, RMSNorm
from clearhead.nn.packing import DenseRows, dense_rows
from clearhead.nn.pages import PAGE, Pages
from clearhead.nn.rotary import Rotary
from clearhead.nn.stack import Block, Residual, Select, all_positions
from clearhead.precision.matrix import Int4Matrix, Packed, linear

from .build import AttentionArguments, LayerArguments, WorkSpace, kernels
from .calls import KINDS, QUERIES, WIDEST, address, kernels_on, readable, threads_for

SCAN_ALONE = 1 << 12  # numbers of a Mamba state up to which one thread is faster than several


class Reads(NamedTuple):
    """Which slots the tokens of a pass write and read, for `attend` of kernels.c. The pass keeps these tensors."""

    rows: Int[Tensor, "W"]  # each token's row of the page table
    slots: Int[Tensor, "W"] | None  # the slot it is written to; −1: none
    lengths: Int[Tensor, "W"]  # how many slots it reads
    mask: Tensor | None  # [W, S]: which of them it may read; None: all
    table: Int[Tensor, "B P"]


class KernelAttention(MultiHeadAttention):
    """`MultiHeadAttention` over a cache of pages."""

    def init_state(self, allocator: StateAllocator) -> KVCache:
        """Pages in the precision that the allocator asks for, if the kernels support this layer."""
        if (
            allocator.dtype != torch.float32
            or allocator.device.type != "cpu"
            or not self.supported
            or kernels() is None
        ):
            return super().init_state(allocator)
        check_causal(self.mask)
        slots, dtype = allocator.slots_for(self.ring), allocator.kv_dtype or allocator.dtype
        if slots.pages is None:
            rows, size = slots.positions.shape
            slots.pages = Pages(rows, size, allocator.device, None if slots.ring else allocator.pages)
        key, value = (torch.empty(slots.pages.count, self.groups, PAGE, width, dtype=dtype) for width in self.widths)
        return PagedKVCache(slots, key, value)

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, state: KVCache | CrossCache | None = None
    ) -> Float[Tensor, "B T D"]:
        length, library = x.shape[1], kernels_on(x)
        if library is None or not self.runs(context):
            return super().forward(x, context, state)
        if isinstance(state, CrossCache) and self.rotary is None and length <= QUERIES:
            queries = self.query_norm(self.project(x, context, state)[0]).transpose(1, 2).contiguous()
            step = self.read_source(queries, context, state)
        elif isinstance(state, PagedKVCache) and context.source is None and not state.slots.beside:
            queries = self.norm_heads(self.qkv(x).contiguous())
            step = self.read_cache(queries, context, state)
        else:
            return super().forward(x, context, state)
        if isinstance(state, PagedKVCache) and length > QUERIES:
            library.write_kv(ctypes.byref(step), threads_for(queries.numel()))
            return self.out(merge_heads(self.read_prompt(queries, context, state)))
        out = x.new_empty(*x.shape[:2], self.heads * self.widths[1])
        step.out, step.out_stride = out.data_ptr(), out.shape[2]
        library.attend(ctypes.byref(step), threads_for(queries.numel() * state.key.shape[2]))
        return self.out(out)

    def runs(self, context: Context) -> bool:
        """Whether no tap and no gradient needs the steps in between."""
        return (
            context.taps is None
            and context.fused
            and (context.score_bias is None or context.source is not None)
            and not self.training
            and self.supported
            and not (torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()))
        )

    @property
    def supported(self) -> bool:
        """Whether the kernels have all of this layer: norms, plain rotary positions and masks, heads not too wide."""
        modules = self._modules
        rotary = modules.get("rotary")
        return (
            modules.get("score_bias") is None
            and self.scale is None
            and self.softcap is None
            and self.clip is None
            and modules.get("sinks") is None
            and not isinstance(modules["query_norm"], ProjectionNorm | HeadwiseNorm)
            and (rotary is None or type(rotary) is Rotary)
            and max(self.widths) <= WIDEST
        )

    def norm_heads(self, qkv: Float[Tensor, "B T R"]) -> Float[Tensor, "B T R"]:
        """Normalize queries and keys head by head, in place, if the layer does so."""
        queries, keys, _ = self.rows
        if not isinstance(self.query_norm, nn.Identity):
            for norm, first, last in ((self.query_norm, 0, queries), (self.key_norm, queries, queries + keys)):
                heads = qkv[..., first:last]
                heads.copy_(norm(heads.unflatten(-1, (-1, self.widths[0]))).flatten(-2))
        return qkv

    def read_cache(
        self, qkv: Float[Tensor, "B T R"] | None, context: Context, state: PagedKVCache
    ) -> AttentionArguments:
        """The call of the kernels for new tokens of the rows of a state, without `out`. `context` owns the tensors."""
        state.prepare()
        length = context.positions.shape[1]
        reads = context.once(
            ("reads", id(state.slots), self.mask), lambda: cache_reads(context, state.slots, self.mask, length)
        )
        rotary, cos, sin, pairs, interleaved = self._modules.get("rotary"), None, None, 0, False
        if rotary is not None:
            assert isinstance(rotary, Rotary)
            pairs, interleaved = rotary.width // 2, rotary.config.layout == "interleaved"
            cos, sin = rotary.angles(context.positions, torch.float32, context)
        return self.call(reads, state.key, state.value, PAGE, sum(self.rows), qkv, cos, sin, pairs, interleaved)

    def read_source(self, queries: Float[Tensor, "B T H K"], context: Context, state: CrossCache) -> AttentionArguments:
        """The arguments for queries that read a source. Each row of the source is one page."""
        (batch, length), (sources, _, size, _) = queries.shape[:2], state.key.shape

        def make() -> Reads:
            rows = torch.arange(batch).repeat_interleave(length) // state.shared
            mask = context.attention_mask(self.mask)
            if mask is not None:
                mask = mask.expand(sources, 1, state.shared * length, size).reshape(-1, size).contiguous()
            table = torch.arange(sources)[:, None].contiguous()
            return Reads(rows, None, torch.full_like(rows, size), mask, table)

        reads = context.once(("reads of a source", self.mask, batch, length, size), make)
        return self.call(reads, state.key, state.value, size, self.rows[0], queries)

    def call(
        self, reads: Reads, keys: Tensor, values: Tensor, page: int, stride: int, qkv: Tensor | None,
        cos: Tensor | None = None, sin: Tensor | None = None, pairs: int = 0, interleaved: bool = False,
    ) -> AttentionArguments:  # fmt: skip
        key, value = self.widths
        rows, slots, lengths, mask, table = reads
        angles = 1 if cos is None else cos.shape[0] * cos.shape[2]
        return AttentionArguments(
            len(rows), self.heads, self.groups, key, value,
            page, table.shape[1], 0 if mask is None else mask.shape[1], pairs, interleaved, angles, KINDS[keys.dtype],
            stride, self.heads * value, key**-0.5,
            address(qkv), address(cos), address(sin), rows.data_ptr(), address(slots), lengths.data_ptr(),
            address(mask), table.data_ptr(), keys.data_ptr(), values.data_ptr(), None,
        )  # fmt: skip

    def read_prompt(
        self, qkv: Float[Tensor, "B T R"], context: Context, state: PagedKVCache
    ) -> Float[Tensor, "B H T U"]:
        """Attention of many tokens, rotated and written already, by torch's kernel."""
        (key, value), slots = self.widths, state.slots
        widths = (key, key, value)
        q, k, v = (split_heads(part, width) for part, width in zip(qkv.split(self.rows, -1), widths, strict=True))
        if slots.start != 0 or slots.filled != k.shape[2]:
            k, v = (state.gather(buffer, slots.filled).to(qkv.dtype) for buffer in (state.key, state.value))
        return attend([(q, self.mask)], k, v, slots.key_context(context))


def cache_reads(context: Context, slots: Slots, mask: Any, length: int) -> Reads:
    """What the new tokens of every row write and read. Under a causal mask a length says it all."""
    at, pages = slots.written_slots(length), slots.pages
    assert pages is not None
    rows = torch.arange(len(at)).repeat_interleave(length)
    written, table = at.flatten(), pages.table.contiguous()
    if length > QUERIES:  # torch computes the attention
        return Reads(rows, written, torch.zeros_like(written), None, table)
    if mask.kind() == "Causal" and slots.gapless:
        return Reads(rows, written, written + 1, None, table)
    reading = slots.key_context(context)
    allowed, size = reading.attention_mask(mask), reading.key_positions.shape[1]
    lengths = torch.where(written >= 0, size, 0)
    if allowed is not None:
        allowed = allowed.expand(len(at), 1, length, size).reshape(-1, size).contiguous()
    return Reads(rows, written, lengths, allowed, table)


class KernelRMSNorm(RMSNorm):
    """γ·x/√(mean(x²) + ε)."""

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        library = kernels_on(x)
        if library is None or not x.is_contiguous() or not readable(self.weight):
            return super().forward(x)
        out, dim = torch.empty_like(x), len(self.weight)
        many, threads = x.numel() // dim, threads_for(x.numel())
        library.rms_norm(x.data_ptr(), self.weight.data_ptr(), self.eps, out.data_ptr(), dim, many, threads)
        return out


class KernelGatedFeedForward(GatedFeedForward):
    """down(silu(gate(x)) ⊙ up(x)): gate and up in one pass over x; of many rows, the activation in one pass."""

    def forward(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        library = kernels_on(x) if context.taps is None and self.supported else None
        if library is None:
            return super().forward(x, context)
        gate, up = cast(Packed, self.gate.weight), cast(Packed, self.up.weight)
        if not gate.multiplies(x):
            opened, passed = self.gate(x), self.up(x)
            library.silu_product(opened.data_ptr(), passed.data_ptr(), opened.numel(), threads_for(opened.numel()))
            return self.down(opened)
        flat, hidden = gate.pad_rows(x), x.new_empty(*x.shape[:-1], gate.rows)
        sizes = flat.data_ptr(), gate.width, hidden.data_ptr(), len(flat), gate.threads(len(flat))
        library.gated(gate.matrix(), up.matrix(), *sizes)
        return self.down(hidden)

    @property
    def supported(self) -> bool:
        """Whether the kernels have this layer: SiLU, no biases, packed matrices."""
        gate, up = (self._modules[name]._modules.get("weight") for name in ("gate", "up"))  # type: ignore[union-attr]
        packed = isinstance(gate, Packed) and isinstance(up, Packed)
        alike = isinstance(gate, Int4Matrix) == isinstance(up, Int4Matrix)  # the kernels read int4 in another order
        plain = type(self.config) is GatedFeedForwardConfig and self.activation == "silu" and self.gate.bias is None
        return packed and alike and plain


class KernelFeedForward(FeedForward):
    """down(max(up(x), 0)): the bias of `up` is added in the same pass that cuts off negative numbers."""

    def forward(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        bias, known = self.up.bias, self.activation == "relu" and all_readable(self.up.bias)
        library = kernels_on(x) if known and is_unobserved(context) else None
        if library is None:
            return super().forward(x, context)
        hidden = linear(x, self.up.weight)
        width, count = hidden.shape[-1], hidden.numel()
        library.relu(hidden.data_ptr(), address(bias), width, count // width, threads_for(count))
        return self.down(hidden)


class KernelResidual(Residual):
    """`Residual` that adds and normalizes in one pass if a LayerNorm follows the sum."""

    def forward(
        self, x: Float[Tensor, "B T D"], f: Callable[[Tensor], Tensor], context: Context
    ) -> Float[Tensor, "B T D"]:
        library = kernels_on(x) if self.supported and is_unobserved(context) else None
        if library is None:
            return super().forward(x, f, context)
        x, norm = x.contiguous(), cast(LayerNorm, self.after)
        y, out = f(x).contiguous(), torch.empty_like(x)
        given = x.data_ptr(), y.data_ptr(), norm.weight.data_ptr(), address(norm.bias), norm.eps, out.data_ptr()
        library.add_norm(*given, x.shape[-1], x[..., 0].numel(), threads_for(x.numel()))
        return out

    @property
    def supported(self) -> bool:
        """Whether a LayerNorm after the sum is the only norm, and there is no dropout."""
        norm = self.after
        plain = isinstance(self.before, nn.Identity) and isinstance(self.inside, nn.Identity) and not self.training
        return plain and self.scale == 1 and type(norm) is LayerNorm and all_readable(norm.weight, norm.bias)


def is_unobserved(context: Context) -> bool:
    """Whether no tap and no gradient needs the values in between."""
    return context.taps is None and not torch.is_grad_enabled()


def all_readable(*vectors: Float[Tensor, "_"] | None) -> bool:
    """Whether the kernels can read these parameters while no gradient is needed."""
    return all(vector is None or readable(vector.detach()) for vector in vectors)


class BlockParts(NamedTuple):
    """What the kernels read of a block, for one call."""

    mixer: KernelAttention
    matrices: tuple[Packed, ...]  # qkv, out, gate, up, down
    vectors: tuple[Tensor | None, ...]  # the biases of qkv and out, if any, and the gains of the two norms
    eps: tuple[float, float]


class KernelBlock(Block):
    """`Block` in one call if it is attention and a gated feed-forward layer, each after an RMSNorm."""

    def block_parts(self) -> BlockParts | None:
        """The parts as they are now; None if the kernels do not have such a block.

        Children are read from the dictionaries of their modules: attribute access of a module costs ten times as much.
        """
        own = self._modules
        mixer, ffn = own["mixer"], own.get("ffn")
        if not (isinstance(mixer, KernelAttention) and isinstance(ffn, KernelGatedFeedForward)):
            return None
        if own.get("cross") is not None or not ffn.supported:
            return None
        if any(cast(Residual, own[name]).scale != 1 for name in ("mixer_residual", "ffn_residual")):
            return None
        of_mixer, of_ffn = mixer._modules, ffn._modules
        first, second = (cast(nn.Module, own[name])._modules for name in ("mixer_residual", "ffn_residual"))
        identities = (of_mixer["query_norm"], first["inside"], first["after"], second["inside"], second["after"])
        norms = first["before"], second["before"]
        if not all(isinstance(part, nn.Identity) for part in identities):
            return None
        if not all(isinstance(norm, KernelRMSNorm) for norm in norms):
            return None
        layers = cast(Any, (of_mixer["qkv"], of_mixer["out"], of_ffn["gate"], of_ffn["up"], of_ffn["down"]))
        matrices = tuple(layer._modules.get("weight") for layer in layers)
        if not all(isinstance(matrix, Packed) for matrix in matrices):
            return None
        first_norm, second_norm = cast(Any, norms)
        biases = (layer._parameters.get("bias") for layer in layers[:2])
        vectors = (*biases, first_norm._parameters["weight"], second_norm._parameters["weight"])
        return BlockParts(mixer, cast("tuple[Packed, ...]", matrices), vectors, (first_norm.eps, second_norm.eps))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        context: Context,
        state: BlockState | None = None,
        select: Select = all_positions,
    ) -> Float[Tensor, "B Chosen D"]:
        kept = None if state is None else state.mixer
        library = kernels_on(x) if isinstance(kept, PagedKVCache) and not self.training else None
        parts = None if library is None else self.block_parts()
        if library is None or parts is None or not isinstance(kept, PagedKVCache):
            return super().forward(x, context, state, select)
        fits = not kept.slots.beside and context.source is None and parts.mixer.runs(context)
        if not fits or not all(map(readable, parts.vectors)) or x.shape[1] > QUERIES:
            return super().forward(x, context, state, select)
        x = x.contiguous()
        y, many = torch.empty_like(x), x.shape[0] * x.shape[1]
        qkv, out, gate, _, down = parts.matrices
        widths = qkv.rows, out.width, qkv.width, out.rows, down.width
        scratch = x.new_zeros(many * sum(widths))
        places = [scratch.data_ptr() + 4 * many * start for start in accumulate(widths[:-1], initial=0)]
        attention = parts.mixer.read_cache(None, context, kept)
        attention.qkv, attention.out, attention.out_stride = *places[:2], out.width
        layer = LayerArguments(
            *(packed.matrix() for packed in parts.matrices),
            *map(address, parts.vectors),
            *parts.eps, x.data_ptr(), y.data_ptr(), *places[2:], attention,
        )  # fmt: skip
        library.block(ctypes.byref(layer), gate.threads(many))
        return select(y)


class KernelMamba(Mamba):
    """`Mamba` in a few calls when each row reads one new token."""

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, state: MambaState | None = None
    ) -> Float[Tensor, "B T D"]:
        if state is None or not self.can_step(x, context, state):
            return super().forward(x, context, state)
        library, (states, inner), given = kernels_on(x), self.decay.shape, self.input(x)
        assert library is not None, "can_step has checked it"
        conv, out = x.new_empty(len(x), inner), x.new_empty(len(x), 1, inner)
        space = WorkSpace(
            len(x), inner, states, len(self.filter) - 1, 2 * inner, self.rank + 2 * states,
            given.data_ptr(), self.filter.data_ptr(), address(self.filter_bias), 0, 0, 0,
            self.decay.data_ptr(), self.skip.data_ptr(),
            state.conv.data_ptr(), state.ssm.data_ptr(), conv.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        library.filter(ctypes.byref(space))
        select = self.select(conv)
        step = F.softplus(self.step(select[:, : self.rank]))
        space.step, space.write = step.data_ptr(), select[:, self.rank :].data_ptr()
        space.read = select[:, self.rank + states :].data_ptr()
        library.scan(ctypes.byref(space), 1 if state.ssm.numel() < SCAN_ALONE else torch.get_num_threads())
        return self.out(out)

    def can_step(self, x: Float[Tensor, "B T D"], context: Context, state: MambaState) -> bool:
        """Whether each row reads one token, without padding, taps or gradients, in types that the kernels have."""
        kept = state.ssm, state.conv
        return (
            x.shape[1] == 1
            and context.taps is None
            and context.fused
            and not self.normed
            and dense_rows(context, len(x)) == DenseRows((len(x), 1), None, None)
            and all(map(readable, (*kept, self.filter, self.filter_bias, self.decay, self.skip)))
            and kernels_on(x) is not None
        )
