"""A run's folder: who works in it, what it was asked to do, and what it has measured."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from clearhead.configs import dumps, read
from clearhead.configs.train import RecipeConfig
from clearhead.data.sources import LOCK, RECIPE
from clearhead.files import open_own, write_atomically
from clearhead.typed_json import check_fields, decode_json

from .checkpoint import ResumeError

try:
    import fcntl
except ImportError:  # Windows: no lock, as there is no such file lock
    fcntl = None  # type: ignore[assignment]


MADE = ("metrics.jsonl", "checkpoints", "config.json", "adapter.json", "model*.safetensors")
"""By any of these a folder was trained in, or holds a model."""
METRICS = {"step": int, "train/loss": float, "val/loss": float, "val/bpb": float}
TOKENIZER = "tokenizer.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter.safetensors")  # a trained model has one


class Run:
    """`recipe.json`, `metrics.jsonl`, `tokens/`, `checkpoints/`, `best/`, and in the end the model, each of the last
    two an ordinary checkpoint."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.metrics, self.recipe_file = self.folder / "metrics.jsonl", self.folder / RECIPE
        self.checkpoints, self.tokens = self.folder / "checkpoints", self.folder / "tokens"
        self.best, self.lock = self.folder / "best", self.folder / LOCK

    @contextlib.contextmanager
    def held(self, resume: bool = False) -> Iterator[None]:
        """Nobody else trains in this folder meanwhile; a process that dies lets go.

        A folder that was made for nothing, since the run could not be begun, is taken back.
        """
        if resume and not self.lock.exists() and not self.recipe_file.exists():
            raise ResumeError(f"there is no run in {self.folder} to go on with; leave --resume out to begin one")
        new = not self.folder.exists()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ResumeError(f"{self.folder} is not a folder, nor can it be one; choose another --out") from None
        ours = False
        try:
            with open_own(self.lock, "wb") as file:
                if fcntl is not None:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except OSError:
                        raise ResumeError(f"{self.folder} is in use by another process; choose another --out") from None
                ours = new
                yield
        except ValueError:
            if ours:
                self.take_back()
            raise

    def take_back(self) -> None:
        """Remove a folder in which there is nothing but that somebody wanted to train here."""
        if set(self.folder.iterdir()) <= {self.lock, self.recipe_file}:
            self.recipe_file.unlink(missing_ok=True)
            self.lock.unlink()
            self.folder.rmdir()

    def held_names(self, patterns: Sequence[str] = (*MADE, RECIPE, TOKENIZER)) -> list[str]:
        """What of a run, or of a model, there is."""
        return [path.name for pattern in patterns for path in self.folder.glob(pattern)]

    def begin(self, recipe: RecipeConfig, resume: bool) -> None:
        """Write the recipe down, or see that a resumed run is asked for the same one.

        A run that never came to its first step is no run yet: it may be begun again, with another recipe too.
        """
        tokenizer, made = self.folder / TOKENIZER, self.held_names(MADE)
        if not self.recipe_file.exists():
            if found := self.held_names():
                raise ResumeError(
                    f"{self.folder} holds {found[0]} but no recipe.json, so it is no run; choose another --out"
                )
        elif made:
            if not resume:
                raise ResumeError(
                    f"{self.folder} holds a run already; give --resume to go on with it, or another --out"
                )
            if difference := first_difference(self.recipe().to_dict(), recipe.to_dict()):
                raise ResumeError(f"{self.folder} was begun with another recipe: {difference}; leave it as it was")
        elif not resume or self.recipe() != recipe:
            tokenizer.unlink(missing_ok=True)  # it may be of another text
        write_atomically(self.recipe_file, dumps(recipe))

    def recipe(self) -> RecipeConfig:
        if not self.recipe_file.exists():
            raise ResumeError(f"{self.folder} holds no recipe.json, so there is no run to go on with")
        recipe = read(self.recipe_file)
        if not isinstance(recipe, RecipeConfig):
            raise ResumeError(f"{self.recipe_file} describes a {recipe.kind()}, not a recipe")
        return recipe

    @property
    def trained(self) -> bool:
        """Whether it came to its end: a trained model lies there."""
        return any((self.folder / name).exists() for name in WEIGHTS)

    def log(self, **values: Any) -> None:
        """One line of metrics.jsonl."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def history(self) -> list[dict[str, Any]]:
        """Every line that is whole: a kill may leave half of the last one."""
        lines = self.metrics.read_text(encoding="utf-8", errors="replace").splitlines() if self.metrics.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                line = decode_json(line, str(self.metrics), dict[str, Any])
                check_fields(line, METRICS, str(self.metrics))
                found += [line] if "step" in line else []
        return found

    def forget_after(self, step: int) -> None:
        """Steps after the checkpoint that is resumed will be measured again."""
        kept = [line for line in self.history() if line["step"] <= step]
        write_atomically(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))


def first_difference(before: Any, now: Any, path: str = "") -> str:
    """`steps was 100 and is 200`: the first field in which two recipes differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            if found := first_difference(before.get(key), now.get(key), f"{path}.{key}" if path else key):
                return found
        return ""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return next((found for i, (a, b) in pairs if (found := first_difference(a, b, f"{path}.{i}"))), "")
    return "" if before == now else f"{path} was {before!r} and is {now!r}"
