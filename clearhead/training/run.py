"""A run's folder: its lock, its recipe and its metrics."""

from __future__ import annotations

import contextlib
import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.configs import dumps, read
from clearhead.configs.train import RecipeConfig
from clearhead.data.sources import LOCK, RECIPE
from clearhead.files import open_own, write_atomically
from clearhead.typed_json import check_fields, decode_json

from .checkpoint import ResumeError, list_checkpoints, step_of

try:
    import fcntl
except ImportError:  # Windows has no such lock
    fcntl = None  # type: ignore[assignment]


RESULTS = ("metrics.jsonl", "checkpoints", "config.json", "adapter.json", "model*.safetensors")
"""Files that show that a folder holds a run or a model."""
METRICS = {"step": int, "train/loss": float, "val/loss": float, "val/bpb": float}
TOKENIZER = "tokenizer.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter.safetensors")
"""A trained model has one of these."""
MODEL = (*WEIGHTS, "model-*.safetensors", "config.json", "clearhead.json", "adapter.json")


class Run:
    """The folder of a run.

    recipe.json, metrics.jsonl, tokens/, checkpoints/
    best/   the best model so far        an ordinary checkpoint folder
    last/   the last model, until there is a best one
    and in the end the trained model itself
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.metrics, self.recipe_file = self.folder / "metrics.jsonl", self.folder / RECIPE
        self.checkpoints, self.tokens = self.folder / "checkpoints", self.folder / "tokens"
        self.best, self.last, self.lock_file = self.folder / "best", self.folder / "last", self.folder / LOCK

    def __repr__(self) -> str:
        """`Run runs/a: step 400 of 1,000, loss 2.310, validation 2.401`."""
        lines = self.history()
        steps = f" of {self.recipe().steps:,}" if self.recipe_file.exists() else ""
        parts = [f"step {lines[-1]['step']:,}{steps}" if lines else "no step yet"]
        for name, key in (("loss", "train/loss"), ("validation", "val/loss")):
            values = [line[key] for line in lines if key in line]
            parts += [f"{name} {values[-1]:.3f}"] if values else []
        return f"Run {self.folder}: {', '.join(parts)}"

    def _repr_html_(self) -> str:
        """The same line and the loss curve, for notebooks."""
        losses = [(line["step"], line["train/loss"]) for line in self.history() if "train/loss" in line]
        title = f"<div>{html.escape(repr(self))}</div>"
        if len(losses) < 2:
            return title
        last, low, high = losses[-1][0], min(loss for _, loss in losses), max(loss for _, loss in losses)
        at = (f"{400 * step / last:.1f},{100 * (high - loss) / max(high - low, 1e-9):.1f}" for step, loss in losses)
        curve = f'<polyline points="{" ".join(at)}" fill="none" stroke="currentColor"/>'
        return f'{title}<svg viewBox="0 -4 400 108" width="400" role="img" aria-label="training loss">{curve}</svg>'

    @contextlib.contextmanager
    def lock(self, resume: bool = False) -> Iterator[None]:
        """Keep other processes from training in this folder; the lock ends with the process.

        If the run cannot start, a folder made for it is removed.
        """
        if resume and not self.lock_file.exists() and not self.recipe_file.exists():
            raise ResumeError(f"there is no run in {self.folder} to resume; leave out --resume to start one")
        new = not self.folder.exists()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ResumeError(f"{self.folder} is not a folder and cannot become one; choose another --out") from None
        ours = False
        try:
            with open_own(self.lock_file, "wb") as file:
                if fcntl is not None:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except OSError:
                        raise ResumeError(f"{self.folder} is in use by another process; choose another --out") from None
                ours = new
                yield
        except ValueError:
            if ours:
                self.remove_if_unused()
            raise

    def remove_if_unused(self) -> None:
        """Remove the folder if it holds nothing but the lock and the recipe."""
        if set(self.folder.iterdir()) <= {self.lock_file, self.recipe_file}:
            self.recipe_file.unlink(missing_ok=True)
            self.lock_file.unlink()
            self.folder.rmdir()

    def find_results(self, patterns: Sequence[str] = (*RESULTS, RECIPE, TOKENIZER)) -> list[str]:
        """The names of files that belong to a run or a model."""
        return [path.name for pattern in patterns for path in self.folder.glob(pattern)]

    def begin(self, recipe: RecipeConfig, resume: bool) -> list[str]:
        """Save the recipe, or check that a resumed run uses the same one; returns notes for the user.

        A resumed run may have another number of steps. A run that never reached its first step may start again with
        another recipe.
        """
        tokenizer, results = self.folder / TOKENIZER, self.find_results(RESULTS)
        notes: list[str] = []
        if not self.recipe_file.exists():
            if found := self.find_results():
                raise ResumeError(
                    f"{self.folder} holds {found[0]} but no recipe.json, so it is not a run; choose another --out"
                )
        elif results:
            if not resume:
                raise ResumeError(
                    f"{self.folder} already holds a run; add --resume to continue it, or choose another --out"
                )
            recipe, notes = self.continue_recipe(recipe)
        elif not resume or self.recipe() != recipe:
            tokenizer.unlink(missing_ok=True)  # it may come from another text
        write_atomically(self.recipe_file, dumps(recipe))
        return notes

    def continue_recipe(self, recipe: RecipeConfig) -> tuple[RecipeConfig, list[str]]:
        """The recipe to resume with, which may differ from the saved one in its steps only, and notes."""
        before = self.recipe()
        recipe = replace(recipe, extended_at=before.extended_at)
        if difference := first_difference(before.to_dict(), replace(recipe, steps=before.steps).to_dict()):
            raise ResumeError(
                f"{self.folder} was started with another recipe: {difference}; only --steps can change with --resume"
            )
        reached = max(map(step_of, list_checkpoints(self.checkpoints)), default=0)
        if recipe.steps == before.steps:
            if reached < recipe.steps or not self.finished:
                return recipe, []
            return recipe, [
                f"{self.folder} has finished its {recipe.steps:,} steps. To train longer: "
                f"--resume --steps {2 * recipe.steps}"
            ]
        if recipe.steps < reached:
            raise ResumeError(f"{self.folder} is at step {reached:,}, past --steps {recipe.steps}; give more steps")
        kind, warmup = recipe.schedule.kind(), recipe.schedule.warmup
        change = f"{before.steps:,} to {recipe.steps:,} steps"
        note = f"Changing the run from {change}: the {kind} schedule now covers all of them"
        if before.rate_factor(max(reached, 1)) < 0.9 * recipe.rate_factor(reached + 1):
            recipe = replace(recipe, extended_at=reached)
            return recipe, [f"{note}, and the learning rate, which had decayed, rises again over {warmup} steps."]
        return recipe, [f"{note}."]

    def recipe(self) -> RecipeConfig:
        if not self.recipe_file.exists():
            raise ResumeError(f"{self.folder} holds no recipe.json, so it is not a run that can be resumed")
        recipe = read(self.recipe_file)
        if not isinstance(recipe, RecipeConfig):
            raise ResumeError(f"{self.recipe_file} describes a {recipe.kind()}, not a recipe")
        return recipe

    @property
    def finished(self) -> bool:
        """Whether the folder holds a trained model."""
        return any((self.folder / name).exists() for name in WEIGHTS)

    def remove_model(self) -> None:
        """Remove the trained model from the folder, because the run continues."""
        for name in self.find_results(MODEL):
            (self.folder / name).unlink()

    def log(self, **values: Any) -> None:
        """Append one line to metrics.jsonl."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a line that a kill cut off is skipped."""
        lines = self.metrics.read_text(encoding="utf-8", errors="replace").splitlines() if self.metrics.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                numbers = decode_json(line, str(self.metrics), dict[str, Any])
                check_fields(numbers, METRICS, str(self.metrics))
                found += [numbers] if "step" in numbers else []
        return found

    def truncate_metrics(self, step: int) -> None:
        """Drop the metrics of steps after `step`, which will run again."""
        kept = [line for line in self.history() if line["step"] <= step]
        write_atomically(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))


def first_difference(before: Any, now: Any, path: str = "") -> str:
    """`batch was 4 and is 8`: the first field in which two recipes differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            if found := first_difference(before.get(key), now.get(key), f"{path}.{key}" if path else key):
                return found
        return ""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return next((found for i, (a, b) in pairs if (found := first_difference(a, b, f"{path}.{i}"))), "")
    return "" if before == now else f"{path} was {before!r} and is {now!r}"
