"""The training loop."""

from __future__ import annotations

import logging
import math
import os
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

from clearhead.configs import ConfigError, ModelConfig
from clearhead.configs.train import RecipeConfig
from clearhead.data import DataError
from clearhead.data.hashing import mixed
from clearhead.kernels.malloc import keep_memory
from clearhead.measure.cost import cost
from clearhead.measure.machine import look_for_compiler
from clearhead.measure.precision import precision_works
from clearhead.models.adapter import adapt
from clearhead.models.convert.compare import differences
from clearhead.models.hub import find_checkpoint
from clearhead.models.initialise import RESIDUAL_OUTPUTS
from clearhead.models.load import load
from clearhead.models.model import EncoderDecoder, Model, build, build_empty

from . import images as _images
from . import pairs as _pairs
from . import text as _text
from .checkpoint import ResumeError, damage_of, find_last, listed, read, step_of, write
from .distributed import World, whole, world
from .objective import Objective, first_trouble
from .optimizer import Optimizer, make_optimizer
from .peak_flops import matrix_peak
from .recipes import recipe as recipe_named
from .run import Run
from .task import Task, TrainBatch, prepare

TASKS = (_text, _images, _pairs)
"""Loaded, so that `prepare` knows them."""


class TrainingError(ValueError):
    """A run that went wrong: the message says at which step and where."""


class Interrupted(Exception):
    """The run was asked to leave, and has saved itself."""


@dataclass
class Report:
    """What the loop tells whoever watches: `say` a sentence, `show` the numbers of a step."""

    say: Callable[[str], None] = field(default=lambda text: None)
    show: Callable[[dict[str, Any]], None] = field(default=lambda numbers: None)


@dataclass(frozen=True, kw_only=True)
class Means:
    """How a run is carried out, which does not change what it learns.

    shard      of several processes, each holds a part of the model (FSDP); else each holds all of it (DDP)
    recompute  what a block computes is computed again for its gradient, and not kept
    compile    by torch.compile: half a minute and more before the first step, faster steps after it
    """

    shard: bool = False
    recompute: bool = False
    compile: bool = False


def train(
    recipe: RecipeConfig | str,
    data: Sequence[str | Path] = (),
    out: str | Path = "runs/latest",
    *,
    validation: Sequence[str | Path] = (),
    resume: bool = False,
    report: Report | None = None,
    means: Means = Means(),
    task: Task | None = None,
) -> Model:
    """Train as the recipe says on the files and folders in `data` (none: what the task has built in), in `out`.
    Those in `validation` are held out; without any, the recipe's share of `data` is.

    Killed at any moment and called again with `resume`, it ends with the very weights of an uninterrupted run. Under
    `torchrun` every process calls it. A `task` that was made before, for runs that share their data, takes its place.
    """
    asked = recipe_named(recipe, bool(data)) if isinstance(recipe, str) else recipe
    run = Run(out)
    with world(means.shard) as here, ExitStack() as held:
        report = report if report is not None and here.first else Report()
        here.first_alone(lambda: held.enter_context(run.held(resume)))
        recipe = here.first_does(lambda: possible(asked, here, report))
        here.first_alone(lambda: run.begin(recipe, resume))
        task = task or here.first_does(lambda: prepare(recipe, data, validation, run, report.say))
        trainer = Trainer(recipe, task, run, report, here, means)
        trainer.start(resume)
        with leaving_well() as asked_to_leave:
            trainer.go(asked_to_leave)
            return trainer.finish()


def possible(recipe: RecipeConfig, here: World, report: Report) -> RecipeConfig:
    """The recipe in a precision that works here."""
    if recipe.batch % (recipe.accumulate * here.size):
        parts = f"{here.size} processes" + (f" times {recipe.accumulate} parts" if recipe.accumulate > 1 else "")
        raise ValueError(f"a batch of {recipe.batch} does not divide into {parts}")
    if recipe.precision != "float32" and here.device.type == "cpu":
        probe = precision_works(recipe.precision)
        if not probe.works:
            report.say(f"{recipe.precision} {probe}; going on in float32")
            return replace(recipe, precision="float32")
    return recipe


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
    """One model, its optimizer and its task, from a step to the last."""

    def __init__(
        self,
        recipe: RecipeConfig,
        task: Task,
        run: Run,
        report: Report,
        here: World | None = None,
        means: Means = Means(),
    ) -> None:
        here = here or World(torch.device("cpu"))
        keep_memory()
        self.recipe, self.task, self.run, self.report, self.here, self.means = recipe, task, run, report, here, means
        model = make_model(recipe, task)
        self.model = model if here.sharded else model.to(here.device)  # sharding takes it there block by block
        blocks = blocks_of(self.model)
        if means.recompute:
            for block in blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        objective = Objective(self.model, task, recipe.label_smoothing, recipe.precision)
        self.objective = compiled(here.share(objective, blocks), means.compile, report)
        self.optimizer: Optimizer = make_optimizer(recipe.optimizer, self.model, here.mesh)
        self.step = 0
        self.judged_by = "val/loss" if here.sharded else task.judged_by  # a model in parts makes nothing to judge
        self.best = math.inf
        self.waited = 0  # evaluations since the best
        self.rows = task.rows(recipe.batch)
        self.flops = cost(task.config, batch=self.rows, length=task.length).flops.train
        self.peak = matrix_peak(here.device) * here.size

    def tensors(self) -> dict[str, Tensor]:
        """All that the run remembers, by name."""
        learned = {f"weights.{name}": p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        return learned | {f"optimizer.{name}": t for name, t in self.optimizer.state().items()}

    def start(self, resume: bool) -> None:
        """From the last whole checkpoint, or from the beginning."""
        if not any(batch.count for batch in self.task.validation()):
            raise DataError("nothing that is held out has an answer to judge by; hold out more, or give --validation")
        path, complaints = find_last(self.run.checkpoints) if resume else (None, [])
        for complaint in complaints:
            self.report.say(complaint)
        if path is None:
            self.require_nothing_lost(bool(complaints))
            if self.here.first:
                self.run.forget_after(-1)
            self.expect_a_guess()
            return
        self.step, facts = read(path, self.tensors())
        if self.here.first:
            self.run.forget_after(self.step)
        self.report.say(f"going on from step {self.step}{', the one before' if complaints else ''}")
        if (before := facts.get("judged_by", self.judged_by)) == self.judged_by:
            self.best, self.waited = facts["best"], facts["waited"]
        else:
            self.report.say(f"the best is sought anew, by {self.judged_by}: it was judged by {before}")

    def require_nothing_lost(self, damaged: bool) -> None:
        """A run that has no checkpoint begins anew, but not one that had some."""
        come = max((line["step"] for line in self.run.history()), default=0)
        if damaged or self.run.trained or come > self.recipe.save_every:
            raise ResumeError(
                f"{self.run.folder} came to step {come}, but there is no whole checkpoint of it, so it is left alone: "
                "put one back, or remove the folder to begin anew"
            )

    @torch.no_grad()
    def expect_a_guess(self) -> None:
        """Before training, every answer should be about equally likely: of V tokens, loss ln V."""
        if self.recipe.start is not None:
            return
        first = self.part(0, 0)
        self.objective.eval()
        loss = self.objective(first)[0].item()  # a process that has no target computes with the others
        self.objective.train()
        total, count = self.here.sum([loss * first.count if first.count else 0.0, first.count])
        mean, guess = total / max(count, 1), self.task.guess
        if count and not abs(mean - guess) < 0.25 * guess:
            self.report.say(
                f"the loss before training is {mean:.2f}, though a guess has {guess:.2f}: look at the model"
            )

    def part(self, step: int, number: int) -> TrainBatch:
        """One of the parts in which this process reads a step's batch."""
        rows = self.recipe.batch // (self.recipe.accumulate * self.here.size)
        first = (number * self.here.size + self.here.rank) * rows
        return self.task.batch(step, slice(first, first + rows)).to(self.here.device)

    def go(self, asked_to_leave: Callable[[], bool]) -> None:
        """Every step that is left, with evaluations and checkpoints at their times."""
        recipe, here = self.recipe, self.here
        self.objective.train()
        while self.step < recipe.steps and not self.given_up:
            begun = time.perf_counter()
            loss, norm = self.update()
            seconds = time.perf_counter() - begun
            numbers = {
                "step": self.step,
                "train/loss": loss,
                "lr": recipe.schedule.factor(self.step, recipe.steps) * recipe.optimizer.lr,
                "grad_norm": norm,
                f"{self.task.unit}_per_second": self.rows * (self.task.length or 1) / seconds,
                "peak": self.flops / seconds / self.peak,
            }
            last = self.step == recipe.steps
            if last or self.step % recipe.evaluate_every == 0:
                numbers |= self.judge()
            if here.first:
                self.run.log(**numbers)
            self.report.show(numbers)
            leaving = bool(here.sum([float(asked_to_leave())])[0])
            if last or leaving or self.given_up or self.step % recipe.save_every == 0:
                self.save()
            if leaving and not last:
                raise Interrupted(f"left at step {self.step} of {recipe.steps}; --resume goes on")
        if self.given_up:
            self.report.say(f"no better for {self.waited} evaluations: left off at step {self.step}")

    @property
    def given_up(self) -> bool:
        """Whether the recipe's patience is at its end."""
        return self.recipe.patience is not None and self.waited >= self.recipe.patience

    def update(self) -> tuple[float, float]:
        """One step of the optimizer: its loss, and the norm of its gradient before clipping.

        The loss is the mean over all targets of the batch, in however many parts and processes it is read; random
        numbers are a function of the seed, the step and the process.
        """
        recipe, here = self.recipe, self.here
        torch.manual_seed(mixed(recipe.seed, self.step * here.size + here.rank) % 2**63)
        parts = [self.part(self.step, number) for number in range(recipe.accumulate)]
        count = max(here.sum([sum(part.count for part in parts)])[0], 1.0)
        total = 0.0
        for part in parts:
            with here.adding_up(self.objective, last=part is parts[-1]):
                loss = self.objective(part)[0] * (part.count / count)
                (loss * here.size).backward()
            total += loss.item()
        (total,) = here.sum([total])
        if not math.isfinite(total):
            raise TrainingError(f"the loss of step {self.step + 1} is {total}: {self.where(parts)}")
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        size = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = whole(size).item()
        if not math.isfinite(norm):
            raise TrainingError(f"the gradient of step {self.step + 1} has the norm {norm}: {self.where_gradient()}")
        if recipe.clip is not None and norm > recipe.clip:
            nn.utils.clip_grads_with_norm_(parameters, recipe.clip, size)
        self.step += 1
        self.optimizer.step(recipe.schedule.factor(self.step, recipe.steps))
        self.model.zero_grad(set_to_none=True)
        return total, norm

    def where(self, parts: list[TrainBatch]) -> str:
        """Where a loss that is not finite begins."""
        if self.here.sharded:
            return "train it in one process, or unsharded, to be told where"
        found = (first_trouble(self.model, part) for part in parts)
        return next((place for place in found if place), "every value is finite in a second pass")

    def where_gradient(self) -> str:
        """Which weight's gradient is not finite."""
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        odd = (name for name, gradient in gradients.items() if not bool(whole(gradient).isfinite().all()))
        return next((f"the first that is not finite is that of {name}" for name in odd), "each number of it is finite")

    @torch.no_grad()
    def evaluate(self) -> tuple[dict[str, Any], float]:
        """The measures of the task on the beginning of what was held out and something the model made, and the number
        by which it is judged."""
        here = self.here
        self.objective.eval()
        count, totals = 0, {"loss": 0.0}
        for batch in self.task.validation():
            share = -(-len(batch.inputs) // here.size)
            part = batch.part(slice(here.rank * share, (here.rank + 1) * share))
            counted = part.count if len(part.inputs) else 0
            loss, sums = self.objective((part if len(part.inputs) else batch.part(slice(1))).to(here.device))
            for name, value in ({"loss": loss * counted} | sums).items():
                totals[name] = totals.get(name, 0.0) + (value.item() if counted else 0.0)
            count += batch.count
            if count >= self.recipe.evaluate_targets:
                break
        totals = dict(zip(totals, here.sum(list(totals.values())), strict=True))
        loss_mean = totals.pop("loss") / count
        if not math.isfinite(loss_mean):
            raise TrainingError(f"the loss on what was held out is {loss_mean} after step {self.step}")
        numbers: dict[str, Any] = self.task.measures(loss_mean, totals, count)
        if not here.sharded and here.first:
            numbers |= self.task.made(self.model)
        (judged,) = here.sum([self.task.judged(numbers) if here.first else 0.0])
        self.objective.train()
        return numbers, judged

    def judge(self) -> dict[str, Any]:
        """An evaluation; the model is kept aside where it is the best so far."""
        numbers, judged = self.evaluate()
        self.waited += 1
        if judged < self.best:
            self.best, self.waited = judged, 0
            self.write_model(self.run.best)
        return numbers

    def save(self) -> None:
        facts = {"best": self.best, "waited": self.waited, "judged_by": self.judged_by}
        write(self.run.checkpoints, self.step, self.tensors(), facts, self.here, self.to_average)

    def to_average(self) -> list[Path]:
        """The checkpoints whose mean the trained model is: those at their times, not one that an interruption left."""
        recipe = self.recipe

        def at_its_time(path: Path) -> bool:
            return step_of(path) % recipe.save_every == 0 or step_of(path) == recipe.steps

        return [path for path in listed(self.run.checkpoints) if at_its_time(path)][-recipe.average :]

    @torch.no_grad()
    def average(self) -> None:
        """Put the mean of the last checkpoints in the place of the weights."""
        paths = []
        for path in self.to_average():
            if damage := damage_of(path):
                self.report.say(f"{path} is damaged ({damage}); the mean is taken without it")
            else:
                paths.append(path)
        if len(paths) < 2:
            return
        weights = {name: tensor for name, tensor in self.tensors().items() if name.startswith("weights.")}
        sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for path in paths:
            read(path, weights)
            for name, weight in weights.items():
                sums[name] += weight / len(paths)
        for name, weight in weights.items():
            weight.copy_(sums[name])
        numbers, _ = self.evaluate()
        told = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items() if isinstance(value, float))
        self.report.say(f"the mean of the last {len(paths)} checkpoints: {told}")

    def write_model(self, folder: Path) -> None:
        """The model as it is now, as an ordinary folder."""
        model = gathered_model(self.model, self.task, self.recipe, self.here) if self.here.sharded else self.model
        if self.here.first:
            folder.mkdir(parents=True, exist_ok=True)
            self.task.save(model, folder, self.recipe)

    def finish(self) -> Model:
        """The trained model, saved in the run's folder."""
        if self.recipe.average > 1:
            self.average()
        self.write_model(self.run.folder)
        self.report.say(f"saved {self.run.folder}")
        self.here.wait()
        for block in blocks_of(self.model):
            vars(block).pop("forward", None)  # what recomputes
        self.model.origin = self.run.folder
        return self.model.eval()


def make_model(recipe: RecipeConfig, task: Task) -> Model:
    """Fresh weights, or a checkpoint's; under `zero_out`, every branch adds nothing at first and every token is as
    likely."""
    torch.manual_seed(recipe.seed)
    if recipe.start is not None:
        if recipe.adapter is not None and not find_checkpoint(recipe.start).is_dir():
            raise ConfigError(f"{recipe.start} is no folder, to which an adapter could belong; save it as one first")
        model = load(recipe.start)
        if model.precision is not None:
            raise ConfigError(f"{recipe.start} is quantised, and so learns nothing; train the model it was made from")
        model = as_asked(model, task.config, recipe.start).float().train()
        if recipe.adapter is not None:
            adapt(model, recipe.adapter)
        return model
    model = build(task.config)
    if recipe.zero_out:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(RESIDUAL_OUTPUTS) or name == "head.weight":
                    parameter.zero_()
    return model


def as_asked(model: Model, config: ModelConfig, start: str) -> Model:
    """A checkpoint's model under the recipe's config, which may have another dropout and nothing else."""
    if found := differences(config, model.config):
        raise ConfigError(
            f"the recipe's model is not that of {start}: {found[0]}; leave it as it is, all but its dropout"
        )
    if config == model.config:
        return model
    asked = build_empty(config)
    asked.load_state_dict(model.state_dict(), assign=True)
    asked.origin = model.origin
    return asked


def blocks_of(model: Model) -> list[nn.Module]:
    """Every block once, though one that is shared runs more often."""
    stacks = [model.encoder, model.decoder] if isinstance(model, EncoderDecoder) else [model.stack]
    return list(dict.fromkeys(block for stack in stacks for block in stack.layers()))


def gathered_model(model: Model, task: Task, recipe: RecipeConfig, here: World) -> Model:
    """A whole copy of a model that the processes hold in parts: in the first one's memory, in the others' without
    weights. One tensor at a time is whole on a device."""
    with torch.device("meta"):
        copy = build(task.config)
        if recipe.adapter is not None:
            adapt(copy, recipe.adapter)
    weights = {}
    for name, tensor in model.state_dict().items():
        gathered = whole(tensor)
        if here.first:
            weights[name] = gathered.cpu()
    copy.load_state_dict(weights, strict=here.first, assign=True)
    copy.origin = model.origin
    return copy


def compiled(objective: nn.Module, wanted: bool, report: Report) -> nn.Module:
    """By torch.compile, where it is wanted and can be."""
    if not wanted:
        return objective
    if trouble := no_compiling():
        report.say(f"torch.compile {trouble}; going on without (see `clearhead doctor`)")
        return objective
    report.say("compiling: the first step takes a while")
    if "TORCH_LOGS" not in os.environ:
        torch._logging.set_logs(dynamo=logging.ERROR)  # where it takes several graphs is of no use to who waits
    objective.compile()
    return objective


def no_compiling() -> str | None:
    """Why torch.compile cannot be used, if it cannot: one addition tells."""
    if not look_for_compiler().possible:
        return "needs a C++ compiler and Python's headers"
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2))
    except Exception as error:  # of many kinds: of the compiler, of the system, of torch itself
        said = str(error).strip().splitlines() or [type(error).__name__]
        return f"does not work here: {said[0]}"
    return None
