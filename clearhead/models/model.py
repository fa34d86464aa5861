"""The two model classes: `SequenceModel` and `EncoderDecoder`, and how to build one from a config."""

from __future__ import annotations

import html
import os
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.configs import (
    ConfigError,
    EmbeddingConfig,
    EncoderDecoderConfig,
    ModelConfig,
    Precision,
    SequenceModelConfig,
    TokenEmbeddingConfig,
)
from clearhead.memory import memory_budget
from clearhead.nn.build import build_part
from clearhead.nn.cache import DecodeState
from clearhead.nn.context import Context
from clearhead.nn.stack import Block, Select, Stack, all_positions
from clearhead.nn.tap import Taps

from .context import check_ids, last_real, make_context, make_state
from .initialise import SkipInitialisation, initialise
from .methods import ModelMethods, TextMethods
from .presets import find_config

Source = Int[Tensor, "B S"] | Float[Tensor, "B Mels Frames"]
"""What an encoder reads: token ids, or the spectrogram of a sound."""


class ModelBase(ModelMethods, nn.Module):
    """What both kinds of model remember about where they came from."""

    family: str | None = None  # the `model_type` it was loaded from, and is saved as
    precision: Precision | None = None  # how `quantize` stored the matrices
    config: ModelConfig

    def taps(self, batch: int = 1, length: int = 4) -> dict[str, tuple[int, ...]]:
        """The path and shape of every value that `Taps` can read or replace, in a pass over `batch` × `length` tokens.

        Example: `build("tiny-llama").taps()["stack.blocks.0.mixer.weights"]` is (1, 4, 4, 4), B H T S.
        """
        found, config = Taps(read="*"), self.config
        tokens = torch.zeros(batch, length, dtype=torch.long, device=next(self.parameters()).device)
        embedding = config.embedding if isinstance(config, SequenceModelConfig) else config.source
        first = tokens if isinstance(embedding, TokenEmbeddingConfig) else self.blank(embedding, batch)
        inputs = (first,) if isinstance(config, SequenceModelConfig) else (first, tokens)
        with torch.no_grad():
            self(*inputs, taps=found, fused=False)
        return {path: tuple(value.shape) for path, value in found.values.items()}

    def blank(self, embedding: EmbeddingConfig, batch: int) -> Tensor:
        """Zeros as an image, or as a sound."""
        weight = next(self.parameters())
        return torch.zeros(batch, *embedding.input_shape(0), dtype=weight.dtype, device=weight.device)

    def __repr__(self) -> str:
        """One line for each part: what it is, and its parameters."""
        count = sum(p.numel() for p in self.parameters())
        lines = [f"{type(self).__name__}: {count:,} parameters"]
        for name, child in self.named_children():
            if isinstance(child, Stack):
                blocks = [describe_block(block) for block in child.layers()]
                lines += [f"  {name}.blocks.{span}: {what}" for span, what in group_runs(blocks)]
                lines += [f"  {name}.final_norm: {type(child.final_norm).__name__}"]
            else:
                lines.append(f"  {name}: {type(child).__name__}, {sum(p.numel() for p in child.parameters()):,}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The same lines, for notebooks."""
        return f"<pre>{html.escape(repr(self))}</pre>"


class SequenceModel(TextMethods, ModelBase):
    """embedding -> stack -> head: GPT, LLaMA, BERT, ViT, Mamba."""

    config: SequenceModelConfig

    def __init__(self, config: SequenceModelConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.stack.dim
        self.embedding = build_part(config.embedding, dim)
        self.stack: Stack = build_part(config.stack, dim)
        self.head = None if config.head is None else build_part(config.head, dim)

    def forward(
        self,
        inputs: Int[Tensor, "B T"] | Float[Tensor, "B Ch Y X"],
        *,
        segments: Int[Tensor, "B T"] | None = None,
        readable: Bool[Tensor, "B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
        state: DecodeState | None = None,
        taps: Taps | None = None,
        fused: bool = True,
    ) -> Float[Tensor, "B T V"] | Float[Tensor, "B C"]:
        """The head's output for token ids or images. Without a head: the hidden states.

        readable   False where a token is padding; positions count only real tokens
        documents  the document of each token; tokens of different documents do not attend to each other
        state      the KV cache from `init_state`: the inputs continue it, and their keys and values are added
        taps       values to read or replace
        fused      False computes attention in plain operations and taps every intermediate value
        """
        if isinstance(self.config.embedding, TokenEmbeddingConfig):
            check_ids(inputs)
        length = self.config.embedding.positions(inputs.shape[1])
        context = make_context(
            inputs.shape[0],
            length,
            inputs.device,
            readable=readable,
            documents=documents,
            positions=positions,
            state=state,
            taps=taps,
            fused=fused,
        )
        x = self.hidden_states(inputs, context, segments, state)
        x = x if self.head is None else self.head(x, context.at("head"), self.table)
        if taps is not None:
            taps.check()
        return x

    def hidden_states(
        self,
        inputs: Int[Tensor, "B T"] | Float[Tensor, "B Ch Y X"],
        context: Context,
        segments: Int[Tensor, "B T"] | None = None,
        state: DecodeState | None = None,
        select: Select = all_positions,
    ) -> Float[Tensor, "B Chosen D"]:
        """The stack's output at the positions that `select` keeps, which the head reads."""
        x = context.tap("embedding", self.embedding(inputs, context.at("embedding"), segments))
        if state is not None:  # after the embedding, which raises for a bad token before the state changes
            state.advance(context.positions, context.readable)
        return self.stack(x, context.at("stack"), None if state is None else state.blocks, select)

    def next_logits(
        self, tokens: Int[Tensor, "B T"], state: DecodeState, *, readable: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B V"]:
        """The logits of each row's next token. Only the last position goes through the head."""
        check_ids(tokens)
        context = make_context(len(tokens), tokens.shape[1], tokens.device, readable=readable, state=state)
        x = self.hidden_states(tokens, context, None, state, select=partial(last_real, readable=readable))
        assert self.head is not None, "only a model with a head predicts tokens"
        return self.head(x, context.at("head"), self.table)[:, 0]

    def init_state(self, batch: int, length: int, *, spare: int = 0, pages: int | None = None) -> DecodeState:
        """An empty KV cache for `batch` rows of up to `length` tokens.

        spare  how many of the last tokens can be removed again
        pages  pages of 32 tokens that all rows share; default: enough for every row
        """
        return make_state(self.stack, batch, length, spare, self.precision, pages)

    @property
    def table(self) -> Any:
        """The embedding's table, which a tied head uses too; None for patches."""
        return self.embedding.table


class EncoderDecoder(ModelBase):
    """source -> encoder; target -> decoder, which reads the encoder's output -> head  (Vaswani et al. 2017)."""

    config: EncoderDecoderConfig

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.encoder.dim
        self.source = build_part(config.source, dim)
        self.encoder: Stack = build_part(config.encoder, dim)
        self.target = None if config.target is None else build_part(config.target, dim)
        self.decoder: Stack = build_part(config.decoder, dim)
        self.head = build_part(config.head, dim)

    def forward(
        self,
        source: Source,
        target: Int[Tensor, "B T"],
        *,
        source_readable: Bool[Tensor, "B S"] | None = None,
        readable: Bool[Tensor, "B T"] | None = None,
        taps: Taps | None = None,
        fused: bool = True,
    ) -> Float[Tensor, "B T V"]:
        """The logits of each next target token, given the source and the target tokens before it."""
        context = self.target_context(source, target, source_readable, readable, taps, fused)
        logits = self.target_logits(target, context, None)
        if taps is not None:
            taps.check()
        return logits

    def hidden_states(
        self,
        source: Source,
        target: Int[Tensor, "B T"],
        *,
        source_readable: Bool[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """The decoder's output, which the head reads."""
        return self.target_hidden(target, self.target_context(source, target, source_readable, None, None, True), None)

    def target_context(
        self,
        source: Source,
        target: Int[Tensor, "B T"],
        source_readable: Bool[Tensor, "B S"] | None,
        readable: Bool[Tensor, "B T"] | None,
        taps: Taps | None,
        fused: bool,
    ) -> Context:
        """Encode the source, and return the context in which the target reads it."""
        check_ids(target)
        memory = self.encode(source, readable=source_readable, taps=taps, fused=fused)
        if source.shape[0] != target.shape[0]:
            raise ValueError(f"the source has {source.shape[0]} rows, but the target has {target.shape[0]}")
        batch, length = target.shape
        context = make_context(batch, length, target.device, readable=readable, taps=taps, fused=fused)
        return cross_context(context, memory, source_readable)

    def encode(
        self,
        source: Source,
        *,
        readable: Bool[Tensor, "B S"] | None = None,
        taps: Taps | None = None,
        fused: bool = True,
    ) -> Float[Tensor, "B S D"]:
        """The encoder's output."""
        if isinstance(self.config.source, TokenEmbeddingConfig):
            check_ids(source)
        length = self.config.source.positions(source.shape[1])
        context = make_context(source.shape[0], length, source.device, readable=readable, taps=taps, fused=fused)
        x = context.tap("source", self.source(source, context.at("source")))
        return self.encoder(x, context.at("encoder"))

    def decode(
        self,
        target: Int[Tensor, "B T"],
        state: DecodeState,
        *,
        readable: Bool[Tensor, "B T"] | None = None,
        taps: Taps | None = None,
        fused: bool = True,
    ) -> Float[Tensor, "B T V"]:
        """The logits of more target tokens, after those in `state`."""
        check_ids(target)
        context = make_context(
            len(target), target.shape[1], target.device, readable=readable, state=state, taps=taps, fused=fused
        )
        source = state.blocks[0].cross
        assert source is not None, "a decoder's block state holds the source's keys"
        context = cross_context(context, None, state.source_readable, source.key.shape[2], source.shared)
        return self.target_logits(target, context, state)

    def init_state(
        self, memory: Float[Tensor, "B S D"], length: int, *, readable: Bool[Tensor, "B S"] | None = None
    ) -> DecodeState:
        """A KV cache for up to `length` target tokens. The source's keys and values are computed here, once."""
        state = make_state(self.decoder, len(memory), length, 0, self.precision)
        for block, block_state in zip(self.decoder.layers(), state.blocks, strict=True):
            block_state.cross = cast(Block, block).cross.cache_source(memory)
        state.source_readable = readable
        return state

    def next_logits(
        self, tokens: Int[Tensor, "B T"], state: DecodeState, *, readable: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B V"]:
        """The logits of each row's next target token, after those in `state`."""
        return last_real(self.decode(tokens, state, readable=readable), readable)[:, 0]

    def target_logits(
        self, target: Int[Tensor, "B T"], context: Context, state: DecodeState | None
    ) -> Float[Tensor, "B T V"]:
        return self.head(self.target_hidden(target, context, state), context.at("head"), self.table)

    def target_hidden(
        self, target: Int[Tensor, "B T"], context: Context, state: DecodeState | None
    ) -> Float[Tensor, "B T D"]:
        embedding = self.source if self.target is None else self.target
        x = context.tap("target", embedding(target, context.at("target"), lender=self.source))
        if state is not None:
            state.advance(context.positions, context.readable)
        return self.decoder(x, context.at("decoder"), None if state is None else state.blocks)

    @property
    def table(self) -> Any:
        """The target's embedding table, which a tied head uses too."""
        own = None if self.target is None else self.target.table
        return self.source.table if own is None else own


def cross_context(
    context: Context,
    memory: Tensor | None,
    readable: Bool[Tensor, "B S"] | None,
    length: int | None = None,
    shared: int = 1,
) -> Context:
    """The decoder's context with the one for cross-attention in it.

    shared  how many consecutive target rows read the same source; their queries are computed as those of one row
    """
    length = memory.shape[1] if memory is not None else length
    keys = torch.arange(length or 0, device=context.positions.device)[None]
    queries = context.positions if shared == 1 else context.positions[:1].repeat(1, shared)
    cross = Context(queries, keys, readable, source=memory, fused=context.fused, taps=context.taps)
    return replace(context, cross=cross)


Model = SequenceModel | EncoderDecoder

if hasattr(os, "register_at_fork"):  # the threads of a process do not survive its fork: waiting for them would hang
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def describe_block(block: nn.Module) -> str:
    """The parts of a block and its parameters, such as "MultiHeadAttention, GatedFeedForward, 12,345"."""
    parts = (getattr(block, name, None) for name in ("mixer", "cross", "ffn"))
    names = [type(part).__name__ for part in parts if part is not None]
    return f"{', '.join(names)}, {sum(p.numel() for p in block.parameters()):,}"


def group_runs(lines: list[str]) -> list[tuple[str, str]]:
    """Equal lines that follow each other as one, with their numbers: [("0–3", line), …]."""
    groups: list[tuple[int, int, str]] = []
    for i, line in enumerate(lines):
        if groups and groups[-1][2] == line:
            groups[-1] = (groups[-1][0], i, line)
        else:
            groups.append((i, i, line))
    return [(f"{first}–{last}" if last > first else str(first), line) for first, last, line in groups]


def build(config: ModelConfig | str) -> Model:
    """A model with fresh weights, from a config or a preset's name, on torch's default device and in its dtype.

    >>> build("tiny-llama").config.stack.dim
    32
    """
    config = find_config(config)
    check_budget(config)
    model = SequenceModel(config) if isinstance(config, SequenceModelConfig) else EncoderDecoder(config)
    initialise(model)
    return model


def check_budget(config: ModelConfig) -> None:
    """Raise if the weights cannot fit into this machine's memory; counted before anything is allocated."""
    count, budget = config.count_parameters(), memory_budget()
    size = count * torch.get_default_dtype().itemsize
    if torch.get_default_device().type == "cpu" and budget is not None and size > budget:
        raise ConfigError(
            f"the model has {count:,} parameters, which take {size / 2**30:,.1f} GiB, but this machine has "
            f"{budget / 2**30:,.1f} GiB of memory; `clearhead cost` counts it without building it"
        )


def build_empty(config: ModelConfig) -> Model:
    """A model whose weights are on the meta device, for `load_state_dict(…, assign=True)`."""
    with torch.device("meta"), SkipInitialisation():
        return SequenceModel(config) if isinstance(config, SequenceModelConfig) else EncoderDecoder(config)
