"""The optimizers of a recipe, with their state by name, so that checkpoints need no pickle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.configs.train import AdamWConfig, MuonConfig, OptimizerConfig
from clearhead.optim import AdamW, Muon, Rows

Named = dict[str, nn.Parameter]


class NamedOptimizers:
    """Torch optimizers that step together. `step(factor)` multiplies every learning rate by `factor`."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> None:
        self.optimizers, self.names = list(optimizers), names
        for group in self.groups():
            group["initial_lr"] = group["lr"]

    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, factor: float = 1.0) -> None:
        for group in self.groups():
            group["lr"] = group["initial_lr"] * factor
        for optimizer in self.optimizers:
            optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """The state of every parameter, by the parameter's name."""
        return {
            f"{self.names[id(parameter)]}.{key}": value
            for optimizer in self.optimizers
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }


def make_optimizer(config: OptimizerConfig, model: nn.Module, mesh: Any = None) -> NamedOptimizers:
    """The optimizers that a recipe asks for: AdamW, or Muon for the matrices of blocks and AdamW for the rest."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = {id(parameter): name for name, parameter in named.items()}
    if isinstance(config, AdamWConfig):
        return NamedOptimizers([make_adamw(config, named)], names)
    blocks = {name: p for name, p in named.items() if ".blocks." in name and is_matrix(name, p)}
    rest = {name: p for name, p in named.items() if name not in blocks}
    found = [make_muon(config, blocks, fused_rows(model), mesh)] if blocks else []
    return NamedOptimizers([*found, *([make_adamw(config.rest, rest)] if rest else [])], names)


def make_adamw(config: AdamWConfig, named: Named) -> AdamW:
    """AdamW with a learning rate of its own for the embeddings and the head."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        decay = config.weight_decay if is_matrix(name, parameter) else 0.0
        groups.setdefault((learning_rate(config, name), decay), []).append(parameter)
    optimizer = AdamW(
        [{"params": params, "lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    for parameter in named.values():  # now, not at the first step: a checkpoint is read into these tensors
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def make_muon(config: MuonConfig, named: Named, fused: dict[str, Rows], mesh: Any) -> Muon:
    """Muon with a group for each way in which weights are fused."""
    groups: dict[Rows | None, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        groups.setdefault(fused.get(name), []).append(parameter)
    return Muon(
        [{"params": params, "rows": rows} for rows, params in groups.items()],
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        iterations=config.iterations,
        mesh=mesh,
    )


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether the parameter maps vectors to vectors; a state space's filters have two dimensions but do not."""
    return parameter.dim() > 1 and name.endswith("weight")


def learning_rate(config: AdamWConfig, name: str) -> float:
    if name.endswith("tokens.weight"):
        return config.embedding_lr or config.lr
    return (config.head_lr or config.lr) if name.startswith("head.") else config.lr


def fused_rows(model: nn.Module) -> dict[str, Rows]:
    """For each fused weight, the rows of each of its parts, as its module declares them."""
    named = ((path, getattr(module, "fused", {})) for path, module in model.named_modules())
    return {f"{path}.{name}.weight": rows for path, fused in named for name, rows in fused.items()}
