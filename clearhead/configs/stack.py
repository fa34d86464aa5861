"""Blocks and the stack of blocks: how mixers, feed-forward layers and norms are combined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from .attention import AttentionConfig
from .base import Config, ConfigError, Part, Scope, Shape, Step, under
from .disentangled import DistanceVectorsConfig
from .ffn import FeedForwardConfig, GatedFeedForwardConfig
from .mixer import MixerConfig
from .moe import MoEConfig
from .norm import LayerNormConfig, NormConfig
from .positions import RelativeBiasConfig

FeedConfig = FeedForwardConfig | GatedFeedForwardConfig | MoEConfig

MAX_BLOCKS = 2**16
PLACES = {"pre": ("before",), "post": ("after",), "sandwich": ("before", "inside"), "inside": ("inside",)}
"""Which of a residual branch's three places hold a norm: x -> after(x + inside(f(before(x))))."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig(Part):
    """A mixer, optional cross-attention, and a feed-forward layer, each on its residual branch.

    pre       x + f(norm(x))          GPT-2, LLaMA
    post      norm(x + f(x))          the original Transformer, BERT
    sandwich  x + norm(f(norm(x)))    Gemma 2
    inside    x + norm(f(x))          OLMo 2

    >>> block = BlockConfig(mixer=AttentionConfig(heads=2, mask=Causal()), ffn=FeedForwardConfig(hidden=32))
    >>> block.count_parameters(8)
    840
    """

    __repr__ = Config.__str__

    mixer: MixerConfig
    cross: AttentionConfig | None = None  # reads the encoder's output
    ffn: FeedConfig | None = None
    norm: NormConfig = LayerNormConfig()
    placement: Literal["pre", "post", "sandwich", "inside"] = "pre"
    bare: tuple[Literal["mixer", "cross", "ffn"], ...] = ()  # branches without norms (ModernBERT's first mixer)
    branch_scale: float = 1.0  # every branch is multiplied by it before it is added (Granite)
    dropout: float = 0.0  # on each branch before it is added (Vaswani et al. 2017, 5.4)

    def check(self) -> None:
        self.require_share("dropout")
        self.require_positive("branch_scale")
        if self.cross is not None and (self.cross.rotary is not None or self.cross.score_bias is not None):
            raise ConfigError(
                "Block.cross has rotary or score_bias, but source and target positions cannot be compared"
            )

    def places(self, branch: str) -> tuple[str, ...]:
        """Where this branch has norms."""
        return () if branch in self.bare else PLACES[self.placement]

    def branches(self) -> dict[str, MixerConfig | FeedConfig]:
        named = {"mixer": self.mixer, "cross": self.cross, "ffn": self.ffn}
        return {name: part for name, part in named.items() if part is not None}

    def steps(self, scope: Scope) -> Iterator[Step]:
        for name, part in self.branches().items():
            places = self.places(name)
            sizes = scope.with_sizes(S=scope["source"], crossing=1) if name == "cross" else scope
            if "before" in places:
                yield from under(f"{name}_residual.before", self.norm.steps(scope))
            yield from under(name, part.steps(sizes))
            if "inside" in places:
                yield from under(f"{name}_residual.inside", self.norm.steps(scope))
            formula = "x + branch" if self.branch_scale == 1 else f"x + {self.branch_scale:g}·branch"
            yield scope.step(f"{name}_residual", formula, "B T D")
            if "after" in places:
                yield from under(f"{name}_residual.after", self.norm.steps(scope))

    def state(self, scope: Scope) -> dict[str, Shape]:
        shapes = mixer_state(self.mixer, scope)
        if self.cross is not None:
            read = self.cross.state(scope.with_sizes(S=scope["source"]))
            shapes |= {f"cross.{name}": shape for name, shape in read.items()}
        return shapes


@dataclass(frozen=True, kw_only=True)
class ParallelBlockConfig(Part):
    """x + mixer(norm(x)) + ffn(norm(x)): both branches read the same input.

    With `ffn_norm` the feed-forward layer has a norm of its own (GPT-NeoX); without, both share one (GPT-J, PaLM).

    >>> block = ParallelBlockConfig(mixer=AttentionConfig(heads=2), ffn=FeedForwardConfig(hidden=32))
    >>> block.count_parameters(8)
    824
    """

    mixer: MixerConfig
    ffn: FeedConfig
    norm: NormConfig = LayerNormConfig()
    ffn_norm: NormConfig | None = None
    dropout: float = 0.0

    def check(self) -> None:
        self.require_share("dropout")

    def steps(self, scope: Scope) -> Iterator[Step]:
        yield from under("norm", self.norm.steps(scope))
        yield from under("mixer", self.mixer.steps(scope))
        if self.ffn_norm is not None:
            yield from under("ffn_norm", self.ffn_norm.steps(scope))
        yield from under("ffn", self.ffn.steps(scope))
        yield scope.step("residual", "x + mixer + ffn", "B T D")

    def state(self, scope: Scope) -> dict[str, Shape]:
        return mixer_state(self.mixer, scope)


@dataclass(frozen=True, kw_only=True)
class StackConfig(Part):
    """`first`, then `pattern` over and over; a hybrid is a pattern of different blocks.

    >>> block = BlockConfig(mixer=AttentionConfig(heads=2, mask=Causal()), ffn=FeedForwardConfig(hidden=32))
    >>> stack = StackConfig(dim=8, pattern=(block,), repeats=6)
    >>> len(stack.blocks), stack.causal
    (6, True)
    """

    __repr__ = Config.__str__

    dim: int  # D
    pattern: tuple[BlockConfig | ParallelBlockConfig, ...]
    repeats: int
    first: tuple[BlockConfig | ParallelBlockConfig, ...] = ()  # before the pattern (DeepSeek's dense first layer)
    final_norm: NormConfig | None = None  # a pre-norm stack needs one
    score_bias: RelativeBiasConfig | None = None  # added to the scores of every self-attention
    distances: DistanceVectorsConfig | None = None  # vectors that disentangled attention reads (DeBERTa)

    def check(self) -> None:
        self.require_positive("dim", "repeats")
        if not self.pattern:
            raise ConfigError("Stack.pattern is empty, but must hold at least one block")
        if len(self.first) + len(self.pattern) * self.repeats > MAX_BLOCKS:
            raise ConfigError(f"Stack.repeats is {self.repeats}, but a stack has at most {MAX_BLOCKS:,} blocks")
        for block in {*self.first, *self.pattern}:
            if block.mixer.reads_distances and self.distances is None:
                raise ConfigError(f"a {block.mixer.kind()} reads distance vectors, but Stack.distances is None")
            heads = block.mixer.heads if isinstance(block.mixer, AttentionConfig) else None
            if self.score_bias is not None and heads != self.score_bias.heads:
                wanted = f"attention with {self.score_bias.heads} heads"
                raise ConfigError(f"Stack.score_bias needs {wanted} in every block")
            block.weights(self.dim)  # widths that do not fit `dim` are found now, not when the model runs

    @property
    def blocks(self) -> tuple[BlockConfig | ParallelBlockConfig, ...]:
        """Every block from the bottom up."""
        return self.first + self.pattern * self.repeats

    @property
    def distinct(self) -> tuple[BlockConfig | ParallelBlockConfig, ...]:
        """The blocks before the pattern, and the pattern once."""
        return self.first + self.pattern

    @property
    def causal(self) -> bool:
        """Whether no token reads a later one, so that a text can be written token by token."""
        return all(block.mixer.mask.causal for block in self.distinct)

    @property
    def copies(self) -> int:
        """How many sets of weights the pattern has."""
        return self.repeats

    def resolve(self, dim: int = 0) -> StackConfig:
        return super().resolve(self.dim)

    def place(self, i: int) -> int:
        """The place of the block whose weights block i runs on: its own."""
        return i

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.with_sizes(D=self.dim)
        if self.score_bias is not None:
            yield from under("score_bias", self.score_bias.steps(s))
        if self.distances is not None:
            yield from under("distances", self.distances.steps(s))
        for i, block in enumerate(self.distinct if scope.folded else self.blocks):
            steps = block.steps(s) if self.place(i) == i else map(without_weights, block.steps(s))
            if scope.folded and i >= len(self.first):
                steps = (replace(step, repeats=self.repeats, copies=self.copies) for step in steps)
            yield from under(f"blocks.{i}", steps)
        if self.final_norm is not None:
            yield from under("final_norm", self.final_norm.steps(s))

    def state(self, scope: Scope) -> dict[str, Shape]:
        s = scope.with_sizes(D=self.dim)
        return {f"blocks.{i}.{name}": v for i, block in enumerate(self.blocks) for name, v in block.state(s).items()}


@dataclass(frozen=True, kw_only=True)
class SharedStackConfig(StackConfig):
    """A stack that runs the same weights of `pattern` over and over  (Universal Transformer, ALBERT).

    >>> block = BlockConfig(mixer=AttentionConfig(heads=2), ffn=FeedForwardConfig(hidden=32))
    >>> one, six = (SharedStackConfig(dim=8, pattern=(block,), repeats=n) for n in (1, 6))
    >>> one.count_parameters(8) == six.count_parameters(8)
    True
    """

    @property
    def copies(self) -> int:
        return 1

    def place(self, i: int) -> int:
        return i if i < len(self.first) else len(self.first) + (i - len(self.first)) % len(self.pattern)


def without_weights(step: Step) -> Step:
    return replace(step, weights={}, idle=0)


def mixer_state(mixer: MixerConfig, scope: Scope) -> dict[str, Shape]:
    """What decoding keeps for a mixer: nothing where it reads later tokens, for then there is no decoding."""
    state = mixer.state(scope) if mixer.mask.causal else {}
    return {f"mixer.{name}": shape for name, shape in state.items()}
