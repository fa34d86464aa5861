"""Learning from images: predict the class."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.configs import ClassHeadConfig, ConfigError, PatchEmbeddingConfig, SequenceModelConfig
from clearhead.configs.train import ImagesConfig, RecipeConfig
from clearhead.data.hashing import derive_keys, permute
from clearhead.data.images import ImageSet, augment, digits, image_folders
from clearhead.models.folder import json_text
from clearhead.models.model import SequenceModel

from .run import Run
from .task import Paths, Say, Sums, Task, TrainBatch

MIDDLE = 127.5  # maps pixels from 0…255 to −1…1


class Images(Task):
    """Image classification."""

    unit = "images"

    def __init__(self, recipe: RecipeConfig, config: SequenceModelConfig, source: ImageSet) -> None:
        assert isinstance(recipe.task, ImagesConfig)
        assert isinstance(config.embedding, PatchEmbeddingConfig)
        self.embedding = config.embedding
        self.recipe, self.task, self.source, self.config = recipe, recipe.task, source, config
        self.training, self.held_out = source.split(recipe.validation, recipe.seed)
        self.chance_loss = math.log(len(source.names))

    def size(self) -> int:
        return len(self.training)

    def batch(self, step: int, rows: slice = slice(None)) -> TrainBatch:
        """Every image once an epoch, in another order each epoch."""
        number = step * self.recipe.batch + np.arange(self.recipe.batch)[rows]
        epoch, place = np.divmod(number, len(self.training))
        chosen = self.training[permute(place, len(self.training), derive_keys(self.recipe.seed, epoch))]
        pixels = augment(self.source.read(chosen), number, self.recipe.seed, self.task.shift, self.task.flip)
        return self.to_torch(pixels, chosen)

    def validation(self) -> Iterator[TrainBatch]:
        for start in range(0, len(self.held_out), self.recipe.batch):
            chosen = self.held_out[start : start + self.recipe.batch]
            yield self.to_torch(self.source.read(chosen), chosen)

    def to_torch(self, pixels: np.ndarray, chosen: Int[np.ndarray, " B"]) -> TrainBatch:
        inputs = torch.from_numpy(np.ascontiguousarray(pixels)).float().sub_(MIDDLE).div_(MIDDLE)
        return TrainBatch(inputs, torch.from_numpy(self.source.classes[chosen]))

    def loss(self, model: SequenceModel, batch: TrainBatch, smoothing: float) -> tuple[Float[Tensor, ""], Sums]:
        logits = model(batch.inputs).float()
        right = (logits.argmax(dim=-1) == batch.targets).sum()
        return F.cross_entropy(logits, batch.targets, label_smoothing=smoothing), {"right": right}

    def measures(self, loss: float, sums: dict[str, float], count: int) -> dict[str, float]:
        return {"val/loss": loss, "val/accuracy": sums["right"] / max(count, 1)}

    def config_extras(self) -> dict[str, Any]:
        """The class names."""
        names = dict(enumerate(self.source.names))
        return {"id2label": {str(i): name for i, name in names.items()}, "label2id": {n: i for i, n in names.items()}}

    def extra_files(self) -> dict[str, str]:
        """The preprocessing, in the file that `transformers` reads."""
        half = [0.5] * self.embedding.channels
        ready = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True, "size": {"height": self.embedding.image, "width": self.embedding.image}, "resample": 2,
            "do_rescale": True, "rescale_factor": 1 / 255,
            "do_normalize": True, "image_mean": half, "image_std": half,
        }  # fmt: skip
        return {"preprocessor_config.json": json_text(ready)}


def images(recipe: RecipeConfig, paths: Paths, validation: Paths, run: Run, say: Say) -> Images:
    if validation:
        raise ConfigError("images are held out by share: use --set validation=0.2 instead of --validation")
    config = recipe.model
    if not isinstance(config, SequenceModelConfig) or not isinstance(config.embedding, PatchEmbeddingConfig):
        raise ConfigError(f"this {config.kind()} does not read images; use a model with patches, such as tiny-vit")
    if not isinstance(config.head, ClassHeadConfig):
        found = "no head" if config.head is None else f"a {config.head.kind()}"
        raise ConfigError(f"a model that classifies images needs a ClassHead, but this one has {found}; try tiny-vit")
    size, channels = config.embedding.image, config.embedding.channels
    if channels not in (1, 3):
        raise ConfigError(f"the model reads images of {channels} channels, but files have 1 (grey) or 3 (colour)")
    source = image_folders(paths, size, channels, run.folder) if paths else digits(size, channels)
    if recipe.start is not None and config.head.classes != len(source.names):
        raise ConfigError(f"the checkpoint has {config.head.classes} classes, but the images have {len(source.names)}")
    config = replace(config, head=replace(config.head, classes=len(source.names)))
    task = Images(recipe, config, source)
    for part, use in ((task.training, "training"), (task.held_out, "validation")):
        if not len(part):
            share = f"the held-out share is {recipe.validation}; change it with --set validation=0.2"
            why = share if source.held_out is None else "all are in folders of held-out images"
            raise ConfigError(f"none of the {len(source):,} images is left for {use}: {why}")
    say(
        f"{len(task.training):,} images of {len(source.names)} classes to train on, {len(task.held_out):,} to "
        f"validate, resized to {size} × {size} {'grey' if channels == 1 else 'colour'}"
    )
    return task
