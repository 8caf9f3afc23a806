"""One process or many: torchrun says how many there are, torch does the rest.

`ddp` keeps the whole model in every process and averages gradients. `fsdp` (FSDP2) shards weights, gradients and the
optimizer's memory over the processes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.training.task import Batch, Task, Totals

STRATEGIES = ("ddp", "fsdp")


@dataclass(frozen=True)
class Place:
    """Which process this is, and what it computes on."""

    rank: int
    world: int
    device: torch.device
    strategy: Literal["ddp", "fsdp"] = "ddp"

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def added(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Until every process is here."""
        if self.world > 1:
            dist.barrier()

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """What the first process does before the others do it, so that they find what it made."""
        if not self.first:
            self.wait()
        try:
            yield
        finally:
            if self.first:
                self.wait()


@contextmanager
def placed(device: str | None = None, strategy: str = "ddp") -> Iterator[Place]:
    """Where to train: under torchrun one place a process, else the only one.

    >>> from regard.training.parallel import placed
    >>> with placed("cpu") as place:
    ...     place.rank, place.world
    (0, 1)
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    local = int(os.environ.get("LOCAL_RANK", 0))
    try:
        where = torch.device("cuda", local) if kind == "cuda" else torch.device(kind)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device: expected one that is here, got {kind!r}: {str(error).splitlines()[0]:.100}"
        ) from None
    if "RANK" not in os.environ:
        if strategy == "fsdp":
            raise ValueError("strategy: expected fsdp under torchrun alone, got a single process")
        yield Place(0, 1, where)
        return
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group("cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo")
    try:
        yield Place(dist.get_rank(), dist.get_world_size(), where, strategy)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


class Objective(nn.Module):
    """A task's totals as a module, so that DDP and FSDP see one forward pass; without a batch, its evaluation."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self.task = task.model, task

    def forward(self, batch: Batch | None) -> Totals | dict[str, float]:
        return self.task.evaluate(self.model) if batch is None else self.task.totals(self.model, batch)


def spread(objective: Objective, place: Place) -> nn.Module:
    """The objective as the place's strategy runs it."""
    if place.world == 1:
        return objective
    if place.strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        devices: Any = [place.device.index] if place.device.type == "cuda" else None
        return DistributedDataParallel(objective, device_ids=devices, broadcast_buffers=False)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(place.device.type, (place.world,))
    for block in objective.model.sharded_blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


@contextmanager
def unsynchronised(runner: nn.Module, last: bool) -> Iterator[None]:
    """Gradients of all pieces of a step but the last stay where they are."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(runner, FSDPModule):
        runner.set_requires_gradient_sync(last)
    with runner.no_sync() if isinstance(runner, DistributedDataParallel) and not last else nullcontext():
        yield
