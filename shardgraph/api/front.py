"""``shardgraph.front``: what more devices, or more memory in each, buy in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.api.options import OPTIONS
from shardgraph.api.plan import searched
from shardgraph.arguments import WHOLE, checked, sequence_of
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import expect
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.precision import Precision
from shardgraph.progress import Progress
from shardgraph.search import front as search
from shardgraph.search.batches import Batches
from shardgraph.search.machine import with_devices
from shardgraph.sizes import is_whole


@checked(OPTIONS, devices=sequence_of("numbers of devices to compare, such as (8, 16, 32)", WHOLE))
def front(
    model: nn.Module,
    example_inputs: tuple[Any, ...] = (),
    devices: Sequence[int] = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    cluster: Cluster | str | Path | None = None,
    memory: int | str | None = None,
    global_batch: int | None = None,
    optimizer: str = "adamw",
    precision: str | Precision | None = None,
    backend: str = "eager",
    loss_fn: Callable[..., torch.Tensor] | None = None,
    recompute: str | None = None,
    loss_chunk: int | str | None = None,
    offload: str | Offload | None = None,
    seconds: float | None = None,
    progress: bool | None = None,
) -> search.Front:
    """The plans of a job that no other one beats in devices, memory and time per sample together: its Pareto front.

    ``print(front)`` is a table of them, ``front.points`` are the same as data, each with its plan, and
    ``shardgraph.visualize(front, "front.svg")`` draws them. Nothing is run.

    Args:
        model: any module; only shapes and dtypes of its tensors matter.
        example_inputs: as for :func:`shardgraph.plan`.
        devices: the numbers of devices to compare; a named device, or a cluster with a network, has as many nodes as
            each needs.
        example_kwargs, cluster, memory, global_batch, optimizer, precision, backend, loss_fn: as for
            :func:`shardgraph.plan`. What takes more than ``memory`` is part of the front, and marked.
        recompute, loss_chunk, offload: as for :func:`shardgraph.plan`.
        seconds: a limit on the search; the front's remarks say if it cut.
        progress: show a progress line on standard error; None: on a terminal only.

    Raises:
        PlanError: an option is malformed, or no plan could be priced.
        CaptureError: the model cannot be traced into one graph.
        ClusterError: the cluster is unknown, malformed or has fewer devices.
    """
    counts = sorted(set(devices))
    whole = bool(counts) and all(is_whole(count, 1) for count in counts)
    expect(whole, "devices", devices, "numbers of devices to compare, such as (8, 16, 32)")
    if isinstance(cluster, Cluster):
        cluster = with_devices(cluster, counts[-1])
    job = cluster, counts[-1], global_batch, optimizer, precision, backend, loss_fn
    options: dict[str, Any] = {"recompute": recompute, "memory": memory, "loss_chunk": loss_chunk, "offload": offload}
    source = searched(model, example_inputs, example_kwargs, *job, **options)
    batches = Batches(max(1, source.call.batch), global_batch)
    with Progress("front", stages=len(counts) + 1, enabled=progress) as show:
        return search.front(source, counts, batches, pipelines=source.question.has_loss, limit=seconds, show=show)
