"""What is minimised: the loss of a model on a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import ClassHeadConfig, LMHeadConfig, MaskedLMHeadConfig
from clearhead.data import IGNORED
from clearhead.models.assemble import SequenceModel, make_context

from .loss import linear_cross_entropy


@dataclass(frozen=True)
class TrainBatch:
    """A batch on the device: what is read, what should come out, and which document each token is of."""

    inputs: Tensor
    targets: Int[Tensor, "..."]
    documents: Int[Tensor, "B T"] | None = None

    def part(self, rows: slice) -> TrainBatch:
        return TrainBatch(
            self.inputs[rows], self.targets[rows], None if self.documents is None else self.documents[rows]
        )


class Objective(nn.Module):
    """The mean loss over the targets that count; the vocabulary's logits are never all there at once."""

    def __init__(self, model: SequenceModel, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing
        self.head: Any = model.head  # registered under `model` too; parameters are counted once

    def forward(self, batch: TrainBatch) -> Float[Tensor, ""]:
        model = self.model
        length = model.config.embedding.positions(batch.inputs.shape[1])
        context = make_context(
            len(batch.inputs), length, batch.inputs.device, None, batch.documents, None, None, None, True
        )
        x = model.hidden(batch.inputs, context)
        smoothing = self.label_smoothing if self.training else 0.0
        kind = model.config.head
        if isinstance(kind, LMHeadConfig):
            weight = model.embedding.table if kind.tied else self.head.weight
            return linear_cross_entropy(
                x, weight, batch.targets, bias=self.head.bias, ignore_index=IGNORED, label_smoothing=smoothing
            )
        if isinstance(kind, MaskedLMHeadConfig):  # only the masked tokens need logits
            masked = batch.targets != IGNORED
            logits = self.head(x[masked][None], context, model.embedding.table)[0]
            return F.cross_entropy(logits, batch.targets[masked], label_smoothing=smoothing)
        if isinstance(kind, ClassHeadConfig):
            logits = self.head(x, context, None)
            return F.cross_entropy(logits, batch.targets, label_smoothing=smoothing)
        raise ValueError(f"a model with the head {kind and kind.kind()} has no loss to train on")


def first_trouble(objective: Objective, batch: TrainBatch) -> str:
    """Where a loss that is not finite begins: the first value, in the order of computation, that is not."""
    from clearhead.nn.tap import Taps

    taps = Taps(read=["*"])
    with torch.no_grad():
        objective.model(batch.inputs, documents=batch.documents, taps=taps)
    for path, value in taps.values.items():
        if not bool(value.isfinite().all()):
            return f"the first value that is not finite is {path}"
    weights = [name for name, p in objective.named_parameters() if not bool(p.isfinite().all())]
    return f"the weight {weights[0]} is not finite" if weights else "every value is finite in a second pass"
