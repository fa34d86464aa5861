"""Every step of a computation with its shape, weights and FLOPs, from the config alone."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from clearhead.configs import (
    ConfigError,
    EmbeddingConfig,
    EncoderDecoderConfig,
    ModelConfig,
    PatchEmbeddingConfig,
    Scope,
    Step,
)
from clearhead.models.presets import find_config

if TYPE_CHECKING:
    from clearhead.models.model import Model


@dataclass(frozen=True)
class Trace:
    """The steps of one forward pass; `str` prints them, repeated blocks once."""

    config: ModelConfig
    sizes: dict[str, int]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Every step of every block."""
        return tuple(self.config.steps(Scope(self.sizes)))

    @cached_property
    def folded(self) -> tuple[Step, ...]:
        """The steps of each distinct block, once; `Step.repeats` says how many blocks compute them."""
        return tuple(self.config.steps(Scope(self.sizes, folded=True)))

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
                    "repeats": step.repeats,
                }
                for step in self.folded
            ],
        }

    def sections(self) -> Iterator[tuple[str, list[Step]]]:
        """The steps by the part of the model they belong to; consecutive equal blocks are one section."""
        blocks = [(name, list(steps)) for name, steps in groupby(self.folded, key=lambda step: section(step.name))]
        bare = groupby(blocks, key=lambda named: [without_place(step, named[0]) for step in named[1]])
        runs = [list(run) for _, run in bare]
        patterns = {place: sum(is_repeated(run, place) for run in runs) for place in ("stack", "encoder", "decoder")}
        for run in runs:
            (first, steps), (last, _) = run[0], run[-1]
            place, repeats = first.partition(".")[0], steps[0].repeats
            number = int(last.rpartition(".")[2]) if ".blocks." in last else 0
            if repeats > 1 and patterns[place] == 1:  # equal blocks only: their numbers run on
                number += len(run) * (repeats - 1)
                count, again = len(run) * repeats, ""
            else:
                count, again = len(run), f", repeated {repeats:,} times with its pattern" if repeats > 1 else ""
            title = f"{first}{again}" if count == 1 else f"{first} … {number} ({count:,} alike{again})"
            yield title, [replace(step, name=step.name.removeprefix(first).lstrip(".") or first) for step in steps]

    def __str__(self) -> str:
        lines = []
        for title, steps in self.sections():
            lines.append(title)
            lines += [f"  {step.name:<24} {shape_text(step):<44} {step.formula}" for step in steps]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """A table, for notebooks."""
        rows = []
        for title, steps in self.sections():
            rows.append(f'<tr><th colspan="3" style="text-align:left">{html.escape(title)}</th></tr>')
            rows += [html_row(step.name, shape_text(step), step.formula) for step in steps]
        return f"<table>{''.join(rows)}</table>"


def trace(
    config: ModelConfig | Model | str,
    *,
    batch: int = 1,
    length: int | None = None,
    source_length: int | None = None,
) -> Trace:
    """The steps of a forward pass over `batch` rows of `length` tokens. No weights are allocated.

    >>> trace("gpt2", batch=2, length=10).steps[0].shape
    (2, 10, 768)
    """
    config = find_config(config)
    sizes = input_sizes(config, batch, length, source_length)
    return Trace(config, sizes)


def input_sizes(
    config: ModelConfig, batch: int, length: int | None, source_length: int | None = None
) -> dict[str, int]:
    """The sizes that the input decides; a length that the model cannot read is an error."""
    for name, value in {"batch": batch, "length": length, "source length": source_length}.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, but must be at least 1")
    length = readable_length(config, length)
    sizes = {"B": batch, "T": length, "S": length}
    if isinstance(config, EncoderDecoderConfig):
        if source_length is not None and config.source.positions(source_length) != source_length:
            fixed = config.source.positions(source_length)
            raise ConfigError(f"the source length is {source_length}, but this model reads {fixed} positions of sound")
        sizes["source"] = sizes["source_new"] = source_length or length
    elif source_length is not None:
        raise ConfigError(f"the source length is {source_length}, but this model has no encoder; drop --source-length")
    return sizes


def readable_length(config: ModelConfig, length: int | None) -> int:
    embedding = target_embedding(config)
    if isinstance(embedding, PatchEmbeddingConfig):
        positions = embedding.patches + 1
        if length not in (None, positions):
            raise ConfigError(f"length is {length}, but an image gives this model {positions} positions")
        return positions
    most = getattr(embedding.position, "length", None)
    if length is None:
        stacks = (config.encoder, config.decoder) if isinstance(config, EncoderDecoderConfig) else (config.stack,)
        mixers = [block.mixer for stack in stacks for block in stack.distinct]
        return min(512, most or 512, *(mixer.longest for mixer in mixers if mixer.longest is not None))
    if most is not None and length > most:
        raise ConfigError(f"length is {length}, but this model has {most} learned positions")
    return length


def target_embedding(config: ModelConfig) -> EmbeddingConfig:
    """The embedding of the tokens that the model continues: of an encoder–decoder, the target's."""
    return (config.target or config.source) if isinstance(config, EncoderDecoderConfig) else config.embedding


def is_repeated(run: list[tuple[str, list[Step]]], place: str) -> bool:
    """Whether a run of equal blocks belongs to the repeated pattern of a stack."""
    name, steps = run[0]
    return name.startswith(f"{place}.blocks.") and steps[0].repeats > 1


def section(name: str) -> str:
    """`stack.blocks.3.mixer.qkv` -> `stack.blocks.3`; `embedding.tokens` -> `embedding`."""
    parts = name.split(".")
    return ".".join(parts[:3]) if "blocks" in parts[:2] else parts[0] if len(parts) == 2 else ".".join(parts[:-1])


def without_place(step: Step, place: str) -> Step:
    """The step without its block's number, for comparing blocks."""
    here = len(place) if "blocks" in place else 0
    return replace(step, name=step.name[here:], weights={name[here:]: shape for name, shape in step.weights.items()})


def html_row(*cells: str) -> str:
    inside = "".join(f'<td style="text-align:left">{html.escape(cell)}</td>' for cell in cells)
    return f"<tr>{inside}</tr>"


def shape_text(step: Step) -> str:
    """`[B,T,D] = [32,20,512]`."""
    return f"[{','.join(step.letters.split())}] = [{','.join(map(str, step.shape))}]"
