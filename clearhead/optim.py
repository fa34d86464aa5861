"""AdamW and Muon as torch optimizers.

    from clearhead.optim import AdamW, Muon

    muon = Muon(matrices, lr=0.02)                         # weight matrices
    adam = AdamW(others, lr=3e-3, weight_decay=0.1)        # embeddings, head, norms, biases
    for optimizer in (muon, adam):
        optimizer.step()
        optimizer.zero_grad()

Both have param groups, `zero_grad` and `state_dict`, so torch's learning-rate schedulers work with them.
`clearhead train` uses the same classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.training.distributed import copy_full, full_tensor, gather_shards, local_shard, shard_tensor

__all__ = ["AdamW", "Muon", "orthogonal"]

# Coefficients of an odd polynomial that moves singular values towards 1, a better one for each iteration
# (Amsel et al. 2025, "The Polar Express", table of the method for lower bound 1e-3, rounded to four places).
POLAR = (
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
)

Rows = tuple[int, ...]
Params = Iterable[Any]
"""Tensors, `(name, tensor)` pairs, or param groups, as torch.optim takes them."""


class AdamW(torch.optim.AdamW):
    """torch's AdamW (Loshchilov & Hutter 2019) that decays weights of two or more dimensions only.

    Norm gains and biases have one dimension, and decay only pulls them towards zero. A param group with its own
    `weight_decay` is used as it is.

    >>> layer = torch.nn.Linear(4, 4)
    >>> optimizer = AdamW(layer.parameters(), lr=0.01)
    >>> layer(torch.ones(4)).sum().backward()
    >>> optimizer.step()
    >>> [group["weight_decay"] for group in optimizer.param_groups]  # matrices, then biases
    [0.1, 0.0]
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        groups = [piece for group in as_groups(params) for piece in split_by_dimension(group)]
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


def as_groups(params: Params) -> list[dict[str, Any]]:
    """Param groups, whatever form the parameters came in."""
    found = list(params)
    return found if found and isinstance(found[0], dict) else [{"params": found}]


def split_by_dimension(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The group, and a second one without decay for what has one dimension."""
    if "weight_decay" in group:
        return [group]
    params = list(group["params"])
    flat = [p for p in params if (p[1] if isinstance(p, tuple) else p).dim() < 2]
    matrices = [p for p in params if (p[1] if isinstance(p, tuple) else p).dim() >= 2]
    pieces = [group | {"params": matrices}, group | {"params": flat, "weight_decay": 0.0}]
    return [piece for piece in pieces if piece["params"]]


@dataclass
class MatrixStack:
    """Matrices of one shape that are orthogonalized together, as `count × short × long`.

    places  for each matrix its parameter, its number within that parameter, and whether it is stored transposed here
    mine    the matrices that this process works on: all, or its share
    """

    places: list[tuple[Tensor, int, bool]]
    mine: slice


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal before each step (Jordan et al. 2024).

        M ← momentum·M + (1 − momentum)·G
        W ← W − lr·orthogonal(G + momentum·(M − G))·√max(1, rows/columns)

    Every parameter must be a matrix, or a stack of matrices with three dimensions (experts); use AdamW for the rest. If
    the group has `rows`, each parameter is several matrices below each other with that many rows, such as the query,
    key and value matrices of a fused projection.

    With a DeviceMesh in `mesh`, each process orthogonalizes its share of the matrices and keeps only their momentum.
    The momentum of a stack of matrices is in the state of the stack's first parameter.

    >>> layer = torch.nn.Linear(4, 4, bias=False)
    >>> optimizer = Muon(layer.parameters(), lr=0.02)
    >>> layer(torch.ones(4)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Params,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        iterations: int = 5,
        *,
        mesh: Any = None,
    ) -> None:
        if lr < 0 or not 0 <= momentum < 1 or not 1 <= iterations <= len(POLAR):
            raise ValueError(
                f"Muon got lr={lr}, momentum={momentum}, iterations={iterations}, but needs lr ≥ 0, 0 ≤ momentum < 1 "
                f"and iterations from 1 to {len(POLAR)}"
            )
        self.mesh = mesh
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "iterations": iterations,
            "rows": None,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            if parameter.dim() not in (2, 3):
                shape = tuple(parameter.shape)
                self.param_groups.pop()
                raise ValueError(f"Muon updates matrices, but got a parameter of shape {shape}; give it to AdamW")
        for stack in self.stacks(group):
            self.init_momentum(stack)

    def stacks(self, group: dict[str, Any]) -> list[MatrixStack]:
        """The group's matrices by shape, the short side first."""
        shapes: dict[tuple[int, int], list[tuple[Tensor, int, bool]]] = {}
        for parameter in group["params"]:
            for i, (rows, columns) in enumerate(matrix_shapes(parameter, group["rows"])):
                shapes.setdefault((min(rows, columns), max(rows, columns)), []).append((parameter, i, rows > columns))
        return [MatrixStack(places, self.share(len(places))) for places in shapes.values()]

    def share(self, count: int) -> slice:
        """The matrices of a stack that this process works on."""
        if self.mesh is None:
            return slice(0, count)
        each = -(-count // self.mesh.size())
        first = each * self.mesh.get_local_rank()
        return slice(min(first, count), min(first + each, count))

    def init_momentum(self, stack: MatrixStack) -> None:
        first, number, _ = stack.places[0]
        rows, columns = matrix_shapes(first, self.group_of(first)["rows"])[number]
        shape = (len(stack.places), *sorted((rows, columns)))
        momentum = torch.zeros(shape, dtype=first.dtype, device=first.device)
        self.state[first][momentum_key(shape)] = momentum if self.mesh is None else shard_tensor(momentum, self.mesh)

    def group_of(self, parameter: Tensor) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(p is parameter for p in group["params"]))

    def momentum(self, stack: MatrixStack, shape: tuple[int, ...]) -> Tensor:
        return self.state[stack.places[0][0]][momentum_key((len(stack.places), *shape))]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for stack in self.stacks(group):
                self.step_stack(stack, group)
        return loss

    def step_stack(self, stack: MatrixStack, group: dict[str, Any]) -> None:
        """Update the matrices of one shape."""
        parameters = list({id(p): p for p, _, _ in stack.places}.values())
        gradients = {id(p): matrices(full_tensor(gradient_of(p)), group["rows"]) for p in parameters}
        mine = [short_side_first(gradients[id(p)][i], tall) for p, i, tall in stack.places[stack.mine]]
        one = stack.places[0]
        shape = short_side_first(gradients[id(one[0])][one[1]], one[2]).shape
        held = self.momentum(stack, tuple(shape))
        momentum = local_shard(held)
        gradient = torch.stack(mine) if mine else torch.empty_like(momentum)
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = orthogonal(gradient.lerp_(momentum, group["momentum"]), group["iterations"])
        update = gather_shards(update, held)
        short, long = update.shape[-2:]
        weights = {id(p): full_tensor(p) for p in parameters}
        parts = {key: matrices(weight, group["rows"]) for key, weight in weights.items()}
        lr = group["lr"]
        for direction, (parameter, i, tall) in zip(update, stack.places, strict=True):
            matrix = short_side_first(parts[id(parameter)][i], tall)
            matrix.mul_(1 - lr * group["weight_decay"])
            matrix.add_(direction, alpha=-lr * (long / short) ** 0.5 if tall else -lr)
        for parameter in parameters:
            copy_full(parameter, weights[id(parameter)])


def momentum_key(shape: tuple[int, ...]) -> str:
    return f"momentum {'x'.join(map(str, shape))}"


def gradient_of(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def short_side_first(matrix: Tensor, tall: bool) -> Tensor:
    """The matrix, transposed if it is tall."""
    return matrix.T if tall else matrix


def matrix_shapes(weight: Tensor, rows: Rows | None = None) -> list[tuple[int, int]]:
    """The shapes of `matrices(weight, rows)`; the weight may be sharded."""
    if weight.dim() == 3:
        return [(weight.shape[1], weight.shape[2])] * weight.shape[0]
    return [(part, weight.shape[1]) for part in rows or (weight.shape[0],)]


def matrices(weight: Tensor, rows: Rows | None = None) -> list[Tensor]:
    """The matrices of a weight: experts along the first axis, or parts with the given rows below each other."""
    if weight.dim() == 3:
        return list(weight)
    return list(weight.split(rows or (len(weight),)))


def orthogonal(x: Tensor, iterations: int = 5) -> Tensor:
    """About UVᵀ for each matrix UΣVᵀ of a stack: all singular values move towards 1.

    Each iteration computes X ← aX + (b·XXᵀ + c·(XXᵀ)²)X.

    >>> values = torch.linalg.svdvals(orthogonal(torch.diag(torch.tensor([3.0, 0.1]))[None]))
    >>> bool((values > 0.8).all() and (values < 1.2).all())
    True
    """
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for a, b, c in POLAR[:iterations]:
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x
