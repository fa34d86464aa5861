"""The model of a run at one of its steps: before training, or at a checkpoint that the run has kept.

from clearhead.training.steps import list_steps, load_step

print(list_steps("runs/mine"))           # [0, 200, 240]
before = load_step("runs/mine", 0)       # the weights that training started from
"""

from __future__ import annotations

from pathlib import Path

from clearhead.models.load import load
from clearhead.models.model import Model

from .checkpoint import ResumeError, find_damage, list_checkpoints, read_checkpoint, step_of
from .model import make_model
from .run import Run


def find_trained(folder: str | Path) -> Path | None:
    """Where a run has saved a model: in its folder at the end, before that in `best/` or `last/`."""
    run = Run(folder)
    return next((place for place in (run.folder, run.best, run.last) if (place / "config.json").exists()), None)


def list_steps(folder: str | Path) -> list[int]:
    """Step 0 and the steps of the kept checkpoints; nothing if the run has saved no model or trains an adapter."""
    run = Run(folder)
    if find_trained(folder) is None or not run.recipe_file.exists() or run.recipe().adapter is not None:
        return []
    return [0, *map(step_of, list_checkpoints(run.checkpoints))]


def load_step(folder: str | Path, step: int) -> Model:
    """The model at a step of `list_steps`, in evaluation mode."""
    run, trained = Run(folder), find_trained(folder)
    if trained is None or step not in list_steps(folder):
        known = ", ".join(map(str, list_steps(folder))) or "none"
        raise ValueError(f"{run.folder} has no model of step {step}; it has steps: {known}")
    model = make_model(run.recipe(), load(trained).config)
    if step:
        path = next(path for path in list_checkpoints(run.checkpoints) if step_of(path) == step)
        if damage := find_damage(path):
            raise ResumeError(f"{path} is damaged ({damage})")
        read_checkpoint(path, {f"weights.{name}": p for name, p in model.named_parameters() if p.requires_grad})
    model.origin = trained
    return model.eval()
