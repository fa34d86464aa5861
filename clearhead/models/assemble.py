"""The two model classes, and how a config becomes one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clearhead.configs import EncoderDecoderConfig, ModelConfig, Precision, SequenceModelConfig, TokenEmbeddingConfig
from clearhead.nn.build import build_part
from clearhead.nn.cache import BlockState, DecodeState, StateAllocator, count_positions
from clearhead.nn.context import Context
from clearhead.nn.stack import Block, ParallelBlock, Residual, Select, Stack, all_positions
from clearhead.nn.tap import Taps

if TYPE_CHECKING:
    from clearhead.generate.complete import Completion
    from clearhead.inspect.inspection import Inspection


class SequenceModel(nn.Module):
    """embedding -> stack -> head: GPT, LLaMA, BERT, ViT and all between."""

    precision: Precision | None = None  # what `quantize` has stored the matrices in

    def __init__(self, config: SequenceModelConfig) -> None:
        super().__init__()
        self.config = config
        self.origin: Path | None = None  # where it was loaded from; its tokenizer and defaults lie there
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
        """What the head says of token ids or images; the hidden states, where there is no head.

        readable   False where a token is padding; positions count the real tokens only
        documents  tokens of different documents do not read each other
        state      from `init_state`: the inputs continue what it holds, and it is written
        taps       values to read or replace
        fused      False: attention in plain operations, every intermediate tapped
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
        x = self.hidden(inputs, context, segments, state)
        return x if self.head is None else self.head(x, context.at("head"), self.embedding.table)

    def hidden(
        self,
        inputs: Int[Tensor, "B T"] | Float[Tensor, "B Ch Y X"],
        context: Context,
        segments: Int[Tensor, "B T"] | None = None,
        state: DecodeState | None = None,
        select: Select = all_positions,
    ) -> Float[Tensor, "B Chosen D"]:
        """What the head reads, of the positions that `select` keeps."""
        x = context.tap("embedding", self.embedding(inputs, context.at("embedding"), segments))
        if state is not None:  # only now: a token that is refused must not have moved it
            state.advance(context.positions, context.readable)
        return self.stack(x, context.at("stack"), None if state is None else state.blocks, select)

    def next_logits(
        self, tokens: Int[Tensor, "B T"], state: DecodeState, *, readable: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B V"]:
        """The logits of each row's next token, after those that `state` holds; no other position takes the head."""
        check_ids(tokens)
        context = make_context(len(tokens), tokens.shape[1], tokens.device, readable=readable, state=state)
        x = self.hidden(tokens, context, None, state, select=partial(last_real, readable=readable))
        assert self.head is not None, "who asks for logits has seen that there is a head"
        return self.head(x, context.at("head"), self.embedding.table)[:, 0]

    def init_state(self, batch: int, length: int, *, spare: int = 0) -> DecodeState:
        """Memory for `batch` rows of up to `length` tokens each, the last `spare` of which can be taken back."""
        return make_state(self.stack, batch, length, spare)

    def generate(self, prompts: Any, **options: Any) -> list[Completion]:
        """How the model goes on from prompts, which are texts or token ids: `generate.complete.generate`."""
        return generate_from(self, prompts, options)

    def stream(self, prompt: Any, **options: Any) -> Iterator[str]:
        """How the model goes on from one prompt, piece by piece: `generate.complete.stream`."""
        return stream_from(self, prompt, options)

    def save(self, folder: str | Path, **options: Any) -> None:
        """Write a folder that `load` reads, and `transformers` too where it has the architecture: `checkpoint.save`."""
        save_model(self, folder, **options)

    def inspect(self, inputs: Any, **options: Any) -> Inspection:
        """Look at it while it reads: attention maps, what heads do, logit lens, ablation … (`inspect.inspection`)."""
        return look_at(self, inputs, **options)


class EncoderDecoder(nn.Module):
    """source -> encoder; target -> decoder, which reads the encoder's output -> head  (Vaswani et al. 2017)."""

    precision: Precision | None = None

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.origin: Path | None = None
        dim = config.encoder.dim
        self.source = build_part(config.source, dim)
        self.encoder: Stack = build_part(config.encoder, dim)
        self.target = None if config.target is None else build_part(config.target, dim)
        self.decoder: Stack = build_part(config.decoder, dim)
        self.head = build_part(config.head, dim)

    def forward(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        *,
        source_readable: Bool[Tensor, "B S"] | None = None,
        readable: Bool[Tensor, "B T"] | None = None,
        taps: Taps | None = None,
        fused: bool = True,
    ) -> Float[Tensor, "B T V"]:
        """The logits of each next target token, given the source and the target before it."""
        context = self.reading(source, target, source_readable, readable, taps, fused)
        return self.decode_in(target, context, None)

    def hidden(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        *,
        source_readable: Bool[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """What the head reads."""
        return self.decoded(target, self.reading(source, target, source_readable, None, None, True), None)

    def reading(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        source_readable: Bool[Tensor, "B S"] | None,
        readable: Bool[Tensor, "B T"] | None,
        taps: Taps | None,
        fused: bool,
    ) -> Context:
        """The context of a target whose source has been read."""
        check_ids(source)
        check_ids(target)
        if len(source) != len(target):
            raise ValueError(f"the source has {len(source)} rows, but the target has {len(target)}")
        memory = self.encode(source, readable=source_readable, taps=taps, fused=fused)
        context = make_context(len(target), target.shape[1], target.device, readable=readable, taps=taps, fused=fused)
        return self.crossing(context, memory, source_readable)

    def encode(
        self,
        source: Int[Tensor, "B S"],
        *,
        readable: Bool[Tensor, "B S"] | None = None,
        taps: Taps | None = None,
        fused: bool = True,
    ) -> Float[Tensor, "B S D"]:
        """The encoder's output."""
        check_ids(source)
        context = make_context(len(source), source.shape[1], source.device, readable=readable, taps=taps, fused=fused)
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
        """The logits of more target tokens, after those that `state` holds."""
        check_ids(target)
        context = make_context(
            len(target), target.shape[1], target.device, readable=readable, state=state, taps=taps, fused=fused
        )
        source = state.blocks[0].cross
        assert source is not None, "a decoder's block state holds the source's keys"
        crossing = self.crossing(context, None, state.source_readable, source.key.shape[2], source.shared)
        return self.decode_in(target, crossing, state)

    def init_state(
        self, memory: Float[Tensor, "B S D"], length: int, *, readable: Bool[Tensor, "B S"] | None = None
    ) -> DecodeState:
        """A memory for up to `length` target tokens, in which the source's keys and values are computed already."""
        state = make_state(self.decoder, len(memory), length, spare=0)
        for block, block_state in zip(self.decoder.layers(), state.blocks, strict=True):
            block_state.cross = cast(Block, block).cross.cache_source(memory)
        state.source_readable = readable
        return state

    def next_logits(
        self, tokens: Int[Tensor, "B T"], state: DecodeState, *, readable: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B V"]:
        """The logits of each row's next target token, after those that `state` holds."""
        return last_real(self.decode(tokens, state, readable=readable), readable)[:, 0]

    def generate(self, prompts: Any, **options: Any) -> list[Completion]:
        """What the model writes for sources, which are texts or token ids: `generate.complete.generate`."""
        return generate_from(self, prompts, options)

    def stream(self, prompt: Any, **options: Any) -> Iterator[str]:
        """What the model writes for one source, piece by piece: `generate.complete.stream`."""
        return stream_from(self, prompt, options)

    def decode_in(
        self, target: Int[Tensor, "B T"], context: Context, state: DecodeState | None
    ) -> Float[Tensor, "B T V"]:
        return self.head(self.decoded(target, context, state), context.at("head"), self.table)

    def decoded(
        self, target: Int[Tensor, "B T"], context: Context, state: DecodeState | None
    ) -> Float[Tensor, "B T D"]:
        embedding = self.source if self.target is None else self.target
        x = context.tap("target", embedding(target, context.at("target")))
        if state is not None:
            state.advance(context.positions, context.readable)
        return self.decoder(x, context.at("decoder"), None if state is None else state.blocks)

    @property
    def table(self) -> Any:
        """The target's embeddings, which a tied head reads too."""
        return (self.source if self.target is None else self.target).table

    def save(self, folder: str | Path, **options: Any) -> None:
        """Write a folder that `load` reads, and `transformers` too where it has the architecture: `checkpoint.save`."""
        save_model(self, folder, **options)

    def inspect(self, inputs: Any, target: Any = None, **options: Any) -> Inspection:
        """Look at it while it reads a source and writes a target (`inspect.inspection`)."""
        return look_at(self, inputs, target, **options)

    @staticmethod
    def crossing(
        context: Context,
        memory: Tensor | None,
        readable: Bool[Tensor, "B S"] | None,
        length: int | None = None,
        shared: int = 1,
    ) -> Context:
        """The decoder's context, and in it the one by which cross-attention reads the source: of so many rows in a row
        the same, whose queries are those of one row then."""
        length = memory.shape[1] if memory is not None else length
        keys = torch.arange(length or 0, device=context.positions.device)[None]
        queries = context.positions if shared == 1 else context.positions[:1].repeat(1, shared)
        cross = Context(queries, keys, readable, source=memory, fused=context.fused, taps=context.taps)
        return replace(context, cross=cross)


Model = SequenceModel | EncoderDecoder


def save_model(model: Model, folder: str | Path, **options: Any) -> None:
    from .load import save  # which imports this file

    save(model, folder, **options)


def generate_from(model: Model, prompts: Any, options: dict[str, Any]) -> list[Completion]:
    from clearhead.generate.complete import generate  # a layer above this one

    return generate(model, prompts, **options)


def stream_from(model: Model, prompt: Any, options: dict[str, Any]) -> Iterator[str]:
    from clearhead.generate.complete import stream

    return stream(model, prompt, **options)


def look_at(model: Model, *inputs: Any, **options: Any) -> Inspection:
    from clearhead.inspect.inspection import inspect  # which imports this file

    return inspect(model, *inputs, **options)


def build(config: ModelConfig) -> Model:
    """A model with fresh weights, on the current default device and dtype."""
    model = SequenceModel(config) if isinstance(config, SequenceModelConfig) else EncoderDecoder(config)
    initialise(model)
    return model


class Unset(TorchFunctionMode):
    """Weights as they come, where each is about to be replaced; torch would start its compiler to draw meta ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return (args or list(kwargs.values()))[0]
        return func(*args, **(kwargs or {}))


def bare(config: ModelConfig) -> Model:
    """A model whose weights have shapes and no values, for `load_state_dict(…, assign=True)`."""
    with torch.device("meta"), Unset():
        return SequenceModel(config) if isinstance(config, SequenceModelConfig) else EncoderDecoder(config)


LAST = (".mixer.out.weight", ".cross.out.weight", ".ffn.down.weight", ".experts.down.weight", ".shared.down.weight")
"""What is added to the residual stream."""


def initialise(model: nn.Module) -> None:
    """Fresh weights: normal, of deviation 0.02 in the tables of tokens and positions, and of variance 2/(5·n) in a
    matrix that reads n numbers, its last axis, which is about 0.02 at GPT-2's width (Nguyen & Salazar 2019, 3.1); what
    is added to the residual stream is smaller by √(number of branches) (Radford et al. 2019, 2.3). Biases are 0, gains
    1; a part with its own `init_weights` sets its weights itself."""
    layers = [layer for stack in model.modules() if isinstance(stack, Stack) for layer in stack.layers()]
    branches = sum({Residual: 1, ParallelBlock: 2}.get(type(m), 0) for layer in layers for m in layer.modules())
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            dim = parameter.shape[-1]
            std = 0.02 if "tokens." in name or "position." in name else math.sqrt(2 / (5 * dim))
            if name.endswith(LAST):
                std /= math.sqrt(max(branches, 1))
            nn.init.normal_(parameter, std=std)
    for module in model.modules():
        init_weights = getattr(module, "init_weights", None)
        if callable(init_weights):  # a part whose weights start differently
            init_weights()


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
    """Where the tokens of this pass stand: after those that the state holds."""
    for name, given in {"readable": readable, "documents": documents, "positions": positions}.items():
        if given is not None and given.shape != (batch, length):
            raise ValueError(f"{name} is {tuple(given.shape)}, but there are {batch} rows of {length} tokens")
    if readable is not None and readable.dtype != torch.bool:
        raise ValueError(f"readable is {readable.dtype}, but must be boolean, True where a token is real")
    if state is not None and len(state.lengths) != batch:
        raise ValueError(f"the state holds {len(state.lengths)} rows, but the inputs have {batch}")
    if state is not None and documents is not None:
        raise ValueError("documents were given with a state; a state's rows are one document each")
    fresh = state is None or all(slots.filled == 0 for slots in state.slots)
    aligned = fresh and positions is None and readable is None
    if positions is None and state is not None:
        positions = state.next_positions(readable, length)
    elif positions is None:
        positions = count_positions(readable, batch, length, device)
    return Context(positions, positions, readable, documents, aligned=aligned, taps=taps, fused=fused)


def make_state(stack: Stack, batch: int, length: int, spare: int) -> DecodeState:
    weight = next(stack.parameters())
    allocator = StateAllocator(batch, length, weight.dtype, weight.device, spare)
    blocks: list[BlockState] = stack.init_state(allocator)
    return DecodeState(
        blocks, list(allocator.slots.values()), torch.zeros(batch, dtype=torch.long, device=weight.device)
    )


def last_real(x: Float[Tensor, "B T D"], readable: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B 1 D"]:
    """Each row's last position that is not padding."""
    if readable is None:
        return x[:, -1:]
    places = torch.arange(x.shape[1], device=x.device)
    last = torch.where(readable, places, 0).argmax(dim=1)
    return x[torch.arange(len(x), device=x.device), last][:, None]


def check_ids(tokens: Tensor) -> None:
    if tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.dim() != 2:
        kind = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        raise ValueError(f"token ids are {kind}, but must be whole numbers of shape [batch, length]")
