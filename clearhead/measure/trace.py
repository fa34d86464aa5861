"""Every step of a computation with its shape, weights and FLOPs, from the config alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from clearhead.configs import (
    ConfigError,
    EncoderDecoderConfig,
    LinformerConfig,
    ModelConfig,
    PatchEmbeddingConfig,
    Scope,
    Step,
)


@dataclass(frozen=True)
class Trace:
    """The steps of one forward pass; `str` prints them, repeated blocks once."""

    config: ModelConfig
    sizes: dict[str, int]
    steps: tuple[Step, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "batch": self.sizes["B"],
            "length": self.sizes["T"],
            "steps": [
                {
                    "name": step.name,
                    "formula": step.formula,
                    "letters": step.letters.split(),
                    "shape": list(step.shape),
                    "part": step.part,
                    "weights": {name: list(shape) for name, shape in step.weights.items()},
                    "parameters": step.parameters,
                    "flops": step.flops,
                }
                for step in self.steps
            ],
        }

    def sections(self) -> Iterator[tuple[str, list[Step]]]:
        """The steps by the part of the model they belong to, runs of equal blocks as one section."""
        blocks = [(name, list(steps)) for name, steps in groupby(self.steps, key=lambda step: section(step.name))]
        for _, run in groupby(blocks, key=lambda named: [alike(step, named[0]) for step in named[1]]):
            names = [(name, steps) for name, steps in run]
            (first, steps), (last, _) = names[0], names[-1]
            title = first if len(names) == 1 else f"{first} … {last.rpartition('.')[2]} ({len(names)} alike)"
            yield title, [replace(step, name=step.name.removeprefix(first).lstrip(".") or first) for step in steps]

    def __str__(self) -> str:
        lines = []
        for title, steps in self.sections():
            lines.append(title)
            lines += [f"  {step.name:<24} {shape_text(step):<44} {step.formula}" for step in steps]
        return "\n".join(lines)


def trace(config: ModelConfig, *, batch: int = 1, length: int | None = None, source_length: int | None = None) -> Trace:
    """What a forward pass of `batch` rows of `length` tokens computes, step by step; no weight is allocated."""
    sizes = input_sizes(config, batch, length, source_length)
    return Trace(config, sizes, tuple(config.steps(Scope(sizes))))


def input_sizes(
    config: ModelConfig, batch: int, length: int | None, source_length: int | None = None
) -> dict[str, int]:
    """The letters that the input decides; a length that the model cannot read is an error."""
    for name, value in {"batch": batch, "length": length, "source length": source_length}.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, but must be at least 1")
    length = readable_length(config, length)
    sizes = {"B": batch, "T": length, "S": length}
    if isinstance(config, EncoderDecoderConfig):
        sizes["source"] = sizes["source_new"] = source_length or length
    elif source_length is not None:
        raise ConfigError("a source length was given, but this model has no encoder")
    return sizes


def readable_length(config: ModelConfig, length: int | None) -> int:
    embedding = config.source if isinstance(config, EncoderDecoderConfig) else config.embedding
    if isinstance(embedding, PatchEmbeddingConfig):
        positions = embedding.patches + 1
        if length not in (None, positions):
            raise ConfigError(f"length is {length}, but an image gives this model {positions} positions")
        return positions
    most = getattr(embedding.position, "length", None)
    if length is None:
        stacks = (config.encoder, config.decoder) if isinstance(config, EncoderDecoderConfig) else (config.stack,)
        mixers = [block.mixer for stack in stacks for block in stack.blocks]
        return min(512, most or 512, *(mixer.length for mixer in mixers if isinstance(mixer, LinformerConfig)))
    if most is not None and length > most:
        raise ConfigError(f"length is {length}, but this model has {most} learned positions")
    return length


def section(name: str) -> str:
    """`stack.blocks.3.mixer.qkv` -> `stack.blocks.3`; `embedding.tokens` -> `embedding`."""
    parts = name.split(".")
    return ".".join(parts[:3]) if "blocks" in parts[:2] else parts[0] if len(parts) == 2 else ".".join(parts[:-1])


def alike(step: Step, place: str) -> Step:
    """The step without its block's number, for comparing blocks."""
    here = len(place) if "blocks" in place else 0
    return replace(step, name=step.name[here:], weights={name[here:]: shape for name, shape in step.weights.items()})


def shape_text(step: Step) -> str:
    """`[B,T,D] = [32,20,512]`."""
    return f"[{','.join(step.letters.split())}] = [{','.join(map(str, step.shape))}]"
