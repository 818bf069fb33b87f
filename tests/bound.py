"""Graphs as ranks run them: bound to each rank of a mesh and called, one thread per rank, over real process groups.

The groups are those of torch's own tests: collectives exchange tensors between threads of one process. So the device
mesh, its groups by name, and the functional collectives are torch's, and the graphs are the runtime's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from shardgraph import ir
from shardgraph.checks.lockstep import Results
from shardgraph.mesh import Mesh
from shardgraph.runtime.executor import Bound

_PATIENCE = 60.0  # seconds for all ranks together, after which some wait for ever

T = TypeVar("T")


def run_bound(graphs: Sequence[fx.GraphModule], mesh: Mesh, inputs: Sequence[Sequence[Mapping[ir.Role, Any]]]) -> Any:
    """Run each graph, bound on every rank, on each rank's inputs by role; gives per graph each rank's results."""

    def run(rank: int, device_mesh: DeviceMesh) -> list[Results]:
        return [_call(Bound(gm, device_mesh), given[rank]) for gm, given in zip(graphs, inputs, strict=True)]

    return list(zip(*on_threads(mesh, run), strict=True))


def _call(bound: Bound, inputs: Mapping[ir.Role, Any]) -> Results:
    values = bound([inputs[role] for role, _ in bound.inputs])
    return [(role, value) for (role, _), value in zip(bound.results, values, strict=True)]


def on_threads(mesh: Mesh, run: Callable[[int, DeviceMesh], T]) -> list[T]:
    """What ``run(rank, device_mesh)`` gives on every rank of a mesh, each a thread with process groups of its own.

    Raises:
        RuntimeError: a rank failed, or some wait for ever.
    """
    axes, sizes = zip(*mesh, strict=True)
    store, results, failures = dist.HashStore(), {}, []
    world = math.prod(sizes)

    def work(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            results[rank] = run(rank, init_device_mesh("cpu", sizes, mesh_dim_names=axes))
        except BaseException as error:
            failures.append((rank, error))
            threaded.ProcessLocalGroup.exception_handle(error)  # wakes ranks that wait for this one
        finally:
            dist.destroy_process_group()

    with _threaded_groups():
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE)
        if stuck := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
            threaded.ProcessLocalGroup.exception_handle(TimeoutError())
            raise RuntimeError(f"ranks {stuck} wait for ever")
    for rank, error in failures:
        if not isinstance(error, SystemExit):  # which ends those that another one's failure woke
            raise RuntimeError(f"rank {rank} failed") from error
    return [results[rank] for rank in range(world)]


@contextmanager
def _threaded_groups() -> Iterator[None]:
    """Within it every thread has process groups of its own."""
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
