"""The training loop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead.configs.train import RecipeConfig
from clearhead.data import Batch, Batches, windows
from clearhead.measure.cost import cost
from clearhead.models.assemble import LAST, SequenceModel, initialise
from clearhead.models.checkpoint import save

from .checkpoint import Snapshot, random_state, read_last, write
from .objective import Objective, TrainBatch, first_trouble
from .optimizer import Optimizer, make_optimizer
from .prepare import TextData, fitted, prepare_text
from .recipes import recipe as recipe_named
from .run import Run


class TrainingError(RuntimeError):
    """A run that went wrong: the message says at which step and where."""


class Interrupted(Exception):
    """The run was asked to leave, and has saved itself."""


@dataclass
class Report:
    """What the loop tells whoever watches: `say` a sentence, `show` the numbers of a step."""

    say: Callable[[str], None] = field(default=lambda text: None)
    show: Callable[[dict[str, Any]], None] = field(default=lambda numbers: None)


def train(
    recipe: RecipeConfig | str,
    data: Sequence[str | Path] = (),
    out: str | Path = "runs/latest",
    *,
    resume: bool = False,
    report: Report | None = None,
) -> SequenceModel:
    """Train as the recipe says on the files and folders in `data` (none: Python's own library), in the folder `out`.

    Killed at any moment and called again with `resume`, it ends with the very weights of an uninterrupted run.
    """
    report = report or Report()
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    run = Run(out)
    with run.held(), leaving_well() as asked_to_leave:
        run.begin(recipe, resume)
        torch.manual_seed(recipe.seed)
        text = prepare_text(recipe, data, run, report.say)
        model = SequenceModel(fitted(recipe, text.tokenizer.vocabulary))
        trainer = Trainer(recipe, model, text, run, report)
        trainer.start(resume)
        trainer.go(asked_to_leave)
        save(model, run.folder, tokenizer=text.tokenizer)
        report.say(f"saved {run.folder}")
    return model.eval()


@contextmanager
def leaving_well() -> Iterator[Callable[[], bool]]:
    """SIGTERM and Ctrl-C are noted, and obeyed between two steps."""
    asked: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        before = {number: signal.signal(number, lambda got, _: asked.append(got)) for number in signals}
    except ValueError:  # not the main thread: whoever runs it there handles signals
        before = {}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Trainer:
    """One model, its optimizer and its data, from a step to the last."""

    def __init__(self, recipe: RecipeConfig, model: SequenceModel, text: TextData, run: Run, report: Report) -> None:
        self.recipe, self.model, self.text, self.run, self.report = recipe, model, text, run, report
        make_fresh(model, recipe)
        self.objective = Objective(model, recipe.label_smoothing)
        self.optimizer: Optimizer = make_optimizer(recipe.optimizer, model)
        self.batches = Batches(
            text.training, batch=recipe.batch, context=recipe.context, seed=recipe.seed, apart=recipe.apart
        )
        self.step = 0
        self.best = math.inf
        self.flops = cost(model.config, batch=recipe.batch, length=recipe.context).flops.train

    def start(self, resume: bool) -> None:
        """From the last whole checkpoint, or from the beginning."""
        snapshot, complaints = read_last(self.run.checkpoints) if resume else (None, [])
        for complaint in complaints:
            self.report.say(complaint)
        if snapshot is None:
            self.run.forget_after(-1)
            self.expect_a_guess()
            return
        self.model.load_state_dict(snapshot.weights)
        self.optimizer.load(snapshot.optimizer)
        torch.set_rng_state(snapshot.random)
        self.step, self.best = snapshot.step, snapshot.facts["best"]
        self.run.forget_after(self.step)
        self.report.say(f"going on from step {self.step}")

    def expect_a_guess(self) -> None:
        """Before training, every token should be about equally likely: loss ln V."""
        self.objective.eval()
        with torch.no_grad():
            loss = self.objective(self.batch(0)).item()
        self.objective.train()
        expected = math.log(self.text.tokenizer.vocabulary)
        if not abs(loss - expected) < 0.25 * expected:
            self.report.say(
                f"the loss before training is {loss:.2f}, though a guess has {expected:.2f}: look at the model"
            )

    def batch(self, step: int) -> TrainBatch:
        return to_torch(self.batches.at(step))

    def go(self, asked_to_leave: Callable[[], bool]) -> None:
        """Every step that is left, with evaluations and checkpoints at their times."""
        recipe = self.recipe
        self.objective.train()
        while self.step < recipe.steps:
            begun = time.perf_counter()
            loss, norm = self.update()
            seconds = time.perf_counter() - begun
            numbers = {
                "step": self.step,
                "train/loss": loss,
                "lr": recipe.schedule.factor(self.step, recipe.steps) * recipe.optimizer.lr,
                "grad_norm": norm,
                "tokens_per_second": recipe.batch * recipe.context / seconds,
                "flops_per_second": self.flops / seconds,
            }
            last = self.step == recipe.steps
            if last or self.step % recipe.evaluate_every == 0:
                numbers |= self.evaluate()
            self.run.log(**numbers)
            self.report.show(numbers)
            leaving = asked_to_leave()
            if last or leaving or self.step % recipe.save_every == 0:
                self.save()
            if leaving and not last:
                raise Interrupted(f"left at step {self.step} of {recipe.steps}; --resume goes on")

    def update(self) -> tuple[float, float]:
        """One step of the optimizer: its loss, and the norm of its gradient before clipping."""
        recipe, batch = self.recipe, self.batch(self.step)
        rows = recipe.batch // recipe.accumulate
        total = 0.0
        for part in range(recipe.accumulate):
            loss = self.objective(batch.part(slice(part * rows, (part + 1) * rows))) / recipe.accumulate
            loss.backward()
            total += loss.item()
        if not math.isfinite(total):
            trouble = first_trouble(self.objective, batch)
            raise TrainingError(f"the loss of step {self.step + 1} is {total}: {trouble}")
        limit = math.inf if recipe.clip is None else recipe.clip
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit).item()
        self.step += 1
        self.optimizer.step(recipe.schedule.factor(self.step, recipe.steps))
        self.model.zero_grad(set_to_none=True)
        return total, norm

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss, perplexity and bits per byte on the beginning of the validation text."""
        recipe, shards = self.recipe, self.text.validation
        self.objective.eval()
        total, count = 0.0, 0
        for window in windows(shards, recipe.context, batch=recipe.batch, apart=recipe.apart):
            batch = to_torch(window)
            counted = int((batch.targets != -100).sum())
            total += self.objective(batch).item() * counted
            count += counted
            if count >= recipe.evaluate_tokens:
                break
        self.objective.train()
        loss = total / max(count, 1)
        self.best = min(self.best, loss)
        bytes_per_token = shards.bytes / len(shards)
        return {"val/loss": loss, "val/perplexity": math.exp(loss), "val/bpb": loss / math.log(2) / bytes_per_token}

    def save(self) -> None:
        weights = dict(self.model.state_dict())
        write(
            self.run.checkpoints,
            Snapshot(self.step, weights, self.optimizer.state(), random_state(), {"best": self.best}),
        )


def make_fresh(model: SequenceModel, recipe: RecipeConfig) -> None:
    """Fresh weights; under `zero_out`, every branch adds nothing at first and every token is as likely."""
    initialise(model)
    if recipe.zero_out:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(LAST) or name == "head.weight":
                    parameter.zero_()


def to_torch(batch: Batch) -> TrainBatch:
    documents = None if batch.documents is None else torch.from_numpy(batch.documents)
    return TrainBatch(torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets), documents)
