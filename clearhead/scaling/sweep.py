"""Train a family of small models under fixed compute budgets on one corpus: the runs for a scaling law."""

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
from clearhead.training.loop import Callbacks, Execution, train
from clearhead.training.recipes import chars
from clearhead.training.run import Run
from clearhead.training.text import NextToken, prepare_tokens

from .table import FLOPS

HEAD_DIM = 8
FEWEST_STEPS = 20  # a shorter run shows its warmup, not its size
COLUMNS = ("N", "D", "C", "loss", "budget", "dim", "steps", "run")
Row = dict[str, Any]


def bytes_recipe() -> RecipeConfig:
    """`chars` with smaller batches over bytes, so that every text has the same vocabulary."""
    return replace(chars(), task=NextTokenConfig(tokenizer=BytesConfig(), context=128), batch=8)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The runs to train: a model of every width under every budget, with one recipe."""

    dims: tuple[int, ...] = (8, 16, 24, 32, 48, 64)
    budgets: tuple[float, ...] = (3e10, 6e10, 1.2e11, 3e11)  # FLOPs, 6·N·D
    layers: int = 2
    recipe: RecipeConfig = bytes_recipe()  # its model is replaced

    def __post_init__(self) -> None:
        if not self.dims or not self.budgets:
            raise ConfigError(
                f"a sweep needs at least one width and one budget, not {len(self.dims)} and {len(self.budgets)}; "
                "give --dims and --budgets"
            )
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
    n: int  # parameters without the embedding table

    @property
    def d(self) -> int:
        assert isinstance(self.recipe.task, NextTokenConfig)
        return self.recipe.steps * self.recipe.batch * self.recipe.task.context

    def row(self, loss: float) -> Row:
        sizes = {"N": self.n, "D": self.d, "C": FLOPS * self.n * self.d, "loss": loss}
        return sizes | {"budget": self.budget, "dim": self.dim, "steps": self.recipe.steps, "run": self.name}


def run_sweep(
    sweep: Sweep,
    data: Sequence[str | Path],
    out: str | Path,
    *,
    resume: bool = False,
    callbacks: Callbacks | None = None,
    execution: Execution | None = None,
) -> Path:
    """Train every member in its own folder under `out`, and add a row to `table.csv` when each is finished.

    With `resume` it keeps finished members and continues; with other widths or budgets the table grows.
    """
    callbacks, folder = callbacks or Callbacks(), Path(out)
    if (folder / "tokens").exists() and not resume:
        raise ConfigError(f"{out} already holds a sweep; add --resume to continue it, or choose another --out")
    with Run(folder).lock(resume=resume):
        if (folder / "tokenizer.json").exists():
            require_same_members(sweep, folder)
        corpus = prepare_tokens(sweep.recipe, data, (), Run(folder), callbacks.message)
        return train_all(sweep, corpus, folder, callbacks, execution or Execution())


def require_same_members(sweep: Sweep, folder: Path) -> None:
    """Check that every member that was started has the same recipe now."""
    vocabulary = Tokenizer.load(folder).vocabulary
    stay = {
        name: recipe_of(sweep, int(row["dim"]), int(row["steps"]), vocabulary)
        for name, row in read_finished(folder).items()
    }
    wanted = {member.name: member.recipe for member in family(sweep, vocabulary, say=lambda text: None)}
    for name, recipe in (stay | wanted).items():
        run = Run(folder / name)
        if run.recipe_file.exists():
            run.begin(recipe, resume=True)


def train_all(
    sweep: Sweep, corpus: tuple[Tokenizer, Shards, Shards], folder: Path, callbacks: Callbacks, execution: Execution
) -> Path:
    tokenizer, training, _ = corpus
    members = list(family(sweep, tokenizer.vocabulary, callbacks.message))
    if not members:
        raise ConfigError(f"no budget is enough for {FEWEST_STEPS} steps; raise --budgets, or use --set batch=4")
    if (times := max(member.d for member in members) / len(training)) > 1:
        callbacks.message(
            f"The text is short: the longest run reads it {times:.1f} times, but the laws assume fresh text."
        )
    rows = read_finished(folder)
    for number, member in enumerate(members, start=1):
        at = {"run": number, "runs": len(members), "steps": member.recipe.steps}
        show = Callbacks(step=lambda numbers, at=at: callbacks.step(numbers | at))  # type: ignore[misc]
        loss = train_member(member, corpus, folder, show, execution)
        rows[member.name] = member.row(loss)
        write_atomically(folder / "table.csv", as_csv(rows.values()))
        size = f"width {member.dim}  N {member.n:,}  D {member.d:,}  {member.budget:.3g} FLOPs"
        callbacks.message(f"run {number}/{len(members)}  {size}  loss {loss:.4f}")
    return folder / "table.csv"


def read_finished(folder: Path) -> dict[str, Row]:
    """The finished rows of a resumed sweep, by run."""
    table = folder / "table.csv"
    if not table.exists():
        return {}
    with table.open(encoding="utf-8", newline="") as file:
        rows = {row.get("run", ""): row for row in csv.DictReader(file)}
    return {name: row for name, row in rows.items() if Run(folder / name).recipe_file.exists()}


def family(sweep: Sweep, vocabulary: int, say: Callable[[str], None]) -> Iterator[Member]:
    """Every width under every budget, except those with too few steps."""
    task = sweep.recipe.task
    assert isinstance(task, NextTokenConfig)
    for budget in sorted(sweep.budgets):
        for dim in sorted(sweep.dims):
            n = matmul_parameters(member_config(dim, sweep.layers, vocabulary))
            steps = round(budget / (FLOPS * n * sweep.recipe.batch * task.context))
            if steps < FEWEST_STEPS:
                say(f"Skipping width {dim} at {budget:.3g} FLOPs: that is only {steps} steps.")
                continue
            yield Member(f"{budget:.3g}-{dim}", dim, budget, recipe_of(sweep, dim, steps, vocabulary), n)


def recipe_of(sweep: Sweep, dim: int, steps: int, vocabulary: int) -> RecipeConfig:
    model = member_config(dim, sweep.layers, vocabulary)
    return replace(sweep.recipe, model=model, steps=steps, evaluate_every=steps)


def member_config(dim: int, layers: int, vocabulary: int) -> SequenceModelConfig:
    """Blocks of attention and a feed-forward layer as in the recipe `chars`, without its short convolutions."""
    mixer = AttentionConfig(heads=dim // HEAD_DIM, mask=Causal(), rotary=RotaryConfig(), qk_norm=RMSNormConfig())
    ffn = FeedForwardConfig(hidden=4 * dim, activation="relu2", bias=False)
    return decoder(dim=dim, layers=layers, mixer=mixer, ffn=ffn, vocabulary=vocabulary)


def matmul_parameters(config: SequenceModelConfig) -> int:
    """Parameters without the embedding table, which multiplies nothing; so 6·N·D is close to the real cost."""
    return sum(math.prod(shape) for name, shape in config.weights().items() if not name.startswith("embedding."))


def train_member(
    member: Member, corpus: tuple[Tokenizer, Shards, Shards], folder: Path, callbacks: Callbacks, execution: Execution
) -> float:
    """The held-out loss of a member; a finished one is not trained again."""
    run = Run(folder / member.name)
    last = run.history()[-1:]
    if last and last[0]["step"] == member.recipe.steps:
        run.begin(member.recipe, resume=True)
        return last[0]["val/loss"]
    started = run.recipe_file.exists()
    task = NextToken(member.recipe, *corpus)
    train(member.recipe, out=run.folder, resume=started, callbacks=callbacks, execution=execution, task=task)
    return run.history()[-1]["val/loss"]


def as_csv(rows: Iterable[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
