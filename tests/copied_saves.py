"""What runs on the ranks for :mod:`tests.test_copied_saves`: jobs on "machines" with a folder each."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import shardgraph
from shardgraph.errors import CheckpointError
from shardgraph.saves import copying
from tests.killed_saves import Points

VALUES = 26  # of each kind: no multiple of the number of ranks


class Net(nn.Module):
    """Weights in shards and weights that all ranks have, whose values say of which step they are."""

    def __init__(self, value: float) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        counted = torch.arange(2.0 * VALUES).reshape(VALUES, 2) + value
        self.shards = nn.Parameter(distribute_tensor(counted, mesh, [Shard(0)]))
        self.replicas = nn.Parameter(counted.clone())

    def whole(self) -> list[list[float]]:
        """Its values on one device."""
        return [self.shards.full_tensor().flatten().tolist(), self.replicas.flatten().tolist()]


def job_at(value: float) -> tuple[Net, torch.optim.Optimizer]:
    """A model and an optimizer with state, of a step."""
    model = Net(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = parameter.detach() + 0.5
    return model, optimizer


def folder_of(base: str, machine: int) -> str:
    return f"{base}/machine{machine}"


def saved(
    base: str,
    machines: Sequence[int],
    steps: Sequence[int],
    options: dict[str, Any] | None = None,
    wait: bool = True,
) -> None:
    """Save ``steps``, where the rank r is on ``machines[r]``."""
    own = folder_of(base, machines[rank := dist.get_rank()])
    for step in steps:
        given = {"copies": 2, "extra": {"rank": rank, "step": step}, **(options or {})}
        shardgraph.save_checkpoint(own, step, *job_at(step), **given)
    if wait:
        shardgraph.wait_for_saves()


def loaded(base: str, machines: Sequence[int], more: Sequence[str] = (), **options: Any) -> tuple[Any, ...]:
    """The step that is loaded, whether all values are of this step, and ``extras``; or the error, and whether values
    are as they were. Warnings last."""
    model, optimizer = job_at(-1)
    folders = [folder_of(base, machines[dist.get_rank()]), *more]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = shardgraph.load_checkpoint(folders, model, optimizer, **options)
            step, extras = found.step, found.extras
        except CheckpointError as error:
            step, extras = str(error), []
    expected = job_at(step if isinstance(step, int) and extras else -1)
    states = [optimizer.state[each]["momentum_buffer"] for each in model.parameters()]
    states_expected = [expected[1].state[each]["momentum_buffer"] for each in expected[0].parameters()]
    same = model.whole() == expected[0].whole() and all(
        torch.equal(one.full_tensor() if i == 0 else one, other.full_tensor() if i == 0 else other)
        for i, (one, other) in enumerate(zip(states, states_expected, strict=True))
    )
    return step, same, extras, [str(each.message) for each in warned]


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def one_machine_is_full(base: str) -> tuple[str, list[str], Any]:
    """What is told, what is left, and what loads, when the machine of rank 1 has no room for the copy of another."""
    saved(base, range(dist.get_world_size()), [1])
    rank, before = dist.get_rank(), copying.new_file

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == 1:
        copying.new_file = full
    try:
        told = refused(lambda: saved(base, range(dist.get_world_size()), [2]))
    finally:
        copying.new_file = before
    left = sorted(each.name for each in Path(folder_of(base, rank)).iterdir())
    return told, left, loaded(base, range(dist.get_world_size()))[0]


def different_arguments(base: str) -> tuple[str, str]:
    """What is told where ranks do not give the same ``copies``, and where folders are not shared and there is one."""
    own = folder_of(base, rank := dist.get_rank())
    differ = refused(lambda: shardgraph.save_checkpoint(own, 1, nn.Linear(2, 2), copies=1 + rank))
    alone = refused(lambda: shardgraph.save_checkpoint(own, 1, nn.Linear(2, 2)))
    return differ, alone


def loaded_after_each(base: str, machines: Sequence[int], lost: Sequence[int]) -> list[tuple[Any, ...]]:
    """What is loaded after each machine of ``lost`` alone has lost its folder."""
    found = []
    for machine in lost:
        if dist.get_rank() == 0:
            shutil.move(folder_of(base, machine), f"{base}/aside")
        dist.barrier()
        found.append(loaded(base, machines))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.move(f"{base}/aside", folder_of(base, machine))
        dist.barrier()
    return found


def killed(base: str, step: int, last: int, all_of_them: bool) -> int:
    """Save ``step``, each rank on a machine; rank 1, or all, are killed at point number ``last`` of what it does.

    Returns how many points there were if they were not.
    """
    rank, pids = dist.get_rank(), [0] * dist.get_world_size()
    model, optimizer = job_at(step)
    dist.all_gather_object(pids, os.getpid())
    others = [pid for pid in pids if pid != os.getpid()] if all_of_them else []
    with Points(last if rank == 1 else -1, others) as points:
        shardgraph.save_checkpoint(folder_of(base, rank), step, model, optimizer, copies=2, keep=1)
    return points.passed
