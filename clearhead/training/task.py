"""What is learned from what: a task turns paths into batches, a loss, and measures on what was held out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.configs import ModelConfig
from clearhead.configs.train import RecipeConfig
from clearhead.data import IGNORED
from clearhead.files import write_atomically
from clearhead.models.adapter import save_adapter
from clearhead.models.hub import find_checkpoint
from clearhead.models.model import Model
from clearhead.models.save import save
from clearhead.tokenize import Tokenizer

from .run import Run

Say = Callable[[str], None]
Sums = dict[str, Tensor]
"""What is counted beside the loss, such as right answers."""


@dataclass(frozen=True)
class TrainBatch:
    """A batch on the device: what is read, what should come out, and which document each token is of."""

    inputs: Tensor
    targets: Int[Tensor, "..."]
    documents: Int[Tensor, "B T"] | None = None

    @property
    def count(self) -> int:
        """How many targets the loss is the mean of."""
        return int((self.targets != IGNORED).sum())

    def part(self, rows: slice) -> TrainBatch:
        documents = None if self.documents is None else self.documents[rows]
        return TrainBatch(self.inputs[rows], self.targets[rows], documents)

    def to(self, device: torch.device) -> TrainBatch:
        documents = None if self.documents is None else self.documents.to(device)
        return TrainBatch(self.inputs.to(device), self.targets.to(device), documents)

    def read_by(self, model: Any, **options: Any) -> Tensor:
        """What the model says of it."""
        return model(self.inputs, documents=self.documents, **options)


class Task:
    """One kind of data and of question. `config` is the recipe's model, fitted to the data; `guess` the loss of one
    who knows nothing."""

    config: ModelConfig
    guess: float
    unit: str  # what is counted when speed is told
    length: int | None = None  # units in a row; None: a row is one
    tokenizer: Tokenizer | None = None
    judged_by: str = "val/loss"  # by which one model is better than another; of what is made, only where it is made

    def rows(self, batch: int) -> int:
        """How many rows there are in the recipe's `batch`."""
        return batch

    def batch(self, step: int, rows: slice = slice(None)) -> TrainBatch:
        """Some rows of a step's batch: a function of the seed and the step."""
        raise NotImplementedError

    def validation(self) -> Iterator[TrainBatch]:
        """Every target that was held out, once, in an order that never changes."""
        raise NotImplementedError

    def loss(self, model: Any, batch: TrainBatch, smoothing: float) -> tuple[Float[Tensor, ""], Sums]:
        """The mean loss over the targets, and what else is counted."""
        raise NotImplementedError

    def measures(self, loss: float, sums: dict[str, float], count: int) -> dict[str, float]:
        """The numbers that people know, of the mean loss and the sums over `count` targets."""
        raise NotImplementedError

    def made(self, model: Any) -> dict[str, Any]:
        """What the model makes of what it has learned: a `sample` to look at, and measures of it."""
        return {}

    def judged(self, numbers: dict[str, Any]) -> float:
        """What is to become small: of an evaluation, the number by which one model is better than another."""
        return numbers["val/loss"]

    def facts(self) -> dict[str, Any]:
        """What `config.json` is to say of the data."""
        return {}

    def files(self) -> dict[str, str]:
        """What else belongs beside a model's weights: texts, by the names of their files."""
        return {}

    def save(self, model: Model, folder: Path, recipe: RecipeConfig) -> None:
        """The model and all that belongs to it, as an ordinary checkpoint; of adapters, the differences alone."""
        belonging: dict[str, Any] = {"tokenizer": self.tokenizer, "extra": self.facts()}
        if recipe.adapter is None:
            save(model, folder, force=True, **belonging)
        else:
            save_adapter(model, folder, find_checkpoint(str(recipe.start)), recipe.adapter, **belonging)
        for name, text in self.files().items():
            write_atomically(folder / name, text)


Paths = Sequence[str | Path]
Maker = Callable[[RecipeConfig, Paths, Paths, Run, Say], Task]
MAKERS: dict[type, Maker] = {}
M = TypeVar("M", bound=Maker)


def learns(config: type) -> Callable[[M], M]:
    """Says which config a task is made from."""

    def register(make: M) -> M:
        MAKERS[config] = make
        return make

    return register


def prepare(recipe: RecipeConfig, paths: Paths, validation: Paths, run: Run, say: Say) -> Task:
    """The recipe's task on the files and folders in `paths`, or on its embedded data. What is there is used again.

    What is in `validation` validates; where nothing is, a share of `paths` does.
    """
    return MAKERS[type(recipe.task)](recipe, paths, validation, run, say)
