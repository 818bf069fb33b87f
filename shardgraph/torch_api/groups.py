"""Process groups."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardgraph.torch_api.connections import recorded_connections

# Named so since torch 2.13, which warns of the names before.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def ordered_gloo() -> str:
    """The name of a gloo backend whose groups run one collective at a time, in order.

    Gloo's two worker threads corrupt memory when they run collectives of one group at once on more than two
    ranks (seen on torch 2.13: heap corruption within some hundred concurrent all-gathers on 3 ranks). One
    worker keeps collectives asynchronous to the computation, which is the overlap that matters.
    """
    name = "shardgraph_gloo"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, _one_worker_gloo, devices=["cpu"])
    return name


def ordered_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """A group of the same ranks (default: all), whose collectives may be in flight together: over gloo a new one."""
    group = group or dist.distributed_c10d._get_default_group()
    if dist.get_backend(group) != "gloo":
        return group
    ranks = dist.get_process_group_ranks(group)
    made: Any = dist.new_group(ranks, backend=ordered_gloo(), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    limit_wait(made, wait_of(group))
    return made


def group_of_messages(timeout: timedelta) -> dist.ProcessGroup:
    """A new group of all ranks over gloo, for messages between two of them; all ranks must make it."""
    ranks = list(range(dist.get_world_size()))
    made: Any = dist.new_group(ranks, timeout=timeout, backend=ordered_gloo(), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def limit_wait(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let a collective of ``group`` fail that takes longer than ``timeout``; torch gives groups half an hour."""
    if dist.get_backend(group) != "fake":  # which communicates nothing, and torch would warn that it cannot time out
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def wait_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of ``group`` may take."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout
    return dist.distributed_c10d.default_pg_timeout


def group_along(mesh: DeviceMesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    """The process group along one axis of ``mesh`` or several, made the first time; all ranks must ask alike."""
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    part = mesh.get_group(axes[0])
    group = mesh[axes]._flatten("+".join(axes), dist.get_backend(part)).get_group()
    limit_wait(group, wait_of(part))
    return group


def _one_worker_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # As torch does for its own groups: else gloo takes the address of the host's name, which others may not reach.
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces]
    options._devices = options._devices or [dist.ProcessGroupGloo.create_default_device()]
    options._threads = 1
    options._timeout = timeout
    with recorded_connections(ordered_gloo()):
        return dist.ProcessGroupGloo(store, rank, size, options)


def is_gloo(name: str) -> bool:
    """Whether there is a process group of this name, over gloo as far as tensors on the CPU are concerned."""
    try:
        group: Any = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        return bool(group._get_backend(torch.device("cpu")).name() == "gloo")
    except (RuntimeError, ValueError):
        return False


def has_backend(device_type: str) -> bool:
    """Whether the default process group communicates tensors of a kind of device."""
    try:
        dist.distributed_c10d._get_default_group()._get_backend(torch.device(device_type))
    except RuntimeError:
        return False
    return True
