"""The training loop of experiments: the package's optimizers and schedules, with batches made on the fly."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from clearhead.configs.train import AdamWConfig, CosineConfig, ScheduleConfig
from clearhead.training.optimizer import NamedOptimizers, make_optimizer


def train_steps(
    model: nn.Module,
    batch_loss: Callable[[], Tensor],
    *,
    steps: int,
    lr: float = 1e-3,
    schedule: ScheduleConfig | None = None,
    optimizer: NamedOptimizers | None = None,
    clip: float | None = 1.0,
) -> Iterator[tuple[int, float]]:
    """Yield (step, loss before the update) after each of `steps` updates. Gradients remain until the next step.

    schedule  default: warm-up over a tenth of the steps, then cosine decay
    """
    optimizer = optimizer or make_optimizer(AdamWConfig(lr=lr, weight_decay=0.0), model)
    schedule = schedule or CosineConfig(warmup=max(steps // 10, 1), floor=0.05)
    for step in range(1, steps + 1):
        model.zero_grad(set_to_none=True)
        loss = batch_loss()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], clip)
        optimizer.step(schedule.factor(step, steps))
        yield step, loss.item()


def record_steps(steps: int, count: int) -> set[int]:
    """About `count` logarithmically spaced steps, including the last."""
    grid = torch.logspace(0, torch.log10(torch.tensor(float(steps))), count).round().int().tolist()
    return {*grid, steps}
