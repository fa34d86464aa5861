"""What the invariants share: a model of every case with weights large enough to show a fault, and its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.configs import (
    AttentionConfig,
    Config,
    EncoderDecoderConfig,
    LatentAttentionConfig,
    LinearAttentionConfig,
    ModelConfig,
    PatchEmbeddingConfig,
    SequenceModelConfig,
)
from clearhead.models.model import EncoderDecoder, Model, SequenceModel, build

from .cases import CASES, VOCABULARY

BATCH, LENGTH, SOURCE = 3, 7, 8
EXACT = {"atol": 1e-9, "rtol": 1e-9}  # float64


def mixers(config: ModelConfig) -> list[Any]:
    """Every mixer that works on the target side."""
    stack = config.stack if isinstance(config, SequenceModelConfig) else config.decoder
    return [block.mixer for block in stack.blocks]


def reads_tokens(config: ModelConfig) -> bool:
    return isinstance(config, SequenceModelConfig) and not isinstance(config.embedding, PatchEmbeddingConfig)


def is_causal(config: ModelConfig) -> bool:
    return reads_tokens(config) and all(mixer.mask.causal for mixer in mixers(config))


def weighs(mixer: Any) -> bool:
    """Whether it has weights of every query for every key, which can be looked at."""
    return keeps_keys(mixer) or isinstance(mixer, LinearAttentionConfig)


def keeps_keys(mixer: Any) -> bool:
    """Whether it has them in decoding too."""
    return isinstance(mixer, AttentionConfig | LatentAttentionConfig)


def nodes(config: Config) -> Iterator[Config]:
    """The config and everything in it."""
    yield config
    for value in vars(config).values():
        for child in value if isinstance(value, tuple) else (value,):
            if isinstance(child, Config):
                yield from nodes(child)


def kinds(config: Config) -> set[str]:
    return {node.kind() for node in nodes(config)}


def gives_a_vector_per_token(config: ModelConfig) -> bool:
    head = getattr(config, "head", None)
    return head is None or head.kind() in ("LMHead", "MaskedLMHead", "TokenClassHead", "SpanHead")


SEQUENCES = [name for name, config in CASES.items() if reads_tokens(config)]
STREAMS = [name for name in SEQUENCES if gives_a_vector_per_token(CASES[name])]
CAUSAL = [name for name in STREAMS if is_causal(CASES[name])]
TRANSLATORS = [name for name, config in CASES.items() if isinstance(config, EncoderDecoderConfig)]
RINGS = [name for name in CAUSAL if any(getattr(mixer, "ring", None) for mixer in mixers(CASES[name]))]
ABSOLUTE = {
    "Sinusoidal",
    "Learned",
    "Global",
    "Blockwise",
    "Scattered",
    "Longformer",
    "Linformer",
    "DualChunk",
}  # tell places apart
RELATIVE = [name for name in STREAMS if not kinds(CASES[name]) & ABSOLUTE]


def once_each(names: Iterable[str]) -> list[str]:
    """The plain mixer with every placement and every other mixer with one; all that is not of the grid stays."""
    return [
        name
        for name in names
        if name.endswith("; pre") or name.startswith(("mha; ", "translator; ")) or "; " not in name
    ]


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Weights of a size at which every branch, bias and gain matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("bias")]
        for name, parameter in [*model.named_parameters(), *biases]:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            gain = parameter.dim() == 1 and name.endswith("weight")
            width = 3.0 if "tokens" in name or "position" in name else parameter.shape[-1] ** 0.5
            parameter.copy_(1 + 0.3 * noise if gain else 1.5 * noise / width)


def fresh(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> Model:
    model = build(config).to(dtype)
    randomise(model, seed)
    return model.eval()


@cache
def model_of(name: str) -> Model:
    """The model of a case, float64; shared by all tests, so none may change it."""
    return fresh(CASES[name])


def sequence_model(name: str) -> SequenceModel:
    model = model_of(name)
    assert isinstance(model, SequenceModel)
    return model


def translator_model(name: str) -> EncoderDecoder:
    model = model_of(name)
    assert isinstance(model, EncoderDecoder)
    return model


def ids(*shape: int, seed: int = 1, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def inputs_of(config: ModelConfig, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """A batch that the model of this config reads."""
    if isinstance(config, EncoderDecoderConfig):
        return ids(BATCH, SOURCE, seed=2), ids(BATCH, LENGTH)
    if isinstance(config.embedding, PatchEmbeddingConfig):
        shape = (BATCH, config.embedding.channels, config.embedding.image, config.embedding.image)
        return (torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype),)
    return (ids(BATCH, LENGTH),)


def padded(rows: list[Tensor], side: str, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Rows of different lengths side by side, the gaps filled with arbitrary tokens; and where the real ones are."""
    width = max(len(row) for row in rows)
    tokens, readable = ids(len(rows), width, seed=seed), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        tokens[i, place], readable[i, place] = row, True
    return tokens, readable


def close(got: Tensor, want: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(got, want, **(tolerance or EXACT))
