"""The training loop: step the optimizer, evaluate, save checkpoints, and resume a stopped run."""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clearhead.configs.train import RecipeConfig
from clearhead.data.corpus import DataError
from clearhead.data.hashing import derive_key
from clearhead.kernels.malloc import keep_memory
from clearhead.measure.cost import cost
from clearhead.measure.precision import precision_works
from clearhead.models.device import describe_device
from clearhead.models.model import Model

from .checkpoint import (
    ResumeError,
    find_damage,
    find_last_checkpoint,
    list_checkpoints,
    read_checkpoint,
    step_of,
    write_checkpoint,
)
from .compiling import compile_objective
from .distributed import World, full_tensor, join_world
from .model import gather_model, list_blocks, make_model
from .objective import Objective, first_nonfinite
from .optimizer import make_optimizer
from .peak_flops import matrix_peak
from .probe import make_probe
from .recipes import recipe as recipe_named
from .run import Run
from .task import Task, TrainBatch, prepare_task

BACKWARD = 2  # a backward pass takes about twice the time of a forward pass


class TrainingError(ValueError):
    """Training failed. The message says at which step, and which layer or weight is to blame."""


class RunStopped(Exception):
    """A signal stopped the run. A checkpoint was saved before this was raised."""


@dataclass
class Callbacks:
    """Functions that the loop calls.

    message  with a sentence for the user
    step     with the metrics of each step
    status   with what the loop is doing, such as "evaluating: 40%"; "" when it is done
    """

    message: Callable[[str], None] = field(default=lambda text: None)
    step: Callable[[dict[str, Any]], None] = field(default=lambda numbers: None)
    status: Callable[[str], None] = field(default=lambda text: None)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a run is executed. These options do not change what the model learns.

    device     "auto" (a GPU if there is one), "cpu", "cuda" or "mps"
    shard      with several processes, each holds a part of the model (FSDP) instead of all of it (DDP)
    recompute  recompute the activations of each block in the backward pass instead of keeping them
    compile    use torch.compile: a slow first step, then faster steps
    probe_every  write pictures of the heads and gradient norms to `probes/` every `probe_every` steps; 0: never
    probe_text   the text that a probe reads; default: the start of the held-out data
    """

    device: str = "auto"
    shard: bool = False
    recompute: bool = False
    compile: bool = False
    probe_every: int = 0
    probe_text: str = ""


def train(
    recipe: RecipeConfig | str,
    data: Sequence[str | Path] = (),
    out: str | Path = "runs/latest",
    *,
    validation: Sequence[str | Path] = (),
    resume: bool = False,
    callbacks: Callbacks | None = None,
    execution: Execution = Execution(),
    task: Task | None = None,
) -> Model:
    """Train a recipe on the files and folders in `data` and write the run to the folder `out`.

        model = clearhead.train("lm", ["notes/"], "runs/notes")

    Without `data`, the task's built-in data is used. The model is evaluated on the files in `validation`. Without them,
    a share of `data` is held out; the recipe says how much.

    If the run is killed, call `train` again with `resume=True`. The final weights are the same as without the
    interruption. With `resume` and more `steps`, a finished run continues.

    Under `torchrun`, every process makes this call. To share prepared data between runs, pass the same `task`.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "text.txt").write_text("to be or not to be. " * 50)
    >>> config = recipe("chars").with_values({"steps": 2, "batch": 2, "task.context": 8})
    >>> model = train(config, [folder / "text.txt"], folder / "run")
    >>> load(folder / "run").generate("to", max_new_tokens=4)[0].text.isascii()
    True
    """
    requested = recipe_named(recipe, bool(data)) if isinstance(recipe, str) else recipe
    run = Run(out)
    with join_world(execution.shard, execution.device) as world, ExitStack() as held:
        callbacks = callbacks if callbacks is not None and world.first else Callbacks()
        world.first_only(lambda: held.enter_context(run.lock(resume)))
        supported = world.first_then_others(lambda: supported_recipe(requested, world, callbacks))
        for note in world.first_only(lambda: run.begin(supported, resume)) or ():
            callbacks.message(note)
        recipe = run.recipe()
        task = task or world.first_then_others(lambda: prepare_task(recipe, data, validation, run, callbacks.message))
        trainer = Trainer(recipe, task, run, callbacks, world, execution)
        trainer.restore(resume)
        with catch_stop_signals() as stop_requested:
            trainer.run_steps(stop_requested)
            return trainer.finish()


def supported_recipe(recipe: RecipeConfig, world: World, callbacks: Callbacks) -> RecipeConfig:
    """Return the recipe, with float32 if its precision does not work on this machine.

    Raise if the batch does not divide evenly among the processes and the parts of a step.
    """
    if recipe.batch % (recipe.accumulate * world.size):
        parts = f"{world.size} processes" + (f" × {recipe.accumulate} parts" if recipe.accumulate > 1 else "")
        raise ValueError(f"a batch of {recipe.batch} does not divide into {parts}; choose another --batch")
    if recipe.precision != "float32" and world.device.type == "cpu":
        probe = precision_works(recipe.precision)
        if not probe.works:
            callbacks.message(f"{recipe.precision} {probe}; training in float32")
            return replace(recipe, precision="float32")
    return recipe


@contextmanager
def catch_stop_signals() -> Iterator[Callable[[], bool]]:
    """Catch SIGTERM and Ctrl-C, so that the loop can stop between two steps.

    Yields a function that returns True once a signal has arrived.
    """
    received: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in signals}
    except ValueError:  # Python allows signal handlers in the main thread only
        before = {}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Trainer:
    """One model, its optimizer and its task, from the first step to the last."""

    def __init__(
        self,
        recipe: RecipeConfig,
        task: Task,
        run: Run,
        callbacks: Callbacks,
        world: World | None = None,
        execution: Execution = Execution(),
    ) -> None:
        world = world or World(torch.device("cpu"))
        keep_memory()
        self.recipe, self.task, self.run, self.callbacks, self.world = recipe, task, run, callbacks, world
        model = make_model(recipe, task.config)
        self.model = model if world.sharded else model.to(world.device)  # FSDP moves each block itself
        blocks = list_blocks(self.model)
        if execution.recompute:
            for block in blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        objective = world.wrap(Objective(self.model, task, recipe.label_smoothing, recipe.precision), blocks)
        self.objective = compile_objective(objective, callbacks.message) if execution.compile else objective
        self.optimizer = make_optimizer(recipe.optimizer, self.model, world.mesh)
        self.step = 0
        self.score_name = "val/loss" if world.sharded else task.score_name  # a sharded model cannot generate
        self.best_score = math.inf
        self.evaluations_since_best = 0
        self.rows = task.rows(recipe.batch)
        self.flops = cost(task.config, batch=self.rows, length=task.length).flops.train
        self.peak = matrix_peak(world.device) * world.size
        alone = world.first and not world.sharded
        self.probe = make_probe(run.folder, execution.probe_every, execution.probe_text, task) if alone else None

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint holds, by name: trained weights and the optimizer's state."""
        learned = {f"weights.{name}": p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        return learned | {f"optimizer.{name}": t for name, t in self.optimizer.tensors().items()}

    def restore(self, resume: bool) -> None:
        """Load the last undamaged checkpoint, or prepare to start at step 0."""
        if not any(batch.count for batch in self.task.validation()):
            raise DataError(
                "the held-out data has no targets; hold out more with --set validation=0.2, or give --validation"
            )
        path, complaints = find_last_checkpoint(self.run.checkpoints) if resume else (None, [])
        for complaint in complaints:
            self.callbacks.message(complaint)
        if path is None:
            self.require_checkpoint(bool(complaints))
            if self.world.first:
                self.run.truncate_metrics(-1)
        else:
            self.load_checkpoint(path, previous=bool(complaints))
        self.describe_start(self.check_initial_loss())

    def load_checkpoint(self, path: Path, previous: bool) -> None:
        self.step, facts = read_checkpoint(path, self.tensors())
        if self.world.first:
            self.run.truncate_metrics(self.step)
        self.callbacks.message(f"Continuing from step {self.step:,}{', the previous checkpoint' if previous else ''}.")
        if (before := facts.get("score_name", self.score_name)) == self.score_name:
            self.best_score, self.evaluations_since_best = facts["best_score"], facts["evaluations_since_best"]
        else:
            self.callbacks.message(f"The best model is now chosen by {self.score_name}, before by {before}.")
        if self.run.finished and self.step < self.recipe.steps and not self.out_of_patience:
            self.write_model(self.run.last)
            if self.world.first:
                self.run.remove_model()

    def require_checkpoint(self, damaged: bool) -> None:
        """Raise if the run has lost its checkpoints. A run that has not saved one yet starts at step 0."""
        reached = max((line["step"] for line in self.run.history()), default=0)
        if damaged or self.run.finished or reached > self.recipe.save_every:
            raise ResumeError(
                f"{self.run.folder} reached step {reached:,}, but it has no undamaged checkpoint, so nothing was "
                "changed; put a checkpoint back, or remove the folder to start again"
            )

    @torch.no_grad()
    def check_initial_loss(self) -> float:
        """Run the model on one batch, and return how many seconds a forward pass takes.

        A fresh model should find all answers about equally likely, so its loss over V tokens is about ln V. Warn if it
        is not.
        """
        first = self.micro_batch(self.step, 0)
        self.objective.eval()
        loss = self.objective(first)[0].item()  # even without targets: a sharded model needs every process
        start = time.perf_counter()
        self.objective(first)
        seconds = time.perf_counter() - start
        self.objective.train()
        total, count = self.world.sum([loss * first.count if first.count else 0.0, first.count])
        mean, chance = total / max(count, 1), self.task.chance_loss
        fresh = self.step == 0 and self.recipe.start is None
        if fresh and count and not abs(mean - chance) < 0.25 * chance:
            self.callbacks.message(
                f"The loss before training is {mean:.2f}, but guessing gives {chance:.2f}; check the model's config."
            )
        return seconds

    def describe_start(self, forward_seconds: float) -> None:
        """Say how large the model is, where it runs, how much it reads, and how long that takes."""
        recipe, task = self.recipe, self.task
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        trained = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        size = f"{parameters:,} parameters" + (f" ({trained:,} trained)" if trained < parameters else "")
        units = recipe.steps * self.rows * (task.length or 1)
        total = task.size()
        epochs = f" ({units / total:.3g} epochs)" if total else ""
        step_seconds = forward_seconds * (1 + BACKWARD) * recipe.accumulate
        seconds = step_seconds * (recipe.steps - self.step)
        self.callbacks.message(
            f"{size} on {describe_device(self.world.device)}; {recipe.steps:,} steps read {units:,} "
            f"{task.unit}{epochs}; about {format_duration(seconds)}"
        )

    def micro_batch(self, step: int, number: int) -> TrainBatch:
        """The rows of a step's batch that this process reads in its micro-batch `number`."""
        rows = self.recipe.batch // (self.recipe.accumulate * self.world.size)
        first = (number * self.world.size + self.world.rank) * rows
        return self.task.batch(step, slice(first, first + rows)).to(self.world.device)

    def run_steps(self, stop_requested: Callable[[], bool]) -> None:
        """Run the remaining steps, and evaluate and save when the recipe says so."""
        recipe, world = self.recipe, self.world
        self.objective.train()
        while self.step < recipe.steps and not self.out_of_patience:
            start = time.perf_counter()
            loss, norm = self.train_step()
            seconds = time.perf_counter() - start
            self.peak = max(self.peak, self.flops / seconds)
            numbers = {
                "step": self.step,
                "train/loss": loss,
                "lr": recipe.rate_factor(self.step) * recipe.optimizer.lr,
                "grad_norm": norm,
                f"{self.task.unit}_per_second": self.rows * (self.task.length or 1) / seconds,
                "peak": self.flops / seconds / self.peak,
            }
            last = self.step == recipe.steps
            if last or self.step % recipe.evaluate_every == 0:
                numbers |= self.evaluate_and_keep_best()
            if world.first:
                self.run.log(**numbers)
            self.callbacks.step(numbers)
            stopping = bool(world.sum([float(stop_requested())])[0])
            if last or stopping or self.out_of_patience or self.step % recipe.save_every == 0:
                self.save()
            if stopping and not last:
                raise RunStopped(f"Stopped at step {self.step:,} of {recipe.steps:,} and saved {self.run.folder}.")
        if self.out_of_patience:
            self.callbacks.message(
                f"No improvement for {self.evaluations_since_best} evaluations: ended at step {self.step:,}."
            )

    @property
    def out_of_patience(self) -> bool:
        """Whether too many evaluations have passed since the best one."""
        return self.recipe.patience is not None and self.evaluations_since_best >= self.recipe.patience

    def train_step(self) -> tuple[float, float]:
        """Run one step of the optimizer; return its loss, and the norm of its gradient before clipping.

        The loss is the mean over all targets of the batch, however many parts and processes read it. Random numbers
        depend only on the seed, the step and the process, so a resumed run draws the same ones.
        """
        recipe, world = self.recipe, self.world
        torch.manual_seed(derive_key(recipe.seed, self.step * world.size + world.rank) % 2**63)
        parts = [self.micro_batch(self.step, number) for number in range(recipe.accumulate)]
        count = max(world.sum([sum(part.count for part in parts)])[0], 1.0)
        total = 0.0
        for part in parts:
            with world.gradient_sync(self.objective, last=part is parts[-1]):
                loss = self.objective(part)[0] * (part.count / count)
                (loss * world.size).backward()
            total += loss.item()
        (total,) = world.sum([total])
        if not math.isfinite(total):
            raise TrainingError(f"the loss of step {self.step + 1:,} is {total}: {self.locate_nonfinite(parts)}")
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        size = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = full_tensor(size).item()
        if not math.isfinite(norm):
            place = self.locate_nonfinite_gradient()
            raise TrainingError(f"the gradient of step {self.step + 1:,} has the norm {norm}: {place}")
        if recipe.clip is not None and norm > recipe.clip:
            nn.utils.clip_grads_with_norm_(parameters, recipe.clip, size)
        self.step += 1
        probe = self.probe if self.probe is not None and self.probe.due(self.step) else None
        gradients = {} if probe is None else probe.gradient_norms(self.model)
        self.optimizer.step(recipe.rate_factor(self.step))
        self.model.zero_grad(set_to_none=True)
        if probe is not None:
            probe.write(self.model, self.step, gradients)
        return total, norm

    def locate_nonfinite(self, parts: list[TrainBatch]) -> str:
        """Say which layer a NaN or infinite loss comes from."""
        if self.world.sharded:
            return "train without --shard to learn which layer it comes from"
        found = (first_nonfinite(self.model, part) for part in parts)
        return next((place for place in found if place), "a second pass over the batch is finite")

    def locate_nonfinite_gradient(self) -> str:
        """The first weight whose gradient is not finite."""
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        odd = (name for name, gradient in gradients.items() if not bool(full_tensor(gradient).isfinite().all()))
        return next(
            (f"the gradient of {name} is not finite" for name in odd),
            "every gradient is finite, so only their norm overflows",
        )

    @torch.no_grad()
    def evaluate(self) -> tuple[dict[str, Any], float]:
        """Evaluate the model on the first `evaluate_targets` held-out targets.

        Return the task's metrics, with samples of its output, and the score to minimise.
        """
        world, limit = self.world, self.recipe.evaluate_targets
        self.objective.eval()
        count, totals = 0, {"loss": 0.0}
        for batch in self.task.validation():
            share = -(-len(batch.inputs) // world.size)
            part = batch.part(slice(world.rank * share, (world.rank + 1) * share))
            counted = part.count if len(part.inputs) else 0
            loss, sums = self.objective((part if len(part.inputs) else batch.part(slice(1))).to(world.device))
            for name, value in ({"loss": loss * counted} | sums).items():
                totals[name] = totals.get(name, 0.0) + (value.item() if counted else 0.0)
            count += batch.count
            self.callbacks.status(f"evaluating: {min(count / limit, 1):.0%}")
            if count >= limit:
                break
        totals = dict(zip(totals, world.sum(list(totals.values())), strict=True))
        loss_mean = totals.pop("loss") / count
        if not math.isfinite(loss_mean):
            raise TrainingError(f"the loss on held-out data is {loss_mean} after step {self.step:,}")
        numbers: dict[str, Any] = self.task.measures(loss_mean, totals, count)
        if not world.sharded and world.first:
            self.callbacks.status("writing a sample")
            numbers |= self.task.write_samples(self.model)
        (score,) = world.sum([self.task.score(numbers) if world.first else 0.0])
        self.callbacks.status("")
        self.objective.train()
        return numbers, score

    def evaluate_and_keep_best(self) -> dict[str, Any]:
        """Evaluate the model, and save it in `best/` if it is the best so far."""
        numbers, score = self.evaluate()
        self.evaluations_since_best += 1
        if score < self.best_score:
            self.best_score, self.evaluations_since_best = score, 0
            self.write_model(self.run.best)
            if self.world.first:
                shutil.rmtree(self.run.last, ignore_errors=True)
        return numbers

    def save(self) -> None:
        """Write a checkpoint; until there is a best model, also write the current one to `last/`."""
        facts = {
            "best_score": self.best_score,
            "evaluations_since_best": self.evaluations_since_best,
            "score_name": self.score_name,
        }
        write_checkpoint(
            self.run.checkpoints, self.step, self.tensors(), facts, self.world, self.checkpoints_to_average
        )
        if math.isinf(self.best_score):
            self.write_model(self.run.last)

    def checkpoints_to_average(self) -> list[Path]:
        """The last `average` checkpoints, whose mean becomes the trained model.

        Checkpoints that were written because the run was stopped do not count, so a stop does not change the mean.
        """
        recipe = self.recipe

        def is_regular(path: Path) -> bool:
            return step_of(path) % recipe.save_every == 0 or step_of(path) == recipe.steps

        return [path for path in list_checkpoints(self.run.checkpoints) if is_regular(path)][-recipe.average :]

    @torch.no_grad()
    def average_checkpoints(self) -> None:
        """Replace the weights by the mean of the last checkpoints."""
        paths = []
        for path in self.checkpoints_to_average():
            if damage := find_damage(path):
                self.callbacks.message(f"{path} is damaged ({damage}); averaging without it")
            else:
                paths.append(path)
        if len(paths) < 2:
            return
        weights = {name: tensor for name, tensor in self.tensors().items() if name.startswith("weights.")}
        sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for path in paths:
            read_checkpoint(path, weights)
            for name, weight in weights.items():
                sums[name] += weight / len(paths)
        for name, weight in weights.items():
            weight.copy_(sums[name])
        numbers, _ = self.evaluate()
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items() if isinstance(value, float))
        self.callbacks.message(f"Mean of the last {len(paths)} checkpoints: {metrics}")

    def write_model(self, folder: Path) -> None:
        """Save the current model as a checkpoint folder."""
        model = gather_model(self.model, self.task, self.recipe, self.world) if self.world.sharded else self.model
        if self.world.first:
            folder.mkdir(parents=True, exist_ok=True)
            self.task.save(model, folder, self.recipe)

    def finish(self) -> Model:
        """Save the trained model in the run's folder and return it."""
        if self.recipe.average > 1:
            self.average_checkpoints()
        self.write_model(self.run.folder)
        if self.world.first:
            shutil.rmtree(self.run.last, ignore_errors=True)
        self.callbacks.message(f"Saved {self.run.folder}")
        self.world.wait()
        for block in list_blocks(self.model):
            vars(block).pop("forward", None)  # remove the wrapper of `recompute`
        self.model.origin = self.run.folder
        return self.model.eval()


def format_duration(seconds: float) -> str:
    """`40 s`, `3 min`, `2.5 h`."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
