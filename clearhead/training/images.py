"""Learning from pictures: which class is it?"""

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
from clearhead.data.hashing import keys, shuffled
from clearhead.data.images import Pictures, augmented, digits, pictures
from clearhead.models.folder import json_text
from clearhead.models.model import SequenceModel

from .run import Run
from .task import Paths, Say, Sums, Task, TrainBatch, learns

MIDDLE = 127.5  # a pixel of 0 to 255 becomes one of -1 to 1


class Images(Task):
    unit = "pictures"

    def __init__(self, recipe: RecipeConfig, config: SequenceModelConfig, source: Pictures) -> None:
        assert isinstance(recipe.task, ImagesConfig)
        assert isinstance(config.embedding, PatchEmbeddingConfig)
        self.embedding = config.embedding
        self.recipe, self.task, self.source, self.config = recipe, recipe.task, source, config
        self.training, self.held_out = source.split(recipe.validation, recipe.seed)
        self.guess = math.log(len(source.names))

    def batch(self, step: int, rows: slice = slice(None)) -> TrainBatch:
        """Every picture once an epoch, each epoch in an order of its own."""
        number = step * self.recipe.batch + np.arange(self.recipe.batch)[rows]
        epoch, place = np.divmod(number, len(self.training))
        chosen = self.training[shuffled(place, len(self.training), keys(self.recipe.seed, epoch))]
        pixels = augmented(self.source.read(chosen), number, self.recipe.seed, self.task.shift, self.task.flip)
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

    def facts(self) -> dict[str, Any]:
        """The names of the classes."""
        names = dict(enumerate(self.source.names))
        return {"id2label": {str(i): name for i, name in names.items()}, "label2id": {n: i for i, n in names.items()}}

    def files(self) -> dict[str, str]:
        """How a picture is made ready, where `transformers` looks for it."""
        half = [0.5] * self.embedding.channels
        ready = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True, "size": {"height": self.embedding.image, "width": self.embedding.image}, "resample": 2,
            "do_rescale": True, "rescale_factor": 1 / 255,
            "do_normalize": True, "image_mean": half, "image_std": half,
        }  # fmt: skip
        return {"preprocessor_config.json": json_text(ready)}


@learns(ImagesConfig)
def images(recipe: RecipeConfig, paths: Paths, validation: Paths, run: Run, say: Say) -> Images:
    if validation:
        raise ConfigError("pictures are held out by a share: set `validation` of the recipe, and leave the files out")
    config = recipe.model
    if not isinstance(config, SequenceModelConfig) or not isinstance(config.embedding, PatchEmbeddingConfig):
        raise ConfigError(f"a {config.kind()} of this shape does not read pictures")
    if not isinstance(config.head, ClassHeadConfig):
        raise ConfigError("a model that is to tell classes needs a ClassHead")
    size, channels = config.embedding.image, config.embedding.channels
    if channels not in (1, 3):
        raise ConfigError(f"the model reads pictures of {channels} channels, but files have 1 (grey) or 3 (colour)")
    source = pictures(paths, size, channels, run.folder) if paths else digits(size, channels)
    if recipe.start is not None and config.head.classes != len(source.names):
        raise ConfigError(
            f"the checkpoint tells {config.head.classes} classes apart, but the pictures are of {len(source.names)}"
        )
    config = replace(config, head=replace(config.head, classes=len(source.names)))
    task = Images(recipe, config, source)
    for part, use in ((task.training, "to train on"), (task.held_out, "to validate with")):
        if not len(part):
            share = f"`validation` of the recipe sets the share that is held out, and is {recipe.validation}"
            why = share if source.held_out is None else "all lie in folders of what is held out"
            raise ConfigError(f"of {len(source):,} pictures none is left {use}: {why}")
    say(
        f"{len(task.training):,} pictures of {len(source.names)} classes to train on, {len(task.held_out):,} to "
        f"validate with, as {size} × {size} {'grey' if channels == 1 else 'colour'}"
    )
    return task
