"""Watch a model learn: small pictures of its heads on one text, and the gradient of each block, every few steps.

A probe reads the weights after a step and writes a file. It draws no random numbers and changes no weight. A run with a
probe ends with the same weights, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clearhead.files import stage_file
from clearhead.models.model import Model
from clearhead.tokenize import Tokenizer

from .model import list_blocks
from .task import Task

TOKENS = 32  # of the text that is looked at
FOLDER = "probes"


class TrainingProbe:
    """Write `probes/step-N.npz` every `every` steps."""

    def __init__(self, folder: Path, every: int, ids: Sequence[int], tokenizer: Tokenizer | None = None) -> None:
        if every < 1:
            raise ValueError(f"a probe comes every {every} steps, but must come every 1 or more")
        self.folder, self.every, self.ids, self.tokenizer = folder / FOLDER, every, list(ids)[:TOKENS], tokenizer

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def gradient_norms(self, model: Model) -> dict[str, float]:
        """The norm of the gradient of each block, of the embedding and of the head; call it before `zero_grad`."""
        parts: dict[str, Any] = {f"block {n}": block for n, block in enumerate(list_blocks(model))}
        parts = {"embedding": getattr(model, "embedding", None), **parts, "head": getattr(model, "head", None)}
        found = {}
        for name, part in parts.items():
            gradients = [p.grad for p in part.parameters() if p.grad is not None] if part is not None else []
            if gradients:
                found[name] = float(torch.nn.utils.get_total_norm(gradients))
        return found

    @torch.no_grad()
    def write(self, model: Model, step: int, gradients: dict[str, float]) -> Path:
        """Record the heads of the text. The model's mode is put back as it was."""
        training = model.training
        model.eval()
        try:
            maps = model.inspect(self.ids, tokenizer=self.tokenizer).maps
        finally:
            model.train(training)
        arrays: dict[str, np.ndarray] = {}
        described: list[dict[str, Any]] = []
        for n, each in enumerate(maps):
            arrays[f"map{n}"] = each.thumbnails
            heads = [
                {"head": one.head, "tag": one.tag, "entropy": one.entropy, "distance": one.distance}
                for one in each.head_summaries
            ]
            described.append({"place": each.place, "layer": each.layer, "signed": not each.normalized, "heads": heads})
        text = "" if self.tokenizer is None else self.tokenizer.decode(self.ids)
        facts = {"step": step, "ids": self.ids, "text": text, "maps": described, "gradients": gradients}
        arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        path = self.folder / f"step-{step:08d}.npz"
        self.folder.mkdir(parents=True, exist_ok=True)
        with stage_file(path) as part, part.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        return path


def make_probe(folder: Path, every: int, text: str, task: Task) -> TrainingProbe | None:
    """The probe of a run on texts, or None if it asked for none. Without a text, it reads the held-out data's start."""
    tokenizer: Tokenizer | None = getattr(task, "tokenizer", None)
    if not every or tokenizer is None:
        return None
    if text:
        ids = tokenizer.encode(text)
        if not ids:
            raise ValueError(f"the probe text {text!r} has no tokens")
    else:
        ids = next(iter(task.validation())).inputs[0].tolist()
    return TrainingProbe(folder, every, ids[: task.length or TOKENS], tokenizer)


def read_probe(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The facts of a frame, and the small pictures of each layer's heads."""
    with np.load(path, allow_pickle=False) as file:
        facts = json.loads(bytes(file["facts"]))
        return facts, [file[f"map{n}"] for n in range(len(facts["maps"]))]


def list_probes(folder: Path) -> dict[int, Path]:
    """Step -> file, in order."""
    found = sorted((folder / FOLDER).glob("step-*.npz"))
    return {int(path.stem.removeprefix("step-")): path for path in found}
