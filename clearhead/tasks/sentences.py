"""What a sentence-transformers folder says about embeddings: pooling, dense layers, normalizing, length and prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.models.convert import CheckpointError
from clearhead.models.folder import MODULES, read_safetensors
from clearhead.typed_json import read_json

Pool = Literal["mean", "first", "max", "last", "pooler", "none"]
POOLS: dict[str, Pool] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
"""The pooling modes of sentence-transformers that are supported."""
ACTIVATIONS = {"Tanh": torch.tanh, "Identity": lambda x: x, "ReLU": F.relu, "GELU": F.gelu}


@dataclass(frozen=True)
class SentenceSettings:
    """How a text becomes one vector."""

    pool: Pool = "mean"
    normalize: bool = False
    length: int | None = None  # longer texts are cut
    prompt: str = ""  # put before every text
    dense: tuple[Path, ...] = ()  # folders of linear layers after the pooling

    @classmethod
    def of(cls, origin: Path | None) -> SentenceSettings:
        """The settings of a folder; the defaults if it is not one of sentence-transformers."""
        if origin is None or not (origin / MODULES).is_file():
            return cls()
        pool, normalize, dense = cls.pool, False, []
        for module in read_json(origin / MODULES, list[dict[str, Any]]):
            kind, folder = str(module.get("type", "")).rpartition(".")[2], origin / str(module.get("path", ""))
            if kind == "Pooling":
                pool = read_pool(folder / "config.json")
            elif kind == "Normalize":
                normalize = True
            elif kind == "Dense":
                dense.append(folder)
            elif kind != "Transformer":
                raise CheckpointError(f"{origin / MODULES}: the module {kind!r} is not supported")
        settings = read_optional(origin / "config_sentence_transformers.json")
        prompt = (settings.get("prompts") or {}).get(settings.get("default_prompt_name"), "")
        length = read_optional(origin / "sentence_bert_config.json").get("max_seq_length")
        return cls(pool, normalize, length, str(prompt), tuple(dense))

    def finish(self, vectors: Float[Tensor, "B D"], normalize: bool) -> Float[Tensor, "B D"]:
        """Apply the dense layers, and scale each vector to length 1 if asked."""
        for folder in self.dense:
            config, weights = read_json(folder / "config.json"), read_safetensors(folder / "model.safetensors")
            kind = str(config.get("activation_function", "Identity")).rpartition(".")[2]
            if kind not in ACTIVATIONS:
                raise CheckpointError(f"{folder}: the activation {kind!r} is not supported")
            vectors = ACTIVATIONS[kind](F.linear(vectors, weights["linear.weight"], weights.get("linear.bias")))
        return F.normalize(vectors, dim=-1) if normalize else vectors


def read_pool(path: Path) -> Pool:
    """The pooling mode of a folder; several at once are not supported."""
    config = read_json(path)
    if named := config.get("pooling_mode"):
        chosen = (
            [f"pooling_mode_{'cls_token' if named == 'cls' else f'{named}_tokens'}"]
            if isinstance(named, str)
            else named
        )
    else:
        chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in POOLS:
        known = ", ".join(POOLS)
        raise CheckpointError(
            f"{path}: the pooling {', '.join(chosen) or 'none'} is not supported; supported: one of {known}"
        )
    return POOLS[chosen[0]]


def read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
