"""Rules that convert tensors between their layout and ours, and readers of common `config.json` fields.

Rules work on NumPy arrays and torch tensors alike.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from clearhead.configs import (
    AttentionConfig,
    ClassHeadConfig,
    ConfigError,
    HeadConfig,
    LastTokenConfig,
    LMHeadConfig,
    MaskedLMHeadConfig,
    ModelConfig,
    PoolerConfig,
    RotaryConfig,
    ScalingConfig,
    SpanHeadConfig,
    TokenClassHeadConfig,
)
from clearhead.configs.base import Config, parse
from clearhead.configs.ffn import Activation
from clearhead.configs.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
    yarn_magnitude,
)

M = TypeVar("M", bound=Config)
Array = Any  # np.ndarray | torch.Tensor
LONGROPE = ("longrope", "su")  # the second is its first name


@dataclass(frozen=True)
class Rule:
    """Convert some of their tensors to some of our weights, and back. This rule only renames one array."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]

    def gather(self, parts: list[Array]) -> list[Array]:
        """Our arrays from theirs."""
        return parts

    def scatter(self, arrays: list[Array]) -> list[Array]:
        """Their arrays from ours."""
        return arrays


@dataclass(frozen=True)
class Transposed(Rule):
    """They store [in, out]."""

    def gather(self, parts: list[Array]) -> list[Array]:
        return [parts[0].T]

    def scatter(self, arrays: list[Array]) -> list[Array]:
        return [arrays[0].T]


@dataclass(frozen=True)
class Rows(Rule):
    """They store blocks of our rows as tensors of their own."""

    sizes: tuple[int, ...]

    def gather(self, parts: list[Array]) -> list[Array]:
        return [library(parts[0]).concatenate(parts)]

    def scatter(self, arrays: list[Array]) -> list[Array]:
        return split_rows(arrays[0], self.sizes)


@dataclass(frozen=True)
class RowBlocks(Rule):
    """They store several of our matrices under each other in one tensor."""

    sizes: tuple[int, ...]

    def gather(self, parts: list[Array]) -> list[Array]:
        return split_rows(parts[0], self.sizes)

    def scatter(self, arrays: list[Array]) -> list[Array]:
        return [library(arrays[0]).concatenate(arrays)]


@dataclass(frozen=True)
class Stacked(Rule):
    """They store each expert as a tensor of its own."""

    def gather(self, parts: list[Array]) -> list[Array]:
        return [library(parts[0]).stack(parts)]

    def scatter(self, arrays: list[Array]) -> list[Array]:
        return [arrays[0][i] for i in range(len(self.theirs))]


@dataclass(frozen=True)
class Reshaped(Rule):
    """They store the same numbers in another shape."""

    shape: tuple[int, ...]
    their_shape: tuple[int, ...]

    def gather(self, parts: list[Array]) -> list[Array]:
        return [parts[0].reshape(self.shape)]

    def scatter(self, arrays: list[Array]) -> list[Array]:
        return [arrays[0].reshape(self.their_shape)]


@dataclass(frozen=True)
class SkippedRows(Rule):
    """Their table begins with rows that no token uses, such as RoBERTa's position of padding. Written back as zeros."""

    skipped: int

    def gather(self, parts: list[Array]) -> list[Array]:
        return [parts[0][self.skipped :]]

    def scatter(self, arrays: list[Array]) -> list[Array]:
        zeros = arrays[0][:1] * 0
        return [library(zeros).concatenate([*[zeros] * self.skipped, arrays[0]])]


@dataclass(frozen=True)
class GroupedRows(Rule):
    """They store q of a group's heads, its k and its v, then the same of the next group; we all q, all k, all v."""

    groups: int
    repeats: int  # query heads in a group

    def gather(self, parts: list[Array]) -> list[Array]:
        array, rest = parts[0], parts[0].shape[1:]
        apart = array.reshape(self.groups, self.repeats + 2, -1, *rest)
        blocks = apart[:, :-2], apart[:, -2], apart[:, -1]
        return [library(array).concatenate([block.reshape(-1, *rest) for block in blocks])]

    def scatter(self, arrays: list[Array]) -> list[Array]:
        array, rest = arrays[0], arrays[0].shape[1:]
        width = array.shape[0] // self.groups // (self.repeats + 2)
        sizes = (self.groups * self.repeats * width, self.groups * width, self.groups * width)
        blocks = [block.reshape(self.groups, -1, width, *rest) for block in split_rows(array, sizes)]
        return [library(array).concatenate(blocks, 1).reshape(array.shape)]


def present(config: ModelConfig, rules: Iterable[Rule]) -> Iterator[Rule]:
    """The rules for weights that the model has: one without biases has no rules for them."""
    names = config.weights()
    return (rule for rule in rules if all(name in names for name in rule.ours))


@dataclass(frozen=True)
class Repeated(Rule):
    """They store the same array under several names."""

    def gather(self, parts: list[Array]) -> list[Array]:
        return parts[:1]

    def scatter(self, arrays: list[Array]) -> list[Array]:
        return [arrays[0] if i == 0 else arrays[0] + 0 for i in range(len(self.theirs))]


def split_rows(array: Array, sizes: tuple[int, ...]) -> list[Array]:
    """Blocks of consecutive rows; raises if the sizes do not add up to the rows there are."""
    if sum(sizes) != len(array):
        raise ValueError(f"{len(array)} rows cannot be split into blocks of {sizes}")
    ends = np.cumsum(sizes).tolist()
    return [array[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def library(array: Array) -> Any:
    """What joins arrays of this type, by `concatenate` and `stack`: NumPy, torch, or a packed matrix itself."""
    if hasattr(array, "concatenate"):
        return array
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def copies(pairs: Mapping[str, str]) -> Iterator[Rule]:
    """ours -> theirs, as they are."""
    for ours, theirs in pairs.items():
        yield Rule((ours,), (theirs,))


def both(pairs: Mapping[str, str], suffixes: Iterable[str] = ("weight", "bias")) -> Iterator[Rule]:
    """Copy a layer's weight and bias: our name of the layer to theirs."""
    for suffix in suffixes:
        yield from copies({f"{ours}.{suffix}": f"{theirs}.{suffix}" for ours, theirs in pairs.items()})


def joined_qkv(ours: str, theirs: tuple[str, ...], config: AttentionConfig, dim: int) -> Iterator[Rule]:
    """Our one matrix of queries, keys and values from their three."""
    key, value = config.widths(dim)
    sizes = (config.heads * key, config.groups * key, config.groups * value)
    for suffix in ("weight", "bias") if config.qkv_bias else ("weight",):
        yield Rows((f"{ours}.{suffix}",), tuple(f"{name}.{suffix}" for name in theirs), sizes)


ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "silu": "silu",
    "swish": "silu",
}


def activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise ConfigError(f"the activation {name!r} is not known; known: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def hf_activation(name: Activation) -> str:
    """Return the name that `transformers` has for an activation."""
    return {"gelu_tanh": "gelu_pytorch_tanh", "gelu_quick": "quick_gelu"}.get(name, name)


def with_fields(config: M, fields: Mapping[str, Any]) -> M:
    """A copy with other values at several paths, checked once and not once for each."""
    data = config.to_dict()
    for path, value in fields.items():
        *parents, last = path.split(".")
        node: Any = data
        for name in parents:
            node = node[int(name) if isinstance(node, list) else name]
        node[last] = value
    return parse(data, "config")


def architecture(hf: Mapping[str, Any], otherwise: str) -> str:
    """The class of `transformers` that was saved; older files do not say."""
    return (hf.get("architectures") or [otherwise])[0]


def classes(hf: Mapping[str, Any]) -> int:
    return len(hf["id2label"]) if hf.get("id2label") else hf.get("num_labels", 2)


ENCODER_HEADS = {
    MaskedLMHeadConfig: "ForMaskedLM",
    ClassHeadConfig: "ForSequenceClassification",
    TokenClassHeadConfig: "ForTokenClassification",
    SpanHeadConfig: "ForQuestionAnswering",
}
"""How the names of encoders with these heads end in `transformers`."""


def encoder_classes(name: str) -> tuple[str, ...]:
    """The classes of an encoder, the one without a head first."""
    return (f"{name}Model", *(f"{name}{ending}" for ending in ENCODER_HEADS.values()))


def encoder_class(name: str, head: HeadConfig | None) -> str:
    """The class of `transformers` that has this head."""
    return f"{name}{ENCODER_HEADS.get(type(head), 'Model')}"


def token_head(saved: str, hf: Mapping[str, Any]) -> HeadConfig | None:
    """The head that a class has for every token."""
    if saved.endswith(ENCODER_HEADS[TokenClassHeadConfig]):
        return TokenClassHeadConfig(classes=classes(hf))
    return SpanHeadConfig() if saved.endswith(ENCODER_HEADS[SpanHeadConfig]) else None


@dataclass(frozen=True, kw_only=True)
class EncoderHeads:
    """Where an encoder's checkpoints keep the tensors of its heads."""

    dense: str  # of the masked-LM head, with its norm and bias
    norm: str
    bias: str
    decoder: str | None = None  # the matrix of a masked-LM head that is not tied; None: always tied
    pooler: str | None = None  # a model without a task ends in it; None: it has none
    pool: str  # the layer before the classes
    classes: str = "classifier"

    def rules(self, head: HeadConfig | None) -> Iterator[Rule]:
        if isinstance(head, MaskedLMHeadConfig):
            yield from both({"head.dense": self.dense, "head.norm": self.norm})
            if head.tied or self.decoder is None:
                yield Rule(("head.bias",), (self.bias,))
            else:
                yield Rule(("head.weight",), (f"{self.decoder}.weight",))
                yield Repeated(("head.bias",), (f"{self.decoder}.bias", self.bias))
        elif isinstance(head, PoolerConfig) and self.pooler is not None:
            yield from both({"head.dense": self.pooler})
        elif isinstance(head, ClassHeadConfig):
            yield from both({"head.pool.dense": self.pool, "head.classes": self.classes})
        elif isinstance(head, TokenClassHeadConfig):
            yield from both({"head.classes": "classifier"})
        elif isinstance(head, SpanHeadConfig):
            yield from both({"head.span": "qa_outputs"})


def labels(head: HeadConfig | None) -> dict[str, Any]:
    """The names of the classes; `transformers` counts them by these."""
    if not isinstance(head, ClassHeadConfig | TokenClassHeadConfig):
        return {}
    names = [f"LABEL_{i}" for i in range(head.classes)]
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def decoder_head(hf: Mapping[str, Any], architectures: tuple[str, ...], tied: bool) -> HeadConfig | None:
    """What the class that was saved puts on a causal stack: nothing, the vocabulary, or classes of the last token."""
    match architectures.index(architecture(hf, architectures[1])):
        case 0:
            return None
        case 1:
            return LMHeadConfig(vocabulary=hf["vocab_size"], tied=tied)
    return ClassHeadConfig(classes=classes(hf), pool=LastTokenConfig(), bias=False)


def decoder_class(architectures: tuple[str, ...], head: HeadConfig | None) -> str:
    """Return the class of `transformers` that has this head: the inverse of `decoder_head`."""
    return architectures[{type(None): 0, LMHeadConfig: 1}.get(type(head), 2)]


def decoder_head_rules(head: HeadConfig | None) -> Iterator[Rule]:
    if isinstance(head, LMHeadConfig) and not head.tied:
        yield Rule(("head.weight",), ("lm_head.weight",))
    elif isinstance(head, ClassHeadConfig):
        yield Rule(("head.classes.weight",), ("score.weight",))


def rotary(
    hf: Mapping[str, Any], layout: Any = "halves", theta: float = 10000.0, *, partial: bool = False
) -> RotaryConfig:
    """`rope_parameters`, or the older `rope_theta` and `rope_scaling`. `partial`: only a part of each head turns."""
    rope = dict(hf.get("rope_scaling") or {}) | dict(hf.get("rope_parameters") or {})
    share = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    share = 1.0 if share is None else float(share)
    if share != 1.0 and not partial:
        raise ConfigError("partial_rotary_factor is not supported for this family yet")
    theta = float(rope.get("rope_theta", hf.get("rope_theta", theta)))
    width = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    dim = None if share == 1.0 else int(width * share)
    return RotaryConfig(theta=theta, layout=layout, dim=dim, scaling=scaling(rope, hf))


def scaling(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> ScalingConfig | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=rope["factor"])
    if kind == "dynamic":
        return DynamicScaling(factor=rope["factor"], length=hf["max_position_embeddings"])
    older = hf.get("original_max_position_embeddings") if kind in LONGROPE else None
    length = rope.get("original_max_position_embeddings") or older or hf["max_position_embeddings"]
    if kind in LONGROPE:
        factor = rope.get("factor") or hf["max_position_embeddings"] / length
        rotation = rope.get("attention_factor")
        if rotation is None:
            rotation = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
        short, long = (tuple(map(float, rope[name])) for name in ("short_factor", "long_factor"))
        return LongRopeScaling(short=short, long=long, length=length, rotation=rotation)
    if kind == "llama3":
        return Llama3Scaling(
            factor=rope["factor"], length=length, slow=rope["low_freq_factor"], fast=rope["high_freq_factor"]
        )
    if kind == "yarn":
        factor = rope.get("factor") or hf["max_position_embeddings"] / length
        rotation = rope.get("attention_factor")
        if rotation is None and rope.get("mscale") and rope.get("mscale_all_dim"):
            rotation = yarn_magnitude(factor, rope["mscale"]) / yarn_magnitude(factor, rope["mscale_all_dim"])
        return YarnScaling(
            factor=factor,
            length=length,
            fast=rope.get("beta_fast") or 32.0,
            slow=rope.get("beta_slow") or 1.0,
            rotation=rotation,
            whole=rope.get("truncate", True),
        )
    raise ConfigError(
        f"the rotary scaling {kind!r} is not known; known: default, linear, dynamic, llama3, longrope, yarn"
    )


def rope_parameters(rotary: RotaryConfig, head_dim: int | None = None) -> dict[str, Any]:
    """The fields of `transformers` 5 for a resolved config."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(rotary.theta)}
    if rotary.dim is not None and head_dim is not None:
        rope["partial_rotary_factor"] = rotary.dim / head_dim
    match rotary.scaling:
        case LinearScaling(factor=factor):
            rope |= {"rope_type": "linear", "factor": float(factor)}
        case Llama3Scaling(factor=factor, length=length, slow=slow, fast=fast):
            rope |= {"rope_type": "llama3", "factor": float(factor), "original_max_position_embeddings": length}
            rope |= {"low_freq_factor": float(slow), "high_freq_factor": float(fast)}
        case DynamicScaling(factor=factor):
            rope |= {"rope_type": "dynamic", "factor": float(factor)}
        case LongRopeScaling(short=short, long=long, length=length, rotation=rotation):
            rope |= {"rope_type": "longrope", "short_factor": [*short], "long_factor": [*long]}
            rope |= {"original_max_position_embeddings": length, "attention_factor": rotation}
        case YarnScaling(factor=factor, length=length, slow=slow, fast=fast, whole=whole):
            rope |= {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": length}
            rope |= {"beta_fast": float(fast), "beta_slow": float(slow), "attention_factor": float(rotary.magnitude)}
            rope |= {} if whole else {"truncate": False}
    return rope


def context_length(rotary: RotaryConfig, otherwise: int = 2048) -> int:
    """`max_position_embeddings`, which bounds nothing in a rotary model: what the scaling reaches, or a usual value."""
    scaled = rotary.scaling
    if isinstance(scaled, DynamicScaling | LongRopeScaling):
        return scaled.length  # the one that is not free: dynamic scaling starts there
    return round(scaled.factor * scaled.length) if isinstance(scaled, Llama3Scaling | YarnScaling) else otherwise
