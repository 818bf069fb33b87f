"""A training step as it is priced: its graphs, their memory, the tasks of its timeline, the optimizer's update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardgraph.cost_models.device import Device
from shardgraph.cost_models.optimizers import UPDATED_TOGETHER, optimizer_cost, updates_of
from shardgraph.cost_models.timeline import COMPUTE, Task
from shardgraph.ir import Gradient, Input, local_chunk, outputs, placeholders
from shardgraph.passes.analysis.liveness import MemoryProfile, UpdateMemory, profile_step
from shardgraph.passes.analysis.local import on_rank, shard_bytes
from shardgraph.passes.analysis.rows import Row
from shardgraph.passes.base import Context
from shardgraph.passes.partition.drop_zero_tangents import absent_beside_a_scalar
from shardgraph.passes.program import Program


def tasks_of(rows: Sequence[Row]) -> Iterator[Task]:
    """The tasks of a timeline with one compute stream and one stream per mesh axis.

    A collective starts when the computation issued before it has ended; a wait blocks the computation until its
    collective has ended.
    """
    latest = -1  # the last task of the computation
    for i, row in enumerate(rows):
        if row.stream:
            after: tuple[int, ...] = (latest,) if latest >= 0 else ()
        else:
            after, latest = (i - row.waits,) if row.waits else (), i
        yield Task(row.label, row.stream or COMPUTE, row.seconds, after, row.node, row.link)


Shards = tuple[Sequence[Any], Sequence[Any]]
"""Bytes of each shard that the optimizer updates on the device, and of each that it updates in host memory."""


def trained_shards(context: Context, trained: Iterable[str], rank: int = 0) -> Shards:
    """The shards that ``rank`` has of the parameters with these names."""
    on_device, on_host = (
        [shard_bytes(context, fqn, rank) for fqn in sorted(trained) if context.parameters[fqn].offload is host]
        for host in (False, True)
    )
    return on_device, on_host


def update_memory(
    shards: Sequence[Any],
    optimizer: str,
    magnitude: Callable[[Any], int] | None = None,
    in_files: bool = False,
    least: int = 0,
) -> UpdateMemory:
    """The optimizer's memory in addition to ``shards`` and their gradients; ``magnitude`` orders symbolic sizes.

    Of state that is in files there are only its counters. Of small shards, ``least`` bytes are updated at a time.
    """
    cost = optimizer_cost(optimizer)
    state = (0 if in_files else cost.states * sum(shards)) + cost.counters * 4 * len(shards)
    largest = max(shards, key=magnitude, default=0)
    size = magnitude or int
    if shards and least >= size(sum(shards)):
        largest = sum(shards)
    elif shards and least > size(largest):
        largest = least
    return UpdateMemory(state, cost.temporaries * largest)


def update_rows(
    shards: Shards,
    optimizer: str,
    device: Device,
    memory: MemoryProfile,
    ranks: int,
    number: Callable[[Any], Any] = int,
    magnitude: Callable[[Any], int] = int,
) -> Iterator[Row]:
    """The optimizer's updates at the last point of ``memory``, for a plan of so many ``ranks``, without those of
    stages; ``number`` makes a number or expression of a size, and ``magnitude`` orders sizes."""
    cost = optimizer_cost(optimizer)
    together = are_updated_together(shards, ranks)
    for host, sizes in zip((False, True), shards, strict=True):
        if not sizes:
            continue
        rate = device.linked_host.optimizer if host else device.rate("optimizer")
        assert rate is not None
        yield Row(
            half="optimizer",
            node="update",
            operation=optimizer,
            label=f"{optimizer} update" + (" on the host" if host else ""),
            kind="optimizer",
            read=(cost.moved - cost.states - 1) * sum(sizes),
            written=(cost.states + 1) * sum(sizes),
            seconds=cost.moved * number(sum(sizes)) / rate.per_second
            + rate.overhead * (updates_of(list(map(magnitude, sizes))) if together else len(sizes)),
            memory={kind: line[-1] for kind, line in memory.compositions.items() if line[-1]},
            host={kind: line[-1] for kind, line in memory.host.items() if line[-1]},
        )


def are_updated_together(shards: Shards, ranks: int) -> bool:
    """Whether an optimizer steps on many small shards at a time: on those of several ranks, none of which is on the
    host."""
    return ranks > 1 and not shards[1]


def program_halves(program: Program, *, whole_step: bool = False) -> dict[str, fx.GraphModule]:
    """The graphs of a step by name, in execution order; those of a ``whole_step`` update parameters in backward.

    If a model returns a scalar, the loss is assumed to be that scalar; otherwise the loss is assumed to depend on
    every floating-point output.
    """
    if program.backward is None:
        return {"forward": program.forward}
    absent = absent_beside_a_scalar(program.forward, program.backward)
    backward = program.graph("update" if whole_step else "backward", absent)
    return {"forward": program.forward, "backward": backward}


def program_memory(
    program: Program,
    optimizer: str,
    rank: int = 0,
    granule: int = 1,
    *,
    workspaces: bool = False,
    gloo: bool = True,
    whole_step: bool = False,
) -> MemoryProfile:
    """The memory of a training step on ``rank``, with the optimizer's; sizes round up to ``granule`` bytes.

    It is that of a ``train_step`` and the optimizer's after it, or of a ``whole_step`` without clipping, which frees
    gradients in backward.
    With ``workspaces``, what CPU kernels take for themselves is included. ``gloo``: tensors on the CPU are communicated
    there.
    """
    halves = program_halves(program, whole_step=whole_step)
    forward, backward = on_rank(halves["forward"], halves.get("backward"), program.context, rank)
    on_device, on_host = trained_shards(program.context, program.trained, rank)
    of_host = update_memory(on_host, optimizer, in_files=program.plan.offload.optimizer_state)
    together = are_updated_together((on_device, on_host), program.plan.world_size)
    of_device = update_memory(on_device, optimizer, least=UPDATED_TOGETHER if together else 0)
    if together and backward is not None:
        most = max([UPDATED_TOGETHER, *on_device])
        copied = _copied_parts(backward, most)
        copies = min(copied, most) if whole_step else copied
        of_device = replace(of_device, temporaries=of_device.temporaries + copies)
    return profile_step(forward, backward, granule, of_device, of_host, workspaces=workspaces, gloo=gloo)


def _copied_parts(backward: fx.GraphModule, most: int) -> int:
    """Bytes of the gradients that are copied for updates of many shards, of up to ``most`` bytes, at a time: parts of
    whole gradients do not lie side by side."""
    gradients = (value for role, value in outputs(backward) if isinstance(role, Gradient))
    parts = [each.meta["val"].nbytes for each in gradients if isinstance(each, fx.Node) and each.target is local_chunk]
    small = [nbytes for nbytes in parts if nbytes < most]
    return sum(small) if len(small) > 1 else 0


def batch_of(program: Program) -> tuple[int, int]:
    """``(samples, tokens)`` of one call: the rows of the first input tensor, and its elements if it holds token ids."""
    roles = placeholders(program.joint.module).items()
    values = [node.meta.get("val") for role, node in roles if isinstance(role, Input)]
    first = next((value for value in values if isinstance(value, torch.Tensor) and value.dim()), None)
    if first is None:
        return 0, 0
    return first.shape[0], first.numel() if first.dim() == 2 and not first.is_floating_point() else 0
