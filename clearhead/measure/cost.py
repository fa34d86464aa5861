"""What a model costs, from the config alone: parameters, FLOPs, memory, and how they grow.

Convention: a multiply-add is 2 FLOPs. Only matrix products count. Scores that a causal mask discards count too, since a
plain implementation computes them. One block of width d with a 4d feed-forward layer takes 24·n·d² + 4·n²·d FLOPs for n
tokens. Repeated blocks are counted once and multiplied, so any config takes milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from clearhead.configs import ConfigError, EncoderDecoderConfig, ModelConfig, Scope, StackConfig, Step

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


@dataclass(frozen=True)
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
