"""What a model costs, from the config alone: parameters, FLOPs, memory, and how they grow.

Convention: a multiply-add is 2 FLOPs. Only matrix products count. Scores that a causal mask discards count too, since a
plain implementation computes them. One block of width d with a 4d feed-forward layer takes 24·n·d² + 4·n²·d FLOPs for n
tokens. Repeated blocks are counted once and multiplied, so any config takes milliseconds.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clearhead.configs import ConfigError, EncoderDecoderConfig, ModelConfig, Scope, StackConfig, Step
from clearhead.models.presets import find_config
from clearhead.units import bytes_text, flops_text

from .trace import input_sizes

if TYPE_CHECKING:
    from clearhead.models.model import Model

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
HEADINGS = ("part", "parameters", "share", "FLOPs", "share", "grows as")
PARTS = ("embedding", "attention", "recurrence", "ffn", "norm", "head")


@dataclass(frozen=True)
class Parameters:
    """How many weights there are, and how many of them one token uses."""

    total: int
    active: int
    by_part: dict[str, int]


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward pass, of its last block, of decoding one token, and of a training step."""

    forward: int
    block: int
    decode: int
    train: int
    by_part: dict[str, int]


@dataclass(frozen=True)
class Memory:
    """Memory in bytes. Activations, gradients and AdamW's two moments are needed in training only."""

    weights: int
    kv_cache: int
    activations: int
    gradients: int
    optimizer: int

    @property
    def inference(self) -> int:
        return self.weights + self.kv_cache

    @property
    def training(self) -> int:
        return self.weights + self.activations + self.gradients + self.optimizer


@dataclass(frozen=True, repr=False)
class Cost:
    """The cost of one architecture at one batch size and length."""

    batch: int
    length: int
    dtype: str
    parameters: Parameters
    flops: Flops
    memory: Memory
    complexity: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        memory = vars(self.memory) | {"inference": self.memory.inference, "training": self.memory.training}
        return {
            "batch": self.batch,
            "length": self.length,
            "dtype": self.dtype,
            "parameters": vars(self.parameters),
            "flops": vars(self.flops),
            "memory": memory,
            "complexity": self.complexity,
        }

    def title(self) -> str:
        """`46,702,792,704 parameters, 12,879,925,248 active per token`."""
        total, active = self.parameters.total, self.parameters.active
        return f"{total:,} parameters" + ("" if active == total else f", {active:,} active per token")

    def part_rows(self) -> list[tuple[str, ...]]:
        """Each part of the model: its parameters, FLOPs, the shares of both, and how it grows."""
        parameters, flops = self.parameters, self.flops
        return [
            (
                part,
                f"{count:,}",
                f"{count / max(parameters.total, 1):.1%}",
                flops_text(flops.by_part[part]),
                f"{flops.by_part[part] / max(flops.forward, 1):.1%}",
                self.complexity[part],
            )
            for part, count in parameters.by_part.items()
        ]

    def total_rows(self, train: bool = False) -> list[tuple[str, str]]:
        """FLOPs and memory of the whole model, with `train` also those of a training step."""
        flops, memory, size = self.flops, self.memory, f"{self.batch} × {self.length} tokens"
        rows = [
            (f"forward, {size}", f"{flops.forward:,} FLOPs"),
            ("  the last block alone", f"{flops.block:,} FLOPs"),
            (f"weights in {self.dtype}", bytes_text(memory.weights)),
        ]
        if memory.kv_cache:
            rows += [
                ("decoding one token", f"{flops.decode:,} FLOPs"),
                (f"KV cache, {size}", bytes_text(memory.kv_cache)),
            ]
        if train:
            rows += [
                ("training step", f"{flops.train:,} FLOPs"),
                ("activations kept for the backward pass", bytes_text(memory.activations)),
                ("gradients", bytes_text(memory.gradients)),
                ("AdamW's moments", bytes_text(memory.optimizer)),
                ("training, total", bytes_text(memory.training)),
            ]
        return rows

    def __repr__(self) -> str:
        parts = [f"  {row[0]:<12}{row[1]:>18} {row[3]:>8} FLOPs  {row[5]}" for row in self.part_rows()]
        totals = [f"  {name:<30}{value:>32}" for name, value in self.total_rows()]
        return "\n".join((self.title(), *parts, *totals))

    def _repr_html_(self) -> str:
        """Two tables, for notebooks."""
        heads = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
        tables = [
            "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
            for rows in (self.part_rows(), self.total_rows())
        ]
        return f"<b>{self.title()}</b><table><tr>{heads}</tr>{tables[0]}</table><table>{tables[1]}</table>"


def cost(
    config: ModelConfig | Model | str,
    *,
    batch: int = 1,
    length: int | None = None,
    source_length: int | None = None,
    dtype: str = "float32",
) -> Cost:
    """Parameters, FLOPs and memory for `batch` rows of `length` tokens, of a config, a preset's name or a model.

    Nothing is allocated.

    >>> cost("gpt2").parameters.total
    124439808
    """
    config = find_config(config)
    if dtype not in BYTES:
        raise ConfigError(f"dtype is {dtype!r}, but must be one of {', '.join(BYTES)}")
    sizes = input_sizes(config, batch, length, source_length)
    steps = list(config.steps(Scope(sizes, folded=True)))
    width = BYTES[dtype]
    total = sum(map(parameters_of, steps))
    forward = sum(map(flops_of, steps))
    # decode the last of `length` tokens; the encoder and the other tokens have run already
    last = sizes | {"T": 1} | ({"source_new": 0} if "source" in sizes else {})
    kv_cache = width * state_numbers(config, Scope(sizes))
    return Cost(
        batch=batch,
        length=sizes["T"],
        dtype=dtype,
        parameters=Parameters(
            total=total,
            active=total - sum(step.idle * step.copies for step in steps),
            by_part=by_part(steps, parameters_of),
        ),
        flops=Flops(
            forward=forward,
            block=block_flops(config, steps),
            decode=sum(map(flops_of, config.steps(Scope(last, folded=True)))),
            train=3 * forward,  # the backward pass multiplies by each matrix twice: for its input and for itself
            by_part=by_part(steps, flops_of),
        ),
        memory=Memory(
            weights=width * total,
            kv_cache=kv_cache,
            activations=width * sum(step.kept * step.repeats * math.prod(step.shape) for step in steps),
            gradients=width * total,
            optimizer=2 * 4 * total,  # both moments in float32
        ),
        complexity={part: orders(step for step in steps if step.part == part) for part in parts_of(steps)},
    )


def parameters_of(step: Step) -> int:
    return step.parameters * step.copies


def flops_of(step: Step) -> int:
    return step.flops * step.repeats


def last_stack(config: ModelConfig) -> tuple[str, StackConfig]:
    """The decoder of an encoder–decoder, or the only stack, with its name."""
    return ("decoder", config.decoder) if isinstance(config, EncoderDecoderConfig) else ("stack", config.stack)


def state_numbers(config: ModelConfig, scope: Scope) -> int:
    """How many numbers decoding keeps; it grows linearly with the repeats of the pattern."""
    name, stack = last_stack(config)
    short = [config.with_value(f"{name}.repeats", repeats) for repeats in (1, 2)]
    one, two = (sum(map(math.prod, each.state(scope).values())) for each in short)
    return one + (stack.repeats - 1) * (two - one)


def block_flops(config: ModelConfig, steps: list[Step]) -> int:
    """FLOPs of the last block of the (decoder's) stack."""
    name, stack = last_stack(config)
    prefix = f"{name}.blocks.{len(stack.distinct) - 1}."
    return sum(step.flops for step in steps if step.name.startswith(prefix))


def parts_of(steps: Iterable[Step]) -> list[str]:
    present = {step.part for step in steps}
    return [part for part in PARTS if part in present]


def by_part(steps: list[Step], count: Callable[[Step], int]) -> dict[str, int]:
    return {part: sum(count(step) for step in steps if step.part == part) for part in parts_of(steps)}


def orders(steps: Iterable[Step]) -> str:
    """`O(n·d² + n²·d)`: the distinct orders of growth of a part's matrix products."""
    distinct = dict.fromkeys(step.order for step in steps if step.order)
    return f"O({' + '.join(distinct)})" if distinct else "O(n·d)"
