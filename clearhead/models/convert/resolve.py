"""Two configs that say the same: what a field leaves open is written out, so that they become equal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from clearhead.configs import (
    And,
    AttentionConfig,
    EncoderDecoderConfig,
    FeedForwardConfig,
    GatedFeedForwardConfig,
    LatentAttentionConfig,
    LinearAttentionConfig,
    LinformerConfig,
    LongformerConfig,
    LSTMConfig,
    MambaConfig,
    Mask,
    ModelConfig,
    MoEConfig,
    NTKScaling,
    RotaryConfig,
    ShortConvConfig,
    StackConfig,
    YarnScaling,
)
from clearhead.configs.stack import FeedConfig, MixerConfig

M = TypeVar("M", bound=ModelConfig)


def spelled_out(config: M) -> M:
    """The same model with every size given."""
    if isinstance(config, EncoderDecoderConfig):
        return replace(config, encoder=stack(config.encoder), decoder=stack(config.decoder))
    return replace(config, stack=stack(config.stack))


def stack(config: StackConfig) -> StackConfig:
    first, pattern = (tuple(spelled_block(b, config.dim) for b in blocks) for blocks in (config.first, config.pattern))
    return replace(config, first=first, pattern=pattern)


def spelled_block(block: Any, dim: int) -> Any:
    parts: dict[str, Any] = {"mixer": mixer(block.mixer, dim)}
    if block.ffn is not None:
        parts["ffn"] = feed_forward(block.ffn, dim)
    if getattr(block, "cross", None) is not None:
        parts["cross"] = mixer(block.cross, dim)
    return replace(block, **parts)


def mixer(config: MixerConfig, dim: int) -> MixerConfig:
    if isinstance(config, LSTMConfig):
        return replace(config, hidden=config.hidden or dim)
    if isinstance(config, MambaConfig):
        return replace(config, inner=config.inner or 2 * dim, rank=config.rank or -(-dim // 16))
    if isinstance(config, LinearAttentionConfig | LinformerConfig):
        key, value = config.widths(dim)
        return replace(config, head_dim=key, value_dim=value)
    mask = ordered(config.mask)
    if isinstance(config, LatentAttentionConfig):
        return replace(config, mask=mask, rotary=rotary(config.rotary, config.rope_dim))
    if isinstance(config, LongformerConfig | ShortConvConfig):
        return config
    assert isinstance(config, AttentionConfig)
    key, value = config.widths(dim)
    turned = rotary(config.rotary, key) if isinstance(config.rotary, RotaryConfig) else config.rotary
    return replace(config, kv_heads=config.groups, head_dim=key, value_dim=value, mask=mask, rotary=turned)


def feed_forward(config: FeedConfig, dim: int) -> FeedConfig:
    if isinstance(config, MoEConfig):
        shared = None if config.shared is None else with_width(config.shared, dim)
        return replace(config, expert=with_width(config.expert, dim), shared=shared)
    return with_width(config, dim)


def with_width(
    config: FeedForwardConfig | GatedFeedForwardConfig, dim: int
) -> FeedForwardConfig | GatedFeedForwardConfig:
    return replace(config, hidden=config.width(dim))


def rotary(config: RotaryConfig, head_dim: int) -> RotaryConfig:
    width = config.width(head_dim)
    scaling, theta = config.scaling, config.theta
    if isinstance(scaling, NTKScaling):  # nothing but another θ
        theta, scaling = theta if width == 2 else theta * scaling.factor ** (width / (width - 2)), None
    elif isinstance(scaling, YarnScaling):
        scaling = replace(scaling, rotation=config.magnitude)
    return replace(config, theta=theta, scaling=scaling, dim=None if width == head_dim else width)


def ordered(mask: Mask) -> Mask:
    """Causal before Window, whichever was written first."""
    if isinstance(mask, And) and mask.left.kind() > mask.right.kind():
        return And(mask.right, mask.left)
    return mask


def differences(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Where two configs describe different computations. Dropout does not count: it is no part of the function."""
    return list(compare(listed(ours), listed(theirs), ""))


def listed(config: ModelConfig) -> dict[str, Any]:
    """As plain data, a stack being the list of its blocks, spelled out, however it repeats them."""
    data = config.to_dict()
    for name in ("stack", "encoder", "decoder"):
        if isinstance(part := getattr(config, name, None), StackConfig):
            known = {block: spelled_block(block, part.dim).to_dict() for block in {*part.blocks}}
            data[name] = {"dim": part.dim, "blocks": [known[block] for block in part.blocks]}
            places = [part.place(i) for i in range(len(part.blocks))]
            data[name] |= {"shared": None if places == [*range(len(places))] else places}
            data[name] |= {"final_norm": None if part.final_norm is None else part.final_norm.to_dict()}
    return data


def compare(a: Any, b: Any, where: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in (key for key in a if key != "dropout"):
            yield from compare(a[key], b[key], f"{where}.{key}" if where else key)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, pair in enumerate(zip(a, b, strict=True)):
            yield from compare(*pair, f"{where}.{i}")
    elif isinstance(a, float | int) and isinstance(b, float | int) and not isinstance(a, bool):
        if not math.isclose(a, b, rel_tol=1e-9):
            yield f"{where} is {a} and {b}"
    elif a != b:
        yield f"{where} is {short(a)} and {short(b)}"


def short(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("kind"))
    return f"{len(value)} parts" if isinstance(value, list) else str(value)
