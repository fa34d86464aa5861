"""What is minimised: the loss of a model on a batch."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .task import Sums, Task, TrainBatch


class Objective(nn.Module):
    """Model and loss as one module, so that whatever wraps it (several processes, a compiler) sees all of a step."""

    def __init__(self, model: nn.Module, task: Task, label_smoothing: float = 0.0, precision: str = "float32") -> None:
        super().__init__()
        self.model, self.task = model, task
        self.label_smoothing, self.dtype = label_smoothing, getattr(torch, precision)

    def forward(self, batch: TrainBatch) -> tuple[Float[Tensor, ""], Sums]:
        smoothing = self.label_smoothing if self.training else 0.0
        lower = self.dtype != torch.float32
        with torch.autocast(batch.inputs.device.type, dtype=self.dtype if lower else None, enabled=lower):
            return self.task.loss(self.model, batch, smoothing)


def first_trouble(model: nn.Module, batch: TrainBatch) -> str | None:
    """Where a loss that is not finite begins: the first value, in the order of computation, that is not."""
    from clearhead.nn.tap import Taps

    taps = Taps(read=["*"])
    with torch.no_grad():
        batch.read_by(model, taps=taps)
    for path, value in taps.values.items():
        if not bool(value.isfinite().all()):
            return f"the first value that is not finite is {path}"
    weights = [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]
    return f"the weight {weights[0]} is not finite" if weights else None
