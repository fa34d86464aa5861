"""Attention without positions is permutation-equivariant: reordering the tokens reorders the outputs."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from clearhead.configs import (
    AlibiConfig,
    AttentionConfig,
    BlockConfig,
    Causal,
    FeedForwardConfig,
    LearnedConfig,
    LinearAttentionConfig,
    LSTMConfig,
    MixerConfig,
    RotaryConfig,
    SequenceModelConfig,
    SinusoidalConfig,
    StackConfig,
    TokenEmbeddingConfig,
)
from clearhead.configs.positions import AddedPositionConfig
from clearhead.models.model import build

from .result import Result, Rows, require

EQUAL = 1e-9  # in float64: below it, two outputs differ by rounding alone


def permutation(
    *, length: int = 24, dim: int = 32, heads: int = 4, layers: int = 2, draws: int = 8, seed: int = 0
) -> Result:
    """Run encoders on a text and on the same text in another order."""
    require(3, length=length)
    require(1, dim=dim, heads=heads, layers=layers, draws=draws)
    attention = AttentionConfig(heads=heads)
    kinds: dict[str, tuple[MixerConfig, AddedPositionConfig | None]] = {
        "attention alone": (attention, None),
        "linear attention alone": (LinearAttentionConfig(heads=heads), None),
        "causal attention alone": (AttentionConfig(heads=heads, mask=Causal()), None),
        "LSTM alone": (LSTMConfig(), None),
        "sinusoidal": (attention, SinusoidalConfig()),
        "learned": (attention, LearnedConfig(length=length)),
        "rotary": (AttentionConfig(heads=heads, rotary=RotaryConfig()), None),
        "ALiBi": (AttentionConfig(heads=heads, score_bias=AlibiConfig()), None),
    }
    rows: Rows = []
    for name, (mixer, position) in kinds.items():
        each, pooled = equivariance_error(encoder(mixer, position, dim, layers, length), length, draws, seed)
        rows.append((name, each, pooled, "yes" if each < EQUAL else "no"))
    kept = [row[0] for row in rows if row[3] == "yes"]
    order = next(row for row in rows if row[0] == "causal attention alone")
    return Result(
        name="permutation",
        claim="Attention without positions is equivariant: f(Px) = P f(x) for every order P; positions break it.",
        found=(
            f"It holds to rounding for {' and '.join(map(str, kept))}, and then the mean over tokens does not depend "
            f"on the order. Every kind of positions breaks it. So does the causal mask alone, by {order[1]:.2f}: "
            "the mask depends on the order, which is why decoders without positions can still use it."
        ),
        columns=("model", "‖f(Px) − P f(x)‖", "‖mean f(Px) − mean f(x)‖", "equivariant"),
        rows=rows,
        draw=lambda picture, theme: draw(picture, rows),
        size=(8.5, 4.4),
    )


def encoder(
    mixer: MixerConfig, position: AddedPositionConfig | None, dim: int, layers: int, length: int
) -> SequenceModelConfig:
    block = BlockConfig(mixer=mixer, ffn=FeedForwardConfig())
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=4 * length, position=position),
        stack=StackConfig(dim=dim, pattern=(block,), repeats=layers),
    )


@torch.inference_mode()
def equivariance_error(config: SequenceModelConfig, length: int, draws: int, seed: int) -> tuple[float, float]:
    """Relative error ‖f(Px) − P f(x)‖/‖f(x)‖ and the same for the mean over tokens, averaged over random orders P."""
    torch.manual_seed(seed)
    model = build(config).double().eval()
    for parameter in model.parameters():
        parameter.mul_(4)  # larger weights make attention less uniform
    tokens = torch.randint(0, 4 * length, (1, length))
    out = model(tokens)
    each, pooled = [], []
    for _ in range(draws):
        order = random_order(length)
        again = model(tokens[:, order])
        each.append(float((again - out[:, order]).norm() / out.norm()))
        pooled.append(float((again.mean(1) - out.mean(1)).norm() / out.mean(1).norm()))
    return sum(each) / draws, sum(pooled) / draws


def random_order(length: int) -> Int[Tensor, "T"]:
    """An order by chance, but another one, and not the reverse, which leaves all distances as they were."""
    order, same = torch.randperm(length), torch.arange(length)
    return random_order(length) if torch.equal(order, same) or torch.equal(order, same.flip(0)) else order


def draw(picture: Any, rows: list[Any]) -> None:
    axis = picture.subplots()
    names, each, pooled, _ = zip(*rows, strict=True)
    places = range(len(names))
    axis.barh([y - 0.2 for y in places], [max(v, 1e-17) for v in each], height=0.36, label="of each token")
    axis.barh([y + 0.2 for y in places], [max(v, 1e-17) for v in pooled], height=0.36, label="of the mean", hatch="//")
    axis.axvline(EQUAL, color="gray", linestyle=":", linewidth=1)
    axis.text(EQUAL, -0.75, " rounding ends here", fontsize=8, color="gray", va="center")
    axis.set_yticks(places, names)
    axis.set(
        xscale="log", xlabel="relative change of the output, tokens moved back (float64)", ylim=(len(names) - 0.4, -1.1)
    )
    axis.set_title("Does the output of a token depend on the order of the others?")
    axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.75, 0.9))
    axis.grid(axis="x", alpha=0.4)
