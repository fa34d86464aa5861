"""Tasks: what a model learns from which data.

A task turns paths into batches, computes the loss, and measures the model on held-out data. Its module is imported when
a recipe asks for it, so training on plain text does not load translation or images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.configs import ModelConfig
from clearhead.configs.train import RecipeConfig
from clearhead.data.batches import IGNORED
from clearhead.files import write_atomically
from clearhead.models.hub import find_checkpoint
from clearhead.models.lora import save_adapter
from clearhead.models.model import Model
from clearhead.models.save import save
from clearhead.tokenize import Tokenizer

from .run import Run

Say = Callable[[str], None]
Sums = dict[str, Tensor]
"""Counts beside the loss, such as the number of right answers."""


@dataclass(frozen=True)
class TrainBatch:
    """A batch on the device: inputs, targets, and the document number of each token."""

    inputs: Tensor
    targets: Int[Tensor, "..."]
    documents: Int[Tensor, "B T"] | None = None

    @property
    def count(self) -> int:
        """The number of targets that the loss averages over."""
        return int((self.targets != IGNORED).sum())

    def part(self, rows: slice) -> TrainBatch:
        documents = None if self.documents is None else self.documents[rows]
        return TrainBatch(self.inputs[rows], self.targets[rows], documents)

    def to(self, device: torch.device) -> TrainBatch:
        documents = None if self.documents is None else self.documents.to(device)
        return TrainBatch(self.inputs.to(device), self.targets.to(device), documents)

    def apply_model(self, model: Any, **options: Any) -> Tensor:
        """The model's output for this batch."""
        return model(self.inputs, documents=self.documents, **options)


class Task:
    """One kind of data and one kind of question.

    config       the recipe's model, with the vocabulary or classes of the data
    chance_loss  the loss of a model that guesses
    unit         what speed counts: tokens, images
    length       units in a row; None if a row is one unit
    score_name   the metric that decides which model is best
    """

    config: ModelConfig
    chance_loss: float
    unit: str
    length: int | None = None
    tokenizer: Tokenizer | None = None
    score_name: str = "val/loss"

    def rows(self, batch: int) -> int:
        """The number of rows in a recipe's `batch`."""
        return batch

    def size(self) -> int | None:
        """The number of units to train on, to count epochs; None if unknown."""
        return None

    def batch(self, step: int, rows: slice = slice(None)) -> TrainBatch:
        """Some rows of the batch of a step: a function of the seed and the step."""
        raise NotImplementedError

    def validation(self) -> Iterator[TrainBatch]:
        """Every held-out target once, always in the same order."""
        raise NotImplementedError

    def loss(self, model: Any, batch: TrainBatch, smoothing: float) -> tuple[Float[Tensor, ""], Sums]:
        """The mean loss over the targets, and other counts."""
        raise NotImplementedError

    def measures(self, loss: float, sums: dict[str, float], count: int) -> dict[str, float]:
        """Metrics computed from the mean loss and the sums over `count` targets."""
        raise NotImplementedError

    def write_samples(self, model: Any) -> dict[str, Any]:
        """Text that the model writes (`prompt`, `sample`), and metrics of it."""
        return {}

    def score(self, numbers: dict[str, Any]) -> float:
        """The number to minimise when choosing the best model."""
        return numbers["val/loss"]

    def config_extras(self) -> dict[str, Any]:
        """Facts about the data for `config.json`."""
        return {}

    def extra_files(self) -> dict[str, str]:
        """Other files to save beside the weights: text by file name."""
        return {}

    def save(self, model: Model, folder: Path, recipe: RecipeConfig) -> None:
        """Save the model and its files as a checkpoint folder. With an adapter, save only the adapter's weights."""
        options: dict[str, Any] = {"tokenizer": self.tokenizer, "extra": self.config_extras()}
        if recipe.adapter is None:
            save(model, folder, force=True, **options)
        else:
            save_adapter(model, folder, find_checkpoint(str(recipe.start)), recipe.adapter, **options)
        for name, text in self.extra_files().items():
            write_atomically(folder / name, text)


Paths = Sequence[str | Path]
TASKS = {
    "NextToken": "text.next_token",
    "MaskedTokens": "text.masked_tokens",
    "Images": "images.images",
    "Pairs": "pairs.translation",
}
"""The function that prepares each kind of task: module and name."""


def prepare_task(recipe: RecipeConfig, paths: Paths, validation: Paths, run: Run, say: Say) -> Task:
    """Prepare the recipe's task on the files in `paths`, or on its built-in data if there are none.

    Files in `validation` are held out; without them, a share of `paths` is. Tokens and tokenizers in the run's folder
    are reused.
    """
    module, name = TASKS[recipe.task.kind()].split(".")
    return getattr(import_module(f"clearhead.training.{module}"), name)(recipe, paths, validation, run, say)
