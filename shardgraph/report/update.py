"""The optimizer's update as it is priced: its memory and its time.

Shards on the device are updated many at a time (:mod:`shardgraph.module.flat_update`), unless there is no mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, cast

from torch import fx

from shardgraph.cost_models.device import Device
from shardgraph.cost_models.optimizers import (
    SMALL_SHARD,
    STORED_TOGETHER,
    UPDATED_TOGETHER,
    in_stretches,
    optimizer_cost,
    updates_of,
)
from shardgraph.ir import buckets, outputs, trim_shard, update
from shardgraph.passes.analysis.liveness import MemoryProfile, UpdateMemory
from shardgraph.passes.analysis.local import shard_bytes
from shardgraph.passes.analysis.rows import Row
from shardgraph.passes.base import Context
from shardgraph.passes.program import gradients_of
from shardgraph.plans.plan import Plan

MOST_COPIES = 2
"""Of what is updated together, beside the shards and gradients."""


@dataclass(frozen=True)
class Shards:
    """What an optimizer updates: bytes of each shard, by parameter, on the device and in host memory. On the device it
    updates those of one ``kind`` together."""

    on_device: Mapping[str, Any]
    on_host: Mapping[str, Any]
    kind: Callable[[str], object]

    @property
    def places(self) -> tuple[list[Any], list[Any]]:
        """The bytes of all on the device, and of all in host memory."""
        return list(self.on_device.values()), list(self.on_host.values())

    @classmethod
    def of(cls, context: Context, sizes: Mapping[str, Any]) -> Shards:
        """The shards of these sizes in bytes."""
        on_device, on_host = (
            {fqn: nbytes for fqn, nbytes in sizes.items() if context.parameters[fqn].offload is host}
            for host in (False, True)
        )
        return cls(on_device, on_host, lambda fqn: (context.parameters[fqn].placements, context.stored[fqn]))


def trained_shards(context: Context, trained: Iterable[str], rank: int = 0) -> Shards:
    """The shards that ``rank`` has of the parameters with these names."""
    names = set(trained)
    return Shards.of(context, {fqn: shard_bytes(context, fqn, rank) for fqn in context.shapes if fqn in names})


def update_memory(
    graphs: Iterable[fx.GraphModule],
    shards: Shards,
    optimizer: str,
    plan: Plan,
    magnitude: Callable[[Any], int] = int,
    on_cpu: bool = True,
) -> tuple[UpdateMemory, UpdateMemory]:
    """The optimizer's memory on the device and on the host, in addition to the ``shards`` and their gradients, which
    the ``graphs`` of a plan take and give; ``magnitude`` orders symbolic sizes. Of state in files there are only its
    counters. ``on_cpu``: the device is one, where torch's optimizers update one parameter after the other. On the host
    fused kernels update, which need no more.
    """
    cost, (on_device, on_host) = optimizer_cost(optimizer), shards.places

    def temporaries(sizes: Iterable[Any]) -> Iterator[Any]:
        """Of the update of tensors of these sizes, one after the other."""
        return (cost.left * before + cost.temporaries * nbytes for before, nbytes in pairwise([0, *sizes]))

    of_device = list(temporaries(on_device))
    if are_updated_together(shards, plan):
        runs = list(_runs(graphs, shards, magnitude))
        of_device = list(temporaries(nbytes for nbytes, copies in runs if not copies))
        of_device += [(cost.temporaries + copies) * nbytes for nbytes, copies in runs if copies]
    elif not on_cpu and not on_host:
        of_device = [cost.at_once * sum(on_device)]
    counters = [cost.counters * 4 * len(each) for each in (on_device, on_host)]
    state_on_host, made = cost.states * sum(on_host), 0
    if plan.offload.optimizer_state:  # each tensor is made in memory, and then put into its file
        state_on_host, made = 0, max(on_host, key=magnitude, default=0) if cost.states else 0
    return (
        UpdateMemory(cost.states * sum(on_device) + counters[0], max(of_device, key=magnitude, default=0)),
        UpdateMemory(state_on_host + counters[1], made),
    )


def are_updated_together(shards: Shards, plan: Plan) -> bool:
    """Whether an optimizer steps on many small shards at a time: on those of a mesh, none of which is on the host."""
    return bool(plan.mesh) and not shards.on_host


def _runs(
    graphs: Iterable[fx.GraphModule], shards: Shards, magnitude: Callable[[Any], int]
) -> Iterator[tuple[Any, int]]:
    """What is updated together, in order: bytes of the shards, and how many copies of these there are beside the shards
    and gradients. There is one of gradients that do not lie side by side, and of shards another one.
    """
    gradients: dict[str, fx.Node] = {}
    stored: list[list[str]] = []
    for graph in graphs:
        gradients |= _gradients(graph)
        for named in map(list, buckets.stored_parameters(graph)):
            if all(set(named).isdisjoint(before) for before in stored):
                stored.append(named)
    sizes = {fqn: magnitude(shards.on_device[fqn]) for fqn in gradients if fqn in shards.on_device}
    most = max([UPDATED_TOGETHER, *sizes.values()])
    lies = {fqn: _reduced_in(gradients[fqn]) for fqn in sizes}

    def stretches(fqns: Iterable[str], of_up_to: int) -> Iterator[list[str]]:
        return in_stretches(((fqn, sizes[fqn]) for fqn in fqns), of_up_to)

    before = set(chain(*stored))
    small = [fqn for fqn in sizes if fqn not in before and sizes[fqn] <= SMALL_SHARD]  # the first update stores these
    for alike in _by(shards.kind, _in_memory(small, lies)):
        stored += stretches(alike, STORED_TOGETHER)
    for bucket in (*stored, *([fqn] for fqn in sizes if fqn not in before and fqn not in small)):
        kinds = _by(shards.kind, filter(sizes.__contains__, bucket))
        for run in chain.from_iterable(stretches(alike, most) for alike in kinds):
            copies = 0
            if len(run) > 1 and len(kinds) > 1:  # others are between them
                copies = MOST_COPIES
            elif len({lies[fqn][0] for fqn in run}) > 1:
                copies = 1
            yield sum(shards.on_device[fqn] for fqn in run), copies


def _gradients(graph: fx.GraphModule) -> Iterator[tuple[str, fx.Node]]:
    """The gradients that a graph returns, or hands over to be updated with, by parameter."""
    yield from gradients_of(outputs(graph)).items()
    for node in graph.graph.find_nodes(op="call_function", target=update):
        names, gradients = cast(Any, node.args[1:])
        yield from zip(names, gradients, strict=True)


def _reduced_in(gradient: fx.Node) -> tuple[fx.Node, int]:
    """Where a gradient lies: the bucket that it was reduced in, and its place there; alone in itself if in none."""
    reduced: Any = gradient.args[0] if gradient.target is trim_shard else gradient
    return reduced.args if buckets.packed_as(reduced) is not None else (gradient, 0)


def _in_memory(fqns: Iterable[str], lies: Mapping[str, tuple[fx.Node, int]]) -> list[str]:
    """Parameters in the order in which gradients lie: buckets as they come, and in each by place."""
    first: dict[fx.Node, int] = {}
    for i, (bucket, _) in enumerate(lies.values()):
        first.setdefault(bucket, i)
    return sorted(fqns, key=lambda fqn: (first[lies[fqn][0]], lies[fqn][1]))


def _by(kind: Callable[[str], object], fqns: Iterable[str]) -> list[list[str]]:
    """Parameters of the same kind, in order."""
    found: dict[object, list[str]] = {}
    for fqn in fqns:
        found.setdefault(kind(fqn), []).append(fqn)
    return list(found.values())


def update_rows(
    shards: Shards,
    optimizer: str,
    device: Device,
    memory: MemoryProfile,
    plan: Plan,
    number: Callable[[Any], Any] = int,
    magnitude: Callable[[Any], int] = int,
) -> Iterator[Row]:
    """The optimizer's updates under a plan, at the last point of ``memory``; ``number`` makes a number or expression of
    a size, and ``magnitude`` orders sizes."""
    cost = optimizer_cost(optimizer)
    together = are_updated_together(shards, plan)
    for host, sizes in zip((False, True), shards.places, strict=True):
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
