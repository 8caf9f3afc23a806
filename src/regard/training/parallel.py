"""One process or many, as torchrun started them.

`ddp` keeps the whole model in every process and averages gradients. `fsdp` (FSDP2) shards weights, gradients and the
optimizer's state over the processes. `hsdp` shards them over the processes of each machine, and averages gradients
between machines: weights are gathered within a machine only.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.training.task import Batch, Task, Totals

Measure = Callable[[Any], dict[str, float]]
"""Results of a model: a task's `evaluate` or `test`."""
Strategy = Literal["ddp", "fsdp", "hsdp"]
STRATEGIES = get_args(Strategy)
_groups = count()


@dataclass(frozen=True)
class Place:
    """The rank of this process, the number of processes, and the device."""

    rank: int
    world: int
    device: torch.device
    strategy: Strategy = "ddp"
    machine: int = 1
    """How many of the processes are on this machine."""

    @property
    def sharded(self) -> bool:
        """Whether processes have parts of the model."""
        return self.strategy != "ddp"

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the process that writes files and prints."""
        return self.rank == 0

    def added(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.world > 1:
            dist.barrier()

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Let rank 0 run first and the others after it, so that they find the files it made."""
        if not self.first:
            self.wait()
        try:
            yield
        finally:
            if self.first:
                self.wait()


@contextmanager
def placed(device: str | None = None, strategy: str = "ddp") -> Iterator[Place]:
    """The place of this process: its rank under torchrun, or the only process. Processes that succeed leave together.

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
        if strategy != "ddp":
            raise ValueError(f"strategy: expected {strategy} only under torchrun, got a single process")
        yield Place(0, 1, where)
        return
    if where.type == "cuda":
        torch.cuda.set_device(where)
    world, machine = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if strategy == "hsdp" and (machine == world or world % machine):
        raise ValueError(
            "strategy: expected hsdp only with as many processes on each of several machines, "
            f"got {machine} of {world} here"
        )
    kinds = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    # A name of its own for every group of this process: what an earlier one has left in the store is not for this one.
    address, rank, world = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    named = dist.PrefixStore(str(next(_groups)), address)  # type: ignore[attr-defined]
    dist.init_process_group(kinds, store=named, rank=rank, world_size=world)
    place = Place(dist.get_rank(), dist.get_world_size(), where, strategy, machine)  # type: ignore[arg-type]
    try:
        yield place
        # Processes that succeed end together. Gloo's threads outlive the process group, because DDP keeps a reference
        # to it; a thread that is still releasing the last collective's tensors while Python exits aborts the process.
        # A process that failed does not wait: closing its connections ends the waiting of the others.
        place.wait()
    finally:
        dist.destroy_process_group()


def grouped() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def share() -> slice:
    """This process's share of a list that every process has; all of it without a process group.

    >>> from regard.training.parallel import share
    >>> ["a", "b", "c"][share()]
    ['a', 'b', 'c']
    """
    return slice(dist.get_rank(), None, dist.get_world_size()) if grouped() else slice(None)


class Objective(nn.Module):
    """A task's totals as a module's forward pass, which DDP and FSDP wrap; or a measure of the model: `evaluate`."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self.task = task.model, task

    def forward(self, batch: Batch | Measure) -> Totals | dict[str, float]:
        return batch(self.model) if callable(batch) else self.task.totals(self.model, batch)


def spread(objective: Objective, place: Place, precision: str = "float32") -> nn.Module:
    """The objective, wrapped for the place's strategy. With the precision bfloat16 the weights of sharded blocks are
    gathered in it, which takes half the traffic; gradients are added up in float32, and the residual stream stays so.
    """
    if place.world == 1:
        return objective
    if place.strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        devices: Any = [place.device.index] if place.device.type == "cuda" else None
        return DistributedDataParallel(objective, device_ids=devices, broadcast_buffers=False)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    sizes = {"machines": place.world // place.machine, "shards": place.machine}
    sizes = sizes if place.strategy == "hsdp" else {"shards": place.world}
    mesh = init_device_mesh(place.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    gathered = torch.bfloat16 if precision == "bfloat16" else None
    policy = MixedPrecisionPolicy(
        param_dtype=gathered, reduce_dtype=gathered and torch.float32, cast_forward_inputs=False
    )
    for block in getattr(objective.model, "sharded_blocks", ()):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(objective, mesh=mesh)
    return objective


@contextmanager
def resharded(runner: nn.Module) -> Iterator[None]:
    """Free the weights that FSDP has gathered, at the end: they are gathered again from weights that have changed."""
    from torch.distributed.fsdp import FSDPModule

    try:
        yield
    finally:
        if isinstance(runner, FSDPModule):
            runner.reshard()


@contextmanager
def unsynchronised(runner: nn.Module, last: bool) -> Iterator[None]:
    """Synchronise gradients between processes in the last micro-batch of a step only."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(runner, FSDPModule):
        runner.set_requires_gradient_sync(last)
    with runner.no_sync() if isinstance(runner, DistributedDataParallel) and not last else nullcontext():
        yield
