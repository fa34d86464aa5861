"""Residual branches, blocks, and the stack of blocks.

`Residual` holds the norms, `Block` the order of the branches, `Stack` the order of the blocks. A forward pass is

    for block in blocks:
        x = x + mixer(norm(x))        between positions
        x = x + ffn(norm(x))          within a position
    x = final_norm(x)

in the pre-norm placement. No class here has a branch on the placement: a place without a norm holds the identity.

`select` is why generation is cheap at the end: all positions must pass every mixer, since later tokens read them, but
after the last mixer only the positions whose logits are wanted go on. For a prompt of 1,000 tokens the last
feed-forward layer and the head compute one row instead of 1,000.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, cast

from jaxtyping import Float
from torch import Tensor, nn

from clearhead.configs import BlockConfig, ParallelBlockConfig, SharedStackConfig, StackConfig
from clearhead.configs.norm import NormConfig

from .build import build_part, builds
from .cache import BlockState, StateAllocator
from .context import Context
from .dropout import Dropout

Select = Callable[[Tensor], Tensor]
"""Picks the positions that are needed: B T D -> B Chosen D."""


def all_positions(x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """The `Select` that keeps every position: the default, and the only one in training."""
    return x


class Residual(nn.Module):
    """One residual branch, x + f(x). Where the norm sits is decided here and nowhere else.

    pre       x + f(norm(x))          x ──┬── before ── f ── inside ── dropout ──(+)── after ──
    post      norm(x + f(x))              └───────────────────────────────────────┘
    sandwich  x + norm(f(norm(x)))    places without a norm are the identity
    inside    x + norm(f(x))

    `f` is passed as a function, so the same class serves the mixer, cross-attention and the feed-forward layer.
    """

    def __init__(
        self, norm: NormConfig, places: Collection[str], dim: int, dropout: float = 0.0, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.scale = scale
        self.before = build_part(norm if "before" in places else None, dim)
        self.inside = build_part(norm if "inside" in places else None, dim)
        self.after = build_part(norm if "after" in places else None, dim)
        self.dropout = Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "B T D"], f: Callable[[Tensor], Tensor], context: Context
    ) -> Float[Tensor, "B T D"]:
        """after(x + dropout(inside(f(before(x)))))"""
        branch = self.inside(f(context.tap("before", self.before(x))))
        branch = self.dropout(context.tap("inside", branch))
        x = context.tap("", x + (branch if self.scale == 1 else branch * self.scale))
        return context.tap("after", self.after(x))


@builds(BlockConfig)
class Block(nn.Module):
    """Mixer, then cross-attention if there is a source, then feed-forward, each on its residual branch.

    The mixer moves information between positions; the feed-forward layer works on each position alone.
    """

    def __init__(self, config: BlockConfig, dim: int) -> None:
        super().__init__()

        def residual(branch: str) -> Residual:
            return Residual(config.norm, config.places(branch), dim, config.dropout, config.branch_scale)

        self.mixer, self.mixer_residual = build_part(config.mixer, dim), residual("mixer")
        self.cross: Any = None
        self.ffn: Any = None
        if config.cross is not None:
            self.cross, self.cross_residual = build_part(config.cross, dim), residual("cross")
        if config.ffn is not None:
            self.ffn, self.ffn_residual = build_part(config.ffn, dim), residual("ffn")

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        context: Context,
        state: BlockState | None = None,
        select: Select = all_positions,
    ) -> Float[Tensor, "B Chosen D"]:
        """All positions go through the mixer, which stores them in its state; only selected ones through the rest."""
        memory = (None, None) if state is None else (state.mixer, state.cross)
        x = self.mixer_residual(
            x, lambda h: self.mixer(h, context.at("mixer"), memory[0]), context.at("mixer_residual")
        )
        x = select(x)
        if self.cross is not None and context.cross is not None:
            reader = context.cross.at("cross")
            x = self.cross_residual(x, lambda h: self.cross(h, reader, memory[1]), context.at("cross_residual"))
        if self.ffn is not None:
            x = self.ffn_residual(x, lambda h: self.ffn(h, context.at("ffn")), context.at("ffn_residual"))
        return x

    def init_state(self, allocator: StateAllocator) -> BlockState:
        return BlockState(self.mixer.init_state(allocator))


@builds(ParallelBlockConfig)
class ParallelBlock(nn.Module):
    """x + mixer(norm(x)) + ffn(norm(x)): both branches read the same normalised input (GPT-J, PaLM).

    The two branches do not wait for each other, and usually share a norm. The ffn cannot read what this block's mixer
    has just found; the next block's can. Its taps have the same names as those of `Block`.
    """

    def __init__(self, config: ParallelBlockConfig, dim: int) -> None:
        super().__init__()
        self.norm = build_part(config.norm, dim)
        self.mixer = build_part(config.mixer, dim)
        self.ffn_norm = None if config.ffn_norm is None else build_part(config.ffn_norm, dim)
        self.ffn = build_part(config.ffn, dim)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        context: Context,
        state: BlockState | None = None,
        select: Select = all_positions,
    ) -> Float[Tensor, "B Chosen D"]:
        """Both branches read the same h, so their order does not matter. Only selected positions go through the ffn."""
        h = context.tap("norm", self.norm(x))
        mixed = self.mixer(h, context.at("mixer"), None if state is None else state.mixer)
        mixed = context.tap("mixer_residual.inside", mixed)
        x, h, mixed = select(x), select(h), select(mixed)
        if self.ffn_norm is not None:
            h = context.tap("ffn_norm", self.ffn_norm(x))
        fed = context.tap("ffn_residual.inside", self.ffn(h, context.at("ffn")))
        return context.tap("residual", x + self.dropout(mixed + fed))

    def init_state(self, allocator: StateAllocator) -> BlockState:
        return BlockState(self.mixer.init_state(allocator))


@builds(StackConfig)
@builds(SharedStackConfig)
class Stack(nn.Module):
    """The blocks from first to last, and the final norm.

    In a shared stack (ALBERT) several layers are the same block: fewer weights, at the same cost in time. Tables that
    belong to all layers, T5's score bias and DeBERTa's distances, are held here and reach the blocks in the context.
    """

    def __init__(self, config: StackConfig, dim: int) -> None:
        super().__init__()
        self.places = [config.place(i) for i in range(len(config.blocks))]
        self.blocks = nn.ModuleList(build_part(config.blocks[place], dim) for place in sorted(set(self.places)))
        self.score_bias = None if config.score_bias is None else build_part(config.score_bias, dim)
        self.distances = None if config.distances is None else build_part(config.distances, dim)
        self.final_norm = build_part(config.final_norm, dim)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        context: Context,
        state: list[BlockState] | None = None,
        select: Select = all_positions,
    ) -> Float[Tensor, "B Chosen D"]:
        """If only some positions are needed, the last feed-forward layer skips the rest."""
        context = self.block_context(context)
        last = len(self.places) - 1
        for i, block in enumerate(self.layers()):
            kept = None if state is None else state[i]
            x = block(x, context.at(f"blocks.{i}"), kept, select if i == last else all_positions)
        return context.tap("final_norm", self.final_norm(x))

    def block_context(self, context: Context) -> Context:
        """The context of every block: the stack's own, with the tables that all layers share."""
        if self.distances is not None:
            context = replace(context, distances=self.distances.over(self.distances(context)))
        if self.score_bias is None:
            return context
        table = context.tap("score_bias", self.score_bias())
        return replace(context, score_bias=self.score_bias.over(table))

    def init_state(self, allocator: StateAllocator) -> list[BlockState]:
        """One state for each layer, also where layers share a block: they have different keys."""
        return [block.init_state(allocator) for block in self.layers()]

    def layers(self) -> list[Block | ParallelBlock]:
        """The blocks in the order they run. A shared block is listed more than once."""
        return [cast("Block | ParallelBlock", self.blocks[place]) for place in self.places]
