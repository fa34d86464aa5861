"""The processes that train one model together: only this one, or those that `torchrun` started.

Parts of torch that only several processes need are imported when used, because importing them takes a second.
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

from clearhead.models.device import choose_device

T = TypeVar("T")


class FirstProcessFailed(ValueError):
    """Raised in the other processes if the first one, which reports the error, fails."""


@dataclass(frozen=True)
class World:
    """This process's rank among `size` processes.

    mesh     torch's DeviceMesh; None for a single process
    sharded  each process holds a part of the model (FSDP)
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    mesh: Any = None
    sharded: bool = False

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def sum(self, numbers: list[float]) -> list[float]:
        """Each number summed over the processes."""
        if self.size == 1:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64)
        total = total.to(self.device) if self.device.type == "cuda" else total
        dist.all_reduce(total)
        return total.tolist()

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            dist.barrier()

    def first_only(self, work: Callable[[], T]) -> T | None:
        """Do the work in the first process while the others wait. If it fails, all processes raise."""
        result: T | None = None
        problem: Exception | None = None
        if self.first:
            try:
                result = work()
            except Exception as error:
                problem = error
        (failed,) = self.sum([float(problem is not None)])
        if problem is not None:
            raise problem
        if failed:
            raise FirstProcessFailed("the first process could not start; its message says why")
        return result

    def first_then_others(self, work: Callable[[], T]) -> T:
        """Do the work in the first process, then in the others, which find its files ready."""
        result = self.first_only(work)
        return cast(T, result) if self.first else work()

    def wrap(self, objective: nn.Module, blocks: list[nn.Module]) -> nn.Module:
        """The objective wrapped for training by all processes: FSDP if sharded, else DDP."""
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            for block in blocks:
                fully_shard(block, mesh=self.mesh)
            return cast(nn.Module, fully_shard(objective, mesh=self.mesh))
        return DistributedDataParallel(objective) if self.size > 1 else objective

    def gradient_sync(self, objective: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Exchange gradients with the last part of a batch only."""
        if self.sharded:
            cast(Any, objective).set_requires_gradient_sync(last)
        return objective.no_sync() if isinstance(objective, DistributedDataParallel) and not last else nullcontext()


@contextmanager
def join_world(shard: bool = False, device: str = "auto") -> Iterator[World]:
    """Join the processes of `torchrun`, which sets RANK; without it, this process is alone."""
    place = choose_device(device)
    if "RANK" not in os.environ:
        if shard:
            raise ValueError(
                "--shard needs several processes; start them with: torchrun --nproc-per-node N -m clearhead train …"
            )
        yield World(place)
        return
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        size = dist.get_world_size()
        yield World(place, dist.get_rank(), size, init_device_mesh(place.type, (size,)), shard)
    finally:
        dist.destroy_process_group()


def is_sharded(tensor: Tensor) -> bool:
    """Whether each process holds only a part of the tensor (torch's DTensor)."""
    return hasattr(tensor, "device_mesh")


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a sharded tensor; any other tensor unchanged."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that this process holds; any other tensor unchanged."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def copy_full(tensor: Tensor, values: Tensor) -> None:
    """Copy full values into a tensor; if it is sharded, each process keeps its part."""
    if is_sharded(tensor):
        target: Any = tensor
        target.copy_(shard_tensor(values, target.device_mesh, target.placements))
    elif tensor is not values:
        tensor.copy_(values)


def shard_tensor(values: Tensor, mesh: Any, placements: Any = None) -> Tensor:
    """Shard values that every process holds in full; default: along the first axis."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    return DTensor.from_local(values, mesh, [Replicate()]).redistribute(placements=placements or [Shard(0)])


def gather_shards(part: Tensor, like: Tensor) -> Tensor:
    """The full tensor, if each process has computed the part that it holds of `like`."""
    from torch.distributed.tensor import DTensor

    if not is_sharded(like):
        return part
    target: Any = like
    parts = DTensor.from_local(part, target.device_mesh, target.placements, shape=like.shape, stride=like.stride())
    return parts.full_tensor()
