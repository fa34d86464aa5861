"""Classes of texts and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.configs import ClassHeadConfig, PatchEmbeddingConfig
from clearhead.models.convert.fields import FIELDS
from clearhead.models.model import EncoderDecoder, Model
from clearhead.tokenize import Tokenizer
from clearhead.typed_json import check_fields, read_json

from .images import PREPROCESSING, read_image
from .texts import TextReader, describe_model


@dataclass(frozen=True)
class Class:
    """A class and its probability."""

    label: str
    score: float


def classify(
    model: Model, inputs: Sequence[str | Path], *, top: int = 5, tokenizer: Tokenizer | None = None
) -> list[list[Class]]:
    """The `top` likeliest classes of each input: image files for a model that reads images, else texts."""
    if isinstance(model, EncoderDecoder) or not isinstance(model.config.head, ClassHeadConfig):
        raise ValueError(
            f"this {describe_model(model)} has no class head, so it cannot classify; "
            "use a checkpoint that was trained to classify"
        )
    if top < 1:
        raise ValueError(f"top is {top}, but must be at least 1")
    fields = {} if model.origin is None else read_fields(model.origin / "config.json")
    logits: list[Tensor] = []
    with torch.inference_mode():
        if isinstance(model.config.embedding, PatchEmbeddingConfig):
            settings = {} if model.origin is None else read_fields(model.origin / "preprocessor_config.json")
            dtype = next(model.parameters()).dtype
            for path in inputs:
                logits.append(model(read_image(Path(path), model.config.embedding, settings)[None].to(dtype))[0])
        else:
            logits = [torch.empty(0)] * len(inputs)
            for places, tokens, readable in TextReader.of(model, tokenizer).batches([str(text) for text in inputs]):
                for place, row in zip(places, model(tokens, readable=readable), strict=True):
                    logits[place] = row
    return [rank_classes(class_probabilities(one.float(), fields), fields.get("id2label") or {}, top) for one in logits]


def class_probabilities(logits: Float[Tensor, "C"], fields: dict[str, Any]) -> Float[Tensor, "C"]:
    """Probabilities: a softmax, or a sigmoid for each class if a text may have several labels or there is one class."""
    several = fields.get("problem_type") == "multi_label_classification" or len(logits) == 1
    return logits.sigmoid() if several else logits.softmax(dim=0)


def rank_classes(probabilities: Float[Tensor, "C"], labels: dict[str, str], top: int) -> list[Class]:
    best = probabilities.topk(min(top, len(probabilities)))
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    return [Class(labels.get(str(number), f"LABEL_{number}"), score) for score, number in pairs]


def read_fields(path: Path) -> dict[str, Any]:
    """The fields of a `config.json` or a `preprocessor_config.json`; empty if the file is missing."""
    if not path.is_file():
        return {}
    data = read_json(path)
    check_fields(data, FIELDS | PREPROCESSING, str(path))
    return data
