"""What positions and heads mean: distance only, windows that hold everything, groups of one, order or no order."""

from __future__ import annotations

import pytest
import torch

from clearhead.configs import (
    AttentionConfig,
    Causal,
    ConfigError,
    DualChunkConfig,
    Full,
    RotaryConfig,
    Window,
    YarnScaling,
)
from clearhead.models.model import SequenceModel
from clearhead.nn.tap import Taps

from .cases import CASES, MIXERS, block, sequence
from .tools import BATCH, LENGTH, RELATIVE, STREAMS, close, fresh, ids, kinds, sequence_model


def shifted(by: int) -> torch.Tensor:
    return (torch.arange(LENGTH) + by).expand(BATCH, -1)


@pytest.mark.parametrize("name", RELATIVE)
def test_relative_positions_see_distance_only(name: str) -> None:
    model, tokens = sequence_model(name), ids(BATCH, LENGTH)
    with torch.no_grad():
        here, there = model(tokens), model(tokens, positions=shifted(1000))
    close(there, here, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("name", [name for name in STREAMS if kinds(CASES[name]) & {"Sinusoidal", "Learned"}])
def test_absolute_positions_see_the_place(name: str) -> None:
    model, tokens = sequence_model(name), ids(BATCH, LENGTH)
    with torch.no_grad():
        here, there = model(tokens), model(tokens, positions=shifted(3))
    assert ((here - there).abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("name", [name for name in STREAMS if kinds(CASES[name]) & {"Rotary", "Alibi"}])
def test_relative_positions_see_distance(name: str) -> None:
    """Tokens twice as far apart are not the same text."""
    model, tokens = sequence_model(name), ids(BATCH, LENGTH)
    with torch.no_grad():
        near, far = model(tokens), model(tokens, positions=shifted(0) * 2)
    assert not torch.allclose(near, far, atol=1e-4)


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_a_pair_is_turned_by_position_times_frequency(layout: str) -> None:
    """(1, 0) at position p becomes (cos pθ, sin pθ): counter-clockwise, the first pair fastest."""
    mixer = AttentionConfig(heads=1, head_dim=4, mask=Causal(), rotary=RotaryConfig(theta=100.0, layout=layout))
    model, taps = fresh(sequence(block(mixer), repeats=1)), Taps(read=["*.query", "*.query_rotated"])
    with torch.no_grad():
        model(ids(1, LENGTH), taps=taps)
    query, turned = (taps.values[f"stack.blocks.0.mixer.{name}"][0, 0] for name in ("query", "query_rotated"))
    pairs = [(0, 2), (1, 3)] if layout == "halves" else [(0, 1), (2, 3)]
    for (a, b), frequency in zip(pairs, (1.0, 0.1), strict=True):
        angle = torch.arange(LENGTH, dtype=torch.float64) * frequency
        close(turned[:, a], query[:, a] * angle.cos() - query[:, b] * angle.sin())
        close(turned[:, b], query[:, a] * angle.sin() + query[:, b] * angle.cos())


def test_partial_rotary_leaves_the_rest() -> None:
    taps = Taps(read=["*.query", "*.query_rotated", "*.key", "*.key_rotated", "*.value"])
    with torch.no_grad():
        sequence_model("interleaved, partial rotary; pre")(ids(BATCH, LENGTH), taps=taps)
    for name in ("query", "key"):
        plain, turned = (taps.values[f"stack.blocks.0.mixer.{name}{suffix}"] for suffix in ("", "_rotated"))
        assert torch.equal(turned[..., 6:], plain[..., 6:])
        assert torch.equal(turned[:, :, 0], plain[:, :, 0]), "position 0 does not turn"
        assert (turned[..., 1:, :6] - plain[..., 1:, :6]).abs().amax(-1).min() > 1e-4
        close(turned.norm(dim=-1), plain.norm(dim=-1))


def twins(one: AttentionConfig, other: AttentionConfig) -> tuple[SequenceModel, SequenceModel]:
    """Two models that differ in their mixer, with the same weights as far as they have the same shapes."""
    first, second = fresh(sequence(block(one))), fresh(sequence(block(other)))
    weights = {
        name: weight for name, weight in first.state_dict().items() if weight.shape == second.state_dict()[name].shape
    }
    second.load_state_dict(weights, strict=False)
    assert isinstance(first, SequenceModel)
    assert isinstance(second, SequenceModel)
    return first, second


@pytest.mark.parametrize("mask", [Causal() & Window(LENGTH), Window(50) & Causal(), Causal() & Causal()], ids=str)
def test_a_window_that_holds_everything_is_no_window(mask: Causal) -> None:
    plain, window = twins(AttentionConfig(heads=5, mask=Causal()), AttentionConfig(heads=5, mask=mask))
    with torch.no_grad():
        close(window(ids(BATCH, LENGTH)), plain(ids(BATCH, LENGTH)))
        narrower = twins(AttentionConfig(heads=5, mask=Causal()), AttentionConfig(heads=5, mask=Causal() & Window(6)))[
            1
        ]
        difference = (narrower(ids(BATCH, LENGTH)) - plain(ids(BATCH, LENGTH))).abs().amax(-1)
    assert difference[:, :6].max() < 1e-9
    assert difference[:, 6].min() > 1e-6


def test_a_window_both_ways_that_holds_everything_is_full() -> None:
    full, window = twins(AttentionConfig(heads=5, mask=Full()), AttentionConfig(heads=5, mask=Window(LENGTH)))
    with torch.no_grad():
        close(window(ids(BATCH, LENGTH)), full(ids(BATCH, LENGTH)))


def test_as_many_groups_as_heads_is_multi_head() -> None:
    mha = AttentionConfig(heads=6, head_dim=8, mask=Causal(), rotary=RotaryConfig())
    one, other = twins(mha, AttentionConfig(heads=6, kv_heads=6, head_dim=8, mask=Causal(), rotary=RotaryConfig()))
    with torch.no_grad():
        assert torch.equal(one(ids(BATCH, LENGTH)), other(ids(BATCH, LENGTH)))


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_grouped_is_multi_head_with_repeated_keys(groups: int, bias: bool) -> None:
    """Query head h reads group h·G/H: neighbours share a group."""
    sizes = {"heads": 6, "head_dim": 8, "value_dim": 9, "mask": Causal(), "rotary": RotaryConfig(), "qkv_bias": bias}
    grouped, whole = twins(AttentionConfig(**sizes, kv_heads=groups), AttentionConfig(**sizes))
    with torch.no_grad():
        for few, many in zip(grouped.stack.blocks, whole.stack.blocks, strict=True):
            for name, weight in few.mixer.qkv.named_parameters():
                q, k, v = weight.split((48, groups * 8, groups * 9))
                k, v = (
                    x.unflatten(0, (groups, -1)).repeat_interleave(6 // groups, dim=0).flatten(0, 1) for x in (k, v)
                )
                getattr(many.mixer.qkv, name).copy_(torch.cat((q, k, v)))
        for fused in (True, False):
            close(grouped(ids(BATCH, LENGTH), fused=fused), whole(ids(BATCH, LENGTH)))


ORDERS = {
    "no positions": ("mha, full", None, True),
    "rotary": ("latent, full", None, False),
    "alibi": ("alibi, full", None, False),
    "sinusoidal": ("mha, full", "position: sinusoidal", False),
    "learned": ("mha, full", "position: learned", False),
}


@pytest.mark.parametrize("name", ORDERS)
def test_without_positions_order_means_nothing(name: str) -> None:
    """f(permuted x) is permuted f(x), and with positions it is not."""
    mixer, position, free = ORDERS[name]
    added = None if position is None else CASES[position].embedding.position
    model, tokens = fresh(sequence(block(MIXERS[mixer]), position=added)), ids(BATCH, LENGTH)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    with torch.no_grad():
        same = torch.allclose(model(tokens[:, order]), model(tokens)[:, order], atol=1e-9)
    assert same == free


def test_position_changes_neither_values_nor_the_first_token() -> None:
    """Rotary turns queries and keys, never values: a window of one reads itself whatever its position."""
    model, tokens = (
        fresh(sequence(block(AttentionConfig(heads=5, mask=Window(1), rotary=RotaryConfig())))),
        ids(BATCH, 1),
    )
    with torch.no_grad():
        here, there = model(tokens), model(tokens, positions=torch.full((BATCH, 1), 77))
    close(there, here)


@pytest.mark.parametrize(("chunk", "length"), [(3, 5), (4, 8), (2, 20), (50, 60)])
def test_dual_chunk_is_its_definition(chunk: int, length: int) -> None:
    """An et al. 2024, pair by pair: which position the key has, and which the query has for it."""
    rotary = DualChunkConfig(chunk=chunk, length=length, rotary=RotaryConfig(theta=100.0))
    mixer = AttentionConfig(heads=1, head_dim=6, mask=Causal(), rotary=rotary)
    model, taps, n = fresh(sequence(block(mixer), repeats=1)), Taps(read=["*.query", "*.key", "*.scores"]), 17
    with torch.no_grad():
        model(ids(1, n), taps=taps)
    q, k, scores = (taps.values[f"stack.blocks.0.mixer.{name}"][0, 0] for name in ("query", "key", "scores"))

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        angles = position * 100.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
        a, b = x[:3], x[3:]
        return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()))

    for i in range(n):
        for j in range(i + 1):
            apart = i // chunk - j // chunk
            place = [i % chunk, min(i % chunk + chunk, length - 1), length - 1][min(apart, 2)]
            close(scores[i, j], turned(q[i], place) @ turned(k[j], j % chunk) / 6**0.5)


def test_dual_chunk_within_one_chunk_is_plain_rotary() -> None:
    dual = DualChunkConfig(chunk=LENGTH, length=20, rotary=RotaryConfig())
    one, other = twins(
        AttentionConfig(heads=5, mask=Causal(), rotary=RotaryConfig()),
        AttentionConfig(heads=5, mask=Causal(), rotary=dual),
    )
    with torch.no_grad():
        close(one(ids(BATCH, LENGTH)), other(ids(BATCH, LENGTH)))


def test_scaling_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"YarnScaling\.fast is 1.*, but must be above slow, 32"):
        YarnScaling(factor=4.0, length=16, fast=1, slow=32)
    for rotation in (0.0, -1.0):
        with pytest.raises(ConfigError, match=rf"YarnScaling\.rotation is {rotation}, but must be positive"):
            YarnScaling(factor=4.0, length=16, rotation=rotation)
    with pytest.raises(ConfigError, match=r"Rotary\.theta is 1\.0, but must be above 1 for YaRN"):
        RotaryConfig(theta=1.0, scaling=YarnScaling(factor=4.0, length=16))


def test_dual_chunk_reads_no_later_chunk() -> None:
    with pytest.raises(ConfigError, match="DualChunk, which reads earlier chunks only, but the mask is Full"):
        AttentionConfig(heads=5, rotary=DualChunkConfig(chunk=4, length=8))
    with pytest.raises(ConfigError, match=r"DualChunk\.chunk is 8, but must be below length=8"):
        DualChunkConfig(chunk=8, length=8)
