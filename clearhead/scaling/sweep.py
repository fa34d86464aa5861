"""A family of small models, trained under fixed budgets of compute on one corpus: the runs that a law is fitted to."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    Causal,
    ConfigError,
    FeedForwardConfig,
    RMSNormConfig,
    RotaryConfig,
    SequenceModelConfig,
)
from clearhead.configs.data import BytesConfig
from clearhead.configs.train import NextTokenConfig, RecipeConfig
from clearhead.data import Shards
from clearhead.files import write_atomically
from clearhead.models.llama import decoder
from clearhead.tokenize import Tokenizer
from clearhead.training.loop import Report, train
from clearhead.training.recipes import chars
from clearhead.training.run import Run
from clearhead.training.text import NextToken, tokens

from .table import FLOPS

HEAD_DIM = 8
FEWEST_STEPS = 20  # a run of fewer says more of its first steps than of its size
COLUMNS = ("N", "D", "C", "loss", "budget", "dim", "steps", "run")
Row = dict[str, Any]


def bytes_recipe() -> RecipeConfig:
    """`chars` with smaller batches over bytes, so that any text has one vocabulary."""
    return replace(chars(), task=NextTokenConfig(tokenizer=BytesConfig(), context=128), batch=8)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is trained: a model of every width under every budget, by one recipe."""

    dims: tuple[int, ...] = (8, 16, 24, 32, 48, 64)
    budgets: tuple[float, ...] = (3e10, 6e10, 1.2e11, 3e11)  # FLOPs, 6·N·D
    layers: int = 2
    recipe: RecipeConfig = bytes_recipe()  # whose model gives way to the family's

    def __post_init__(self) -> None:
        if not self.dims or not self.budgets:
            raise ConfigError("a sweep needs at least one width and one budget")
        if self.layers < 1:
            raise ConfigError(f"layers is {self.layers}, but must be at least 1")
        for dim in self.dims:
            if dim < HEAD_DIM or dim % HEAD_DIM:
                raise ConfigError(f"a width is {dim}, but must be a multiple of {HEAD_DIM}, the width of a head")
        for budget in self.budgets:
            if not (math.isfinite(budget) and budget > 0):
                raise ConfigError(f"a budget is {budget:g}, but must be a number of FLOPs above 0")
        if not isinstance(self.recipe.task, NextTokenConfig):
            raise ConfigError(f"a sweep trains language models, but the recipe's task is {self.recipe.task.kind()}")


@dataclass(frozen=True)
class Member:
    """One model under one budget."""

    name: str
    dim: int
    budget: float
    recipe: RecipeConfig
    n: int  # parameters that tokens are multiplied by: all but the table of embeddings

    @property
    def d(self) -> int:
        assert isinstance(self.recipe.task, NextTokenConfig)
        return self.recipe.steps * self.recipe.batch * self.recipe.task.context

    def row(self, loss: float) -> Row:
        told = {"N": self.n, "D": self.d, "C": FLOPS * self.n * self.d, "loss": loss}
        return told | {"budget": self.budget, "dim": self.dim, "steps": self.recipe.steps, "run": self.name}


def run_sweep(
    asked: Sweep,
    data: Sequence[str | Path],
    out: str | Path,
    *,
    resume: bool = False,
    report: Report | None = None,
) -> Path:
    """Train every member in a folder of its own under `out`, and write `table.csv` there, a row as each is finished.

    Stopped at any moment and called again with `resume`, it leaves finished members as they are and goes on; with other
    widths or budgets the table holds those of both.
    """
    report, folder = report or Report(), Path(out)
    if (folder / "tokens").exists() and not resume:
        raise ConfigError(f"{out} holds a sweep already; give --resume to go on with it, or another --out")
    with Run(folder).held(resume=resume):
        if (folder / "tokenizer.json").exists():
            require_alike(asked, folder)
        return train_all(asked, tokens(asked.recipe, data, (), Run(folder), report.say), folder, report)


def require_alike(asked: Sweep, folder: Path) -> None:
    """Of a sweep that is gone on with, every member that was begun is asked for as it was, or stays as it would be."""
    vocabulary = Tokenizer.load(folder).vocabulary
    stay = {
        name: recipe_of(asked, int(row["dim"]), int(row["steps"]), vocabulary) for name, row in finished(folder).items()
    }
    begun = {member.name: member.recipe for member in family(asked, vocabulary, say=lambda text: None)}
    for name, recipe in (stay | begun).items():
        run = Run(folder / name)
        if run.recipe_file.exists():
            run.begin(recipe, resume=True)


def train_all(asked: Sweep, corpus: tuple[Tokenizer, Shards, Shards], folder: Path, report: Report) -> Path:
    tokenizer, training, _ = corpus
    members = list(family(asked, tokenizer.vocabulary, report.say))
    if not members:
        raise ConfigError(f"no budget is enough for {FEWEST_STEPS} steps; raise --budgets, or --set a smaller batch")
    if (times := max(member.d for member in members) / len(training)) > 1:
        report.say(f"the text is short: the longest run reads it {times:.1f} times, and the laws are of fresh text")
    rows = finished(folder)
    for number, member in enumerate(members, start=1):
        at = {"run": number, "runs": len(members), "steps": member.recipe.steps}
        loss = trained(member, corpus, folder, lambda numbers, at=at: report.show(numbers | at))  # type: ignore[misc]
        rows[member.name] = member.row(loss)
        write_atomically(folder / "table.csv", as_csv(rows.values()))
        size = f"width {member.dim}  N {member.n:,}  D {member.d:,}  {member.budget:.3g} FLOPs"
        report.say(f"run {number}/{len(members)}  {size}  loss {loss:.4f}")
    return folder / "table.csv"


def finished(folder: Path) -> dict[str, Row]:
    """The rows of a sweep that is gone on with, by run: they stay, whether those runs are asked for again or not."""
    table = folder / "table.csv"
    if not table.exists():
        return {}
    with table.open(encoding="utf-8", newline="") as file:
        rows = {row.get("run", ""): row for row in csv.DictReader(file)}
    return {name: row for name, row in rows.items() if Run(folder / name).recipe_file.exists()}


def family(asked: Sweep, vocabulary: int, say: Callable[[str], None]) -> Iterator[Member]:
    """Every width under every budget; not those that would take hardly a step."""
    task = asked.recipe.task
    assert isinstance(task, NextTokenConfig)
    for budget in sorted(asked.budgets):
        for dim in sorted(asked.dims):
            n = multiplied(member_config(dim, asked.layers, vocabulary))
            steps = round(budget / (FLOPS * n * asked.recipe.batch * task.context))
            if steps < FEWEST_STEPS:
                say(f"width {dim} is left out at {budget:.3g} FLOPs: they are {steps} steps")
                continue
            yield Member(f"{budget:.3g}-{dim}", dim, budget, recipe_of(asked, dim, steps, vocabulary), n)


def recipe_of(asked: Sweep, dim: int, steps: int, vocabulary: int) -> RecipeConfig:
    model = member_config(dim, asked.layers, vocabulary)
    return replace(asked.recipe, model=model, steps=steps, evaluate_every=steps)


def member_config(dim: int, layers: int, vocabulary: int) -> SequenceModelConfig:
    """Attention and a feed-forward layer as the recipe `chars` has them, at any width; none of its short filters."""
    mixer = AttentionConfig(heads=dim // HEAD_DIM, mask=Causal(), rotary=RotaryConfig(), qk_norm=RMSNormConfig())
    ffn = FeedForwardConfig(hidden=4 * dim, activation="relu2", bias=False)
    return decoder(dim=dim, layers=layers, mixer=mixer, ffn=ffn, vocabulary=vocabulary)


def multiplied(config: SequenceModelConfig) -> int:
    """The parameters of matrix products, so that 6·N·D is nearly what training takes; looking up a vector is none."""
    return sum(math.prod(shape) for name, shape in config.weights().items() if not name.startswith("embedding."))


def trained(
    member: Member, corpus: tuple[Tokenizer, Shards, Shards], folder: Path, show: Callable[[dict[str, Any]], None]
) -> float:
    """The loss on what was held out; of a finished run, as it was."""
    run = Run(folder / member.name)
    last = run.history()[-1:]
    if last and last[0]["step"] == member.recipe.steps:
        run.begin(member.recipe, resume=True)
        return last[0]["val/loss"]
    begun = run.recipe_file.exists()
    task = NextToken(member.recipe, *corpus)
    train(member.recipe, out=run.folder, resume=begun, report=Report(show=show), task=task)
    return run.history()[-1]["val/loss"]


def as_csv(rows: Iterable[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
