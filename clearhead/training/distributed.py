"""The processes that train one model together: none but this one, or those that `torchrun` started.

What only several processes need of torch is imported where it is needed: it takes a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


class FirstFailed(ValueError):
    """What the others hear of, where the first process has said what is wrong."""


@dataclass(frozen=True)
class World:
    """Which of how many processes this is. `mesh` is None for one alone; `sharded`: each holds a part of the model."""

    device: torch.device
    rank: int = 0
    size: int = 1
    mesh: Any = None  # DeviceMesh
    sharded: bool = False

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def sum(self, numbers: list[float]) -> list[float]:
        """Each number added up over the processes."""
        if self.size == 1:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64)
        total = total.to(self.device) if self.device.type == "cuda" else total
        dist.all_reduce(total)
        return total.tolist()

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def first_alone(self, work: Callable[[], T]) -> T | None:
        """The first process works while the others wait. Where it cannot, the others are told, and fail too."""
        result: T | None = None
        trouble: Exception | None = None
        if self.first:
            try:
                result = work()
            except Exception as error:
                trouble = error
        (failed,) = self.sum([float(trouble is not None)])
        if trouble is not None:
            raise trouble
        if failed:
            raise FirstFailed("the first process could not begin, and says why")
        return result

    def first_does(self, work: Callable[[], T]) -> T:
        """The first process works while the others wait; they then do the same and find it done."""
        result = self.first_alone(work)
        return cast(T, result) if self.first else work()

    def share(self, objective: nn.Module, blocks: list[nn.Module]) -> nn.Module:
        """The objective, trained by all: each holds all of it, or a part of every block."""
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            for block in blocks:
                fully_shard(block, mesh=self.mesh)
            return cast(nn.Module, fully_shard(objective, mesh=self.mesh))
        return DistributedDataParallel(objective) if self.size > 1 else objective

    def adding_up(self, objective: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Gradients travel with the last part of a batch only."""
        if self.sharded:
            cast(Any, objective).set_requires_gradient_sync(last)
        return objective.no_sync() if isinstance(objective, DistributedDataParallel) and not last else nullcontext()


@contextmanager
def world(shard: bool = False) -> Iterator[World]:
    """The processes of `torchrun`, which says so in the environment, or this one alone."""
    device = accelerator()
    if "RANK" not in os.environ:
        if shard:
            raise ValueError("a single process has nobody to share the model with; start it by torchrun")
        yield World(device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        size = dist.get_world_size()
        yield World(device, dist.get_rank(), size, init_device_mesh(device.type, (size,)), shard)
    finally:
        dist.destroy_process_group()


def accelerator() -> torch.device:
    """A GPU where there is one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else found


def in_parts(tensor: Tensor) -> bool:
    """Whether each process holds a part of it only: torch's DTensor."""
    return hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that is held in parts; any other as it is."""
    return cast(Any, tensor).full_tensor() if in_parts(tensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """What this process holds of it."""
    return cast(Any, tensor).to_local() if in_parts(tensor) else tensor


def put(tensor: Tensor, values: Tensor) -> None:
    """Write the whole values into a tensor, of which each process keeps its part."""
    if in_parts(tensor):
        held: Any = tensor
        held.copy_(spread(values, held.device_mesh, held.placements))
    elif tensor is not values:
        tensor.copy_(values)


def spread(values: Tensor, mesh: Any, placements: Any = None) -> Tensor:
    """Each process keeps its part of values that all of them hold: of the first axis, unless said otherwise."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    return DTensor.from_local(values, mesh, [Replicate()]).redistribute(placements=placements or [Shard(0)])


def gathered(part: Tensor, like: Tensor) -> Tensor:
    """The whole tensor, of which each process has worked out the part that it holds of `like`."""
    from torch.distributed.tensor import DTensor

    if not in_parts(like):
        return part
    held: Any = like
    parts = DTensor.from_local(part, held.device_mesh, held.placements, shape=like.shape, stride=like.stride())
    return parts.full_tensor()
