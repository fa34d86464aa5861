"""AdamW and Muon over named parameters. What they remember is named too, so that it can be saved without pickle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.configs.train import AdamWConfig, MuonConfig, OptimizerConfig

from .distributed import gathered, local, put, spread, whole

# Coefficients of an odd polynomial that takes singular values towards 1, a better one for each iteration
# (Amsel et al. 2025, "The Polar Express", table of the method for lower bound 1e-3, rounded to four places).
POLAR = (
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
)

Rows = tuple[int, ...]


class AdamW:
    """torch's fused AdamW in groups: tables, head, other matrices, and what has one dimension."""

    def __init__(self, config: AdamWConfig, named: dict[str, nn.Parameter]) -> None:
        self.named = named
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in named.items():
            decay = config.weight_decay if is_matrix(name, parameter) else 0.0
            groups.setdefault((learning_rate(config, name), decay), []).append(parameter)
        self.rates = [lr for lr, _ in groups]
        self.inner = torch.optim.AdamW(
            [{"params": ps, "lr": lr, "weight_decay": decay} for (lr, decay), ps in groups.items()],
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for parameter in named.values():
            self.inner.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }

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


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether it takes vectors to vectors; a state space's filters and decays have two dimensions and do not."""
    return parameter.dim() > 1 and name.endswith("weight")


def learning_rate(config: AdamWConfig, name: str) -> float:
    if name.endswith("tokens.weight"):
        return config.embedding_lr or config.lr
    return (config.head_lr or config.lr) if name.startswith("head.") else config.lr


@dataclass
class Matrices:
    """Matrices of one shape, worked on together: `width × length` with the short side first.

    places    parameter, which of its matrices, and whether it is tall and lies on its side here
    mine      those that this process works on: all, or its share
    momentum  of mine
    """

    places: list[tuple[str, int, bool]]
    mine: slice
    momentum: Tensor


class Muon:
    """Every matrix of a block moves by an orthogonal one; tables, heads, norms and biases by AdamW.

    The query, key and value parts of a fused projection are matrices of their own, and so is each expert; `fused` has
    the rows of each part, by name. Of several processes each works on some of the matrices, remembers their momentum,
    and tells the others where they go.
    """

    def __init__(
        self, config: MuonConfig, named: dict[str, nn.Parameter], fused: dict[str, Rows], mesh: Any = None
    ) -> None:
        self.config, self.fused = config, fused
        self.matrices = {name: p for name, p in named.items() if ".blocks." in name and is_matrix(name, p)}
        self.rest = AdamW(config.rest, {name: p for name, p in named.items() if name not in self.matrices})
        shapes: dict[tuple[int, int], list[tuple[str, int, bool]]] = {}
        for name, parameter in self.matrices.items():
            for i, (rows, columns) in enumerate(part_shapes(parameter, fused.get(name))):
                shapes.setdefault((min(rows, columns), max(rows, columns)), []).append((name, i, rows > columns))
        self.groups = []
        for shape, places in shapes.items():
            like = self.matrices[places[0][0]]
            momentum = torch.zeros(len(places), *shape, dtype=like.dtype, device=like.device)
            mine = slice(0, len(places))
            if mesh is not None:
                momentum = spread(momentum, mesh)
                each = -(-len(places) // mesh.size())
                mine = slice(each * mesh.get_local_rank(), each * mesh.get_local_rank() + len(local(momentum)))
            self.groups.append(Matrices(places, mine, momentum))

    @torch.no_grad()
    def step(self, factor: float) -> None:
        for group in self.groups:
            self.move(group, self.config.lr * factor)
        self.rest.step(factor)

    def move(self, group: Matrices, lr: float) -> None:
        config = self.config
        names = dict.fromkeys(name for name, _, _ in group.places)
        gradients = {name: parts(whole(gradient_of(self.matrices[name])), self.fused.get(name)) for name in names}
        wanted = [turned(gradients[name][i], tall) for name, i, tall in group.places[group.mine]]
        momentum = local(group.momentum)
        gradient = torch.stack(wanted) if wanted else torch.empty_like(momentum)
        momentum.lerp_(gradient, 1 - config.momentum)
        update = orthogonal(gradient.lerp_(momentum, config.momentum), config.iterations)
        update = gathered(update, group.momentum)
        short, long = update.shape[-2:]
        weights = {name: whole(self.matrices[name]) for name in names}
        matrices = {name: parts(weight, self.fused.get(name)) for name, weight in weights.items()}
        for direction, (name, i, tall) in zip(update, group.places, strict=True):
            matrix = turned(matrices[name][i], tall)
            matrix.mul_(1 - lr * config.weight_decay)
            matrix.add_(direction, alpha=-lr * (long / short) ** 0.5 if tall else -lr)
        for name, weight in weights.items():
            put(self.matrices[name], weight)

    def state(self) -> dict[str, Tensor]:
        momenta = {f"muon.{i}.momentum": group.momentum for i, group in enumerate(self.groups)}
        return momenta | self.rest.state()


def gradient_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def turned(matrix: Tensor, tall: bool) -> Tensor:
    """The short side first."""
    return matrix.T if tall else matrix


def fused_rows(model: nn.Module) -> dict[str, Rows]:
    """By a weight's name, how many of its rows each of its parts has, as the modules say themselves."""
    named = ((path, getattr(module, "fused", {})) for path, module in model.named_modules())
    return {f"{path}.{name}.weight": rows for path, fused in named for name, rows in fused.items()}


def part_shapes(weight: Tensor, fused: Rows | None = None) -> list[tuple[int, int]]:
    """The shapes of `parts`, of a weight that may be spread over processes."""
    if weight.dim() == 3:
        return [(weight.shape[1], weight.shape[2])] * weight.shape[0]
    rows, columns = weight.shape
    return [(part, columns) for part in fused or (rows,)]


def parts(weight: Tensor, fused: Rows | None = None) -> list[Tensor]:
    """The matrices of a weight: experts along a first axis; or those that lie under each other, of so many rows."""
    if weight.dim() == 3:
        return list(weight)
    return list(weight.split(fused or (len(weight),)))


def orthogonal(x: Tensor, iterations: int) -> Tensor:
    """For each matrix UΣVᵀ of a stack, about UVᵀ: its singular values all taken towards 1."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for a, b, c in POLAR[:iterations]:
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


Optimizer = AdamW | Muon
"""`step(factor)` is one update, every learning rate times `factor`; `state()` is what it remembers, by name."""


def make_optimizer(config: OptimizerConfig, model: nn.Module, mesh: Any = None) -> Optimizer:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return AdamW(config, named) if isinstance(config, AdamWConfig) else Muon(config, named, fused_rows(model), mesh)
