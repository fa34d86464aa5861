"""What a model costs, from the config alone: parameters, FLOPs, memory, and how they grow.

Convention: a multiply-add is 2 FLOPs; matrix products only; what a causal mask throws away is counted, since a plain
implementation computes it. One block of width d with a 4d feed-forward layer then takes 24·n·d² + 4·n²·d for n tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from clearhead.configs import ConfigError, EncoderDecoderConfig, ModelConfig, Scope, Step

from .trace import input_sizes

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
PARTS = ("embedding", "attention", "recurrence", "ffn", "norm", "head")


@dataclass(frozen=True)
class Parameters:
    """How many weights there are, and how many of them one token uses."""

    total: int
    active: int
    by_part: dict[str, int]


@dataclass(frozen=True)
class Flops:
    """Of one forward pass, of one block in it, of decoding its last token alone, and of a training step."""

    forward: int
    block: int
    decode: int
    train: int
    by_part: dict[str, int]


@dataclass(frozen=True)
class Memory:
    """Bytes. Activations, gradients and AdamW's two moments are there in training only."""

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


@dataclass(frozen=True)
class Cost:
    """The bill for one architecture at one batch and length."""

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


def cost(
    config: ModelConfig,
    *,
    batch: int = 1,
    length: int | None = None,
    source_length: int | None = None,
    dtype: str = "float32",
) -> Cost:
    """Parameters, FLOPs and memory of `config` for `batch` rows of `length` tokens; nothing is allocated."""
    if dtype not in BYTES:
        raise ConfigError(f"dtype is {dtype!r}, but must be one of {', '.join(BYTES)}")
    sizes = input_sizes(config, batch, length, source_length)
    steps = list(config.steps(Scope(sizes)))
    width = BYTES[dtype]
    total = sum(step.parameters for step in steps)
    forward = sum(step.flops for step in steps)
    # the last of `length` tokens, the others kept in the state; an encoder has run already
    last = sizes | {"T": 1} | ({"source_new": 0} if "source" in sizes else {})
    kv_cache = width * sum(map(math.prod, config.state(Scope(sizes)).values()))
    return Cost(
        batch=batch,
        length=sizes["T"],
        dtype=dtype,
        parameters=Parameters(
            total=total, active=total - sum(step.idle for step in steps), by_part=by_part(steps, parameters_of)
        ),
        flops=Flops(
            forward=forward,
            block=block_flops(config, steps),
            decode=sum(step.flops for step in config.steps(Scope(last))),
            train=3 * forward,  # the backward pass multiplies by each matrix twice: for its input and for itself
            by_part=by_part(steps, lambda step: step.flops),
        ),
        memory=Memory(
            weights=width * total,
            kv_cache=kv_cache,
            activations=width * sum(step.kept * math.prod(step.shape) for step in steps),
            gradients=width * total,
            optimizer=2 * 4 * total,  # both moments in float32
        ),
        complexity={part: orders(step for step in steps if step.part == part) for part in parts_of(steps)},
    )


def parameters_of(step: Step) -> int:
    return step.parameters


def block_flops(config: ModelConfig, steps: list[Step]) -> int:
    """Of the last block of the (decoder's) stack."""
    stack, place = (config.decoder, "decoder") if isinstance(config, EncoderDecoderConfig) else (config.stack, "stack")
    prefix = f"{place}.blocks.{len(stack.blocks) - 1}."
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
