"""A mixer of your own in attention's place: the mean of all tokens so far, in one file.

    python examples/custom_mixer.py

A mixer is a config (frozen data, no torch) and a module with `forward` and `init_state`. Inside the package these are
separate files, with a NumPy twin; CONTRIBUTING.md lists them. Outside it, one file is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead
from clearhead.configs import (
    BlockConfig,
    Causal,
    GatedFeedForwardConfig,
    LMHeadConfig,
    Mask,
    MixerConfig,
    RMSNormConfig,
    Scope,
    SequenceModelConfig,
    StackConfig,
    Step,
    TokenEmbeddingConfig,
)
from clearhead.nn.build import builds
from clearhead.nn.cache import StateAllocator
from clearhead.nn.context import Context


@dataclass(frozen=True, kw_only=True)
class RunningMeanConfig(MixerConfig):
    """y_t = out(mean of value(x_0) … value(x_t)): every earlier token counts the same."""

    @property
    def mask(self) -> Mask:
        return Causal()

    def steps(self, scope: Scope) -> Iterator[Step]:
        flops = 2 * scope["B"] * scope["T"] * scope["D"] ** 2
        for name, formula in (("value", "X·W_V"), ("out", "mean so far·W_O")):
            weights = {f"{name}.weight": scope.shape("D D")}
            yield scope.step(name, formula, "B T D", weights=weights, flops=flops, order="n·d²")

    def state(self, scope: Scope) -> dict[str, tuple[int, ...]]:
        return {"total": scope.shape("B D")}


@dataclass
class RunningMeanState:
    """The sum of all values so far, and how many there were."""

    total: Tensor
    count: int = 0
    can_rewind: ClassVar[bool] = False

    def select(self, rows: Tensor) -> None:
        self.total = self.total[rows]


@builds(RunningMeanConfig)
class RunningMean(nn.Module):
    def __init__(self, config: RunningMeanConfig, dim: int) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def init_state(self, allocator: StateAllocator) -> RunningMeanState:
        return RunningMeanState(allocator.zeros(self.value.in_features))

    def forward(self, x: Tensor, context: Context, state: RunningMeanState | None = None) -> Tensor:
        totals = context.tap("value", self.value(x)).cumsum(dim=1)
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        if state is not None:
            totals, counts = totals + state.total[:, None], counts + state.count
            state.total, state.count = totals[:, -1], state.count + x.shape[1]
        return context.tap("out", self.out(totals / counts))


def main(steps: int = 100) -> float:
    torch.manual_seed(0)
    block = BlockConfig(mixer=RunningMeanConfig(), ffn=GatedFeedForwardConfig(hidden=64), norm=RMSNormConfig())
    config = SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=10),
        stack=StackConfig(dim=32, pattern=(block,), repeats=2, final_norm=RMSNormConfig()),
        head=LMHeadConfig(vocabulary=10),
    )
    print(clearhead.trace(config, batch=1, length=8))
    model = clearhead.build(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):  # rows that count upward: 3 4 5 6 …
        rows = (torch.randint(0, 10, (32, 1)) + torch.arange(9)) % 10
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f} after {steps} steps; 3 4 5 is continued with", end=" ")
    print(*model.eval().generate([[3, 4, 5]], max_new_tokens=4)[0].tokens)
    return loss.item()


if __name__ == "__main__":
    main()
