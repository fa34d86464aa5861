"""The loss of a model on a batch, as one module."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .task import Sums, Task, TrainBatch


class Objective(nn.Module):
    """Model and loss in one module, so that DDP, FSDP and torch.compile see the whole step."""

    def __init__(self, model: nn.Module, task: Task, label_smoothing: float = 0.0, precision: str = "float32") -> None:
        super().__init__()
        self.model, self.task = model, task
        self.label_smoothing, self.dtype = label_smoothing, getattr(torch, precision)

    def forward(self, batch: TrainBatch) -> tuple[Float[Tensor, ""], Sums]:
        smoothing = self.label_smoothing if self.training else 0.0
        lower = self.dtype != torch.float32
        with torch.autocast(batch.inputs.device.type, dtype=self.dtype if lower else None, enabled=lower):
            return self.task.loss(self.model, batch, smoothing)


def first_nonfinite(model: nn.Module, batch: TrainBatch) -> str | None:
    """The first value in the order of computation that is NaN or infinite, in words; None if there is none."""
    from clearhead.nn.tap import Taps

    weights = [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]
    taps = Taps(read=["*"])
    with torch.no_grad():
        batch.apply_model(model, taps=taps)
    place = next((path for path, value in taps.values.items() if not bool(value.isfinite().all())), None)
    if weights:
        return f"the weight {weights[0]} is not finite"
    return None if place is None else f"the first value that is not finite is {place}"
