"""AdamW and Muon over named parameters. What they remember is named too, so that it can be saved without pickle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.configs.train import AdamWConfig, MuonConfig, OptimizerConfig

# Coefficients of an odd polynomial that takes singular values towards 1, a better one for each iteration
# (Amsel et al. 2025, "The Polar Express", table of the method for lower bound 1e-3, rounded to four places).
POLAR = (
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
)


class AdamW:
    """torch's fused AdamW in groups: tables, head, other matrices, and what has one dimension."""

    def __init__(self, config: AdamWConfig, named: dict[str, nn.Parameter]) -> None:
        self.named = named
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in named.items():
            decay = config.weight_decay if parameter.dim() > 1 else 0.0
            groups.setdefault((learning_rate(config, name), decay), []).append(parameter)
        self.rates = [lr for lr, _ in groups]
        self.inner = torch.optim.AdamW(
            [{"params": ps, "lr": lr, "weight_decay": decay} for (lr, decay), ps in groups.items()],
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def step(self, factor: float) -> None:
        for group, rate in zip(self.inner.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.inner.step()

    def state(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value
            for name, parameter in self.named.items()
            for key, value in self.inner.state[parameter].items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.named.items():
            keys = ("step", "exp_avg", "exp_avg_sq")
            self.inner.state[parameter] = {key: state[f"{name}.{key}"].clone() for key in keys}


def learning_rate(config: AdamWConfig, name: str) -> float:
    if name.endswith("tokens.weight"):
        return config.embedding_lr or config.lr
    return (config.head_lr or config.lr) if name.startswith("head.") else config.lr


@dataclass
class Matrices:
    """Matrices of one shape, worked on together: `width × length` with the short side first."""

    places: list[
        tuple[str, int, bool]
    ]  # parameter, which of its matrices, whether it is tall and lies on its side here
    gradient: Tensor
    momentum: Tensor


class Muon:
    """Every matrix of a block moves by an orthogonal one; tables, heads, norms and biases by AdamW.

    The query, key and value parts of a fused projection are matrices of their own, and so is each expert.
    """

    def __init__(self, config: MuonConfig, named: dict[str, nn.Parameter]) -> None:
        self.config = config
        self.matrices = {name: p for name, p in named.items() if ".blocks." in name and p.dim() > 1}
        self.rest = AdamW(config.rest, {name: p for name, p in named.items() if name not in self.matrices})
        shapes: dict[tuple[int, int], list[tuple[str, int, bool]]] = {}
        for name, parameter in self.matrices.items():
            for i, matrix in enumerate(parts(parameter)):
                rows, columns = matrix.shape
                shapes.setdefault((min(rows, columns), max(rows, columns)), []).append((name, i, rows > columns))
        like = next(iter(self.matrices.values()))
        self.groups = [
            Matrices(places, *(like.new_zeros(len(places), *shape) for _ in range(2)))
            for shape, places in shapes.items()
        ]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        config = self.config
        lr = config.lr * factor
        for group in self.groups:
            for gradient, matrix in zip(group.gradient, self.each(group, gradients=True), strict=True):
                gradient.copy_(matrix)
            group.momentum.lerp_(group.gradient, 1 - config.momentum)
            update = orthogonal(torch.lerp(group.gradient, group.momentum, config.momentum), config.iterations)
            short, long = update.shape[-2:]
            for direction, matrix, (*_, tall) in zip(update, self.each(group), group.places, strict=True):
                matrix.mul_(1 - lr * config.weight_decay)
                matrix.add_(direction, alpha=-lr * (long / short) ** 0.5 if tall else -lr)
        self.rest.step(factor)

    def each(self, group: Matrices, gradients: bool = False) -> Iterable[Tensor]:
        """Views of a group's matrices, or of their gradients, short side first."""
        for name, i, tall in group.places:
            parameter = self.matrices[name]
            matrix = parts(parameter.grad if gradients and parameter.grad is not None else parameter)[i]
            yield matrix.T if tall else matrix

    def state(self) -> dict[str, Tensor]:
        momenta = {f"muon.{i}.momentum": group.momentum for i, group in enumerate(self.groups)}
        return momenta | self.rest.state()

    def load(self, state: dict[str, Tensor]) -> None:
        for i, group in enumerate(self.groups):
            group.momentum.copy_(state[f"muon.{i}.momentum"])
        self.rest.load(state)


def parts(weight: Tensor) -> list[Tensor]:
    """The matrices of a weight: experts along a first axis; query, key and value rows where there are three alike."""
    if weight.dim() == 3:
        return list(weight)
    rows, columns = weight.shape
    return list(weight.unflatten(0, (3, columns))) if rows == 3 * columns else [weight]


def orthogonal(x: Tensor, iterations: int) -> Tensor:
    """For each matrix UΣVᵀ of a stack, about UVᵀ: its singular values all taken towards 1."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for a, b, c in POLAR[:iterations]:
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


Optimizer = AdamW | Muon
"""`step(factor)` is one update, every learning rate times `factor`; `state()` is what it remembers, by name."""


def make_optimizer(config: OptimizerConfig, model: nn.Module) -> Optimizer:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return AdamW(config, named) if isinstance(config, AdamWConfig) else Muon(config, named)
