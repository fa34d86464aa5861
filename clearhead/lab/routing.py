"""One attention layer and one FFN with hand-set weights compute any function of a few chosen inputs.

Output i is f_i(x at π_1(i), …, x at π_k(i)). Head r copies the token at π_r(i) to position i: its query is the one-hot
of π_r(i), its keys are one-hot positions, and a large score gap makes every other weight underflow to 0.
The FFN has one hidden unit per position and tuple of inputs, active only for that tuple.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LearnedConfig,
    LMHeadConfig,
    SequenceModelConfig,
    TokenEmbeddingConfig,
)
from clearhead.models.model import SequenceModel
from clearhead.nn.tap import Taps

from .manual_weights import IDENTITY_NORM, Fields, stack_of, zero_model
from .result import Result, Rows, require, tidy

MOST = 2**12  # limit on inputs tested


@dataclass(frozen=True)
class SparseFunction:
    """A function in which each output depends on a few inputs."""

    symbols: int
    route: Int[Tensor, "T k"]  # π_r(i): which inputs output i reads
    table: Int[Tensor, "T ..."]  # f_i, by the values of these inputs

    @classmethod
    def random(cls, symbols: int, length: int, inputs: int, generator: torch.Generator) -> SparseFunction:
        route = torch.randint(0, length, (length, inputs), generator=generator)
        return cls(symbols, route, torch.randint(0, symbols, (length, *[symbols] * inputs), generator=generator))

    def __call__(self, x: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """Evaluate by table lookup."""
        read = x[:, self.route].unbind(-1)
        return self.table[(torch.arange(x.shape[1]), *read)]


def build_model(function: SparseFunction, gap: float, dtype: torch.dtype = torch.float32) -> SequenceModel:
    """Build the model whose logits are the one-hot value of the function."""
    (length, inputs), symbols = function.route.shape, function.symbols
    at = Fields(token=symbols, position=length, copied=inputs * symbols, out=symbols)
    block = BlockConfig(
        mixer=AttentionConfig(heads=inputs, head_dim=length, value_dim=symbols),
        ffn=FeedForwardConfig(hidden=length * symbols**inputs, activation="relu"),
        norm=IDENTITY_NORM,
    )
    config = SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=symbols, position=LearnedConfig(length=length)),
        stack=stack_of(at.dim, block),
        head=LMHeadConfig(vocabulary=symbols),
    )
    model = zero_model(config, dtype)
    mixer, ffn = (getattr(model.stack.layers()[0], name) for name in ("mixer", "ffn"))
    with torch.no_grad():
        model.embedding.tokens.weight[:, at["token"]] = torch.eye(symbols)
        model.embedding.position.weight[:, at["position"]] = torch.eye(length)
        queries, keys, values = (part.unflatten(0, (inputs, -1)) for part in mixer.qkv.weight.split(mixer.rows))
        for r in range(inputs):
            chosen = function.route[:, r], torch.arange(length) + at.at("position")
            queries[r][chosen] = gap * length**0.5  # attention divides by √K, and K is the length here
            keys[r][:, at["position"]] = torch.eye(length)
            values[r][:, at["token"]] = torch.eye(symbols)
        mixer.out.weight[at["copied"]] = torch.eye(inputs * symbols)
        cases = product(range(length), *[range(symbols)] * inputs)
        for unit, (i, *read) in enumerate(cases):  # active if all k inputs and the position match
            ffn.up.weight[unit, at.at("position", i)] = 1
            for r, symbol in enumerate(read):
                ffn.up.weight[unit, at.at("copied", r * symbols + symbol)] = 1
            ffn.down.weight[at.at("out", int(function.table[(i, *read)])), unit] = 1
        ffn.up.bias.fill_(-inputs)
        head: Any = model.head
        head.weight[:, at["out"]] = torch.eye(symbols)
    return model


def routing(
    *,
    inputs: int = 3,
    length: int = 10,
    symbols: int = 2,
    trials: int = 5,
    gaps: Sequence[float] = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
    seed: int = 0,
) -> Result:
    """Build models for random functions and test them on all inputs (or a sample)."""
    require(1, inputs=inputs, length=length, symbols=symbols, trials=trials)
    generator = torch.Generator().manual_seed(seed)
    functions = [SparseFunction.random(symbols, length, inputs, generator) for _ in range(trials)]
    x = all_inputs(symbols, length, generator)
    rows: Rows = []
    for gap in sorted(gaps):
        strays, errors, wrong = zip(*(evaluate(function, gap, x) for function in functions), strict=True)
        rows.append((gap, max(strays), max(errors), sum(wrong) / (trials * x.numel())))
    model = build_model(functions[0], max(gaps))
    exact = [row[0] for row in rows if row[2] == 0]
    right = [row[0] for row in rows if row[3] == 0]
    return Result(
        name="routing",
        claim="One attention layer of k heads and a feed-forward layer are any function of k chosen inputs, exactly.",
        found=(
            f"{trials} random functions of {inputs} of {length} inputs with {symbols} symbols, {len(x):,} inputs each: "
            + (f"the logits are one-hot to the bit from a gap of {min(exact):g} on" if exact else "never to the bit")
            + (f", and all outputs right from {min(right):g} on. " if right else ", and some outputs are wrong. ")
            + f"It takes {length}·{symbols}^{inputs} hidden units: exact, but exponential in k, and the route depends "
            "on the position only."
        ),
        columns=("score gap", "largest other weight", "largest |logit − one-hot|", "share of outputs wrong"),
        rows=rows,
        draw=lambda picture, theme: draw(picture, rows),
        more={
            "parameters": sum(p.numel() for p in model.parameters()),
            "hidden": length * symbols**inputs,
            "inputs_tried": len(x),
        },
        size=(8, 4.6),
    )


def all_inputs(symbols: int, length: int, generator: torch.Generator) -> Int[Tensor, "B T"]:
    if symbols**length <= MOST:
        return torch.tensor(list(product(range(symbols), repeat=length)))
    return torch.randint(0, symbols, (MOST, length), generator=generator)


@torch.inference_mode()
def evaluate(function: SparseFunction, gap: float, x: Int[Tensor, "B T"]) -> tuple[float, float, int]:
    """Return the largest stray weight, the largest |logit − one-hot|, and the number of wrong outputs."""
    model = build_model(function, gap)
    wanted = function(x)
    logits = model(x)
    error = (logits - torch.nn.functional.one_hot(wanted, function.symbols)).abs().max()
    taps = Taps(read=["stack.blocks.0.mixer.weights"])
    model(x[:1], taps=taps)
    weights = taps.values["stack.blocks.0.mixer.weights"][0]
    chosen = torch.nn.functional.one_hot(function.route.T, x.shape[1]).bool()
    stray = weights.masked_fill(chosen, 0).max()
    return float(stray), float(error), int((logits.argmax(-1) != wanted).sum())


def draw(picture: Any, rows: list[Any]) -> None:
    axis = picture.subplots()
    gaps, stray, error, wrong = zip(*rows, strict=True)
    least = 1e-46  # where zero is drawn: below the smallest float32
    for values, line, label in (
        (stray, "o-", "largest weight on another input"),
        (error, "s--", "largest |logit − one-hot|"),
        (wrong, "^:", "share of outputs wrong"),
    ):
        axis.plot(gaps, [max(value, least) for value in values], line, label=label)
    axis.set(xscale="log", yscale="log", xlabel="gap between the chosen score and the others")
    powers = range(-36, 1, 6)
    names = ["exactly 0", *(f"$10^{{{power}}}$" for power in powers)]
    axis.set_yticks([least, *(10.0**power for power in powers)], names)
    axis.set_yticks([], minor=True)
    axis.set_xticks(gaps, [f"{gap:g}" for gap in gaps])
    axis.set_xticks([], minor=True)
    axis.set_title("Routing by hand-set attention becomes exact as other weights underflow (float32)")
    tidy(axis)
