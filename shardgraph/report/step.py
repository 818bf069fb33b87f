"""A training step as it is priced: its graphs, their memory, the tasks of its timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.timeline import COMPUTE, Task, Timeline, simulate
from shardgraph.ir import Input, placeholders
from shardgraph.passes.analysis.liveness import MemoryProfile, profile_step
from shardgraph.passes.analysis.local import on_rank
from shardgraph.passes.analysis.rows import Row
from shardgraph.passes.parameters.accumulate_gradients import adding_to_earlier
from shardgraph.passes.partition.drop_zero_tangents import absent_beside_a_scalar
from shardgraph.passes.program import Program
from shardgraph.report.update import trained_shards, update_memory


def tasks_of(rows: Sequence[Row], cluster: Cluster) -> Iterator[Task]:
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
        slows = (1 - cluster.overlap_on(row.link)) * row.seconds if row.link else 0.0
        yield Task(row.label, row.stream or COMPUTE, row.seconds, after, row.node, row.link, slows)


def timeline_of(rows: Sequence[Row], cluster: Cluster, call: float = 0.0) -> Timeline:
    """The simulated timeline of rows on a cluster, whose operations Python calls ``call`` seconds apart."""
    return simulate(list(tasks_of(rows, cluster)), call, cluster.sync)


def program_halves(program: Program, backward: str = "backward") -> dict[str, fx.GraphModule]:
    """The graphs of a call by name, in execution order, with the ``backward`` of this name: ``"update"`` updates
    parameters, ``"local"`` keeps gradients, ``"adding"`` adds them to those that are kept, ``"accumulate"`` adds them
    and reduces.

    If a model returns a scalar, the loss is assumed to be that scalar; otherwise the loss is assumed to depend on
    every floating-point output.
    """
    if program.backward is None:
        return {"forward": program.forward}
    absent = absent_beside_a_scalar(program.forward, program.backward)
    gm = program.graph("local" if backward == "adding" else backward, absent)
    return {"forward": program.forward, "backward": adding_to_earlier(gm) if backward == "adding" else gm}


def program_memory(
    program: Program,
    optimizer: str,
    rank: int = 0,
    granule: int = 1,
    *,
    workspaces: bool = False,
    gloo: bool = True,
    halves: Mapping[str, fx.GraphModule] | None = None,
) -> MemoryProfile:
    """The memory of a training step on ``rank``, with the optimizer's; sizes round up to ``granule`` bytes.

    It is that of ``halves``, by default those of :func:`program_halves`, and the optimizer's step after them.
    With ``workspaces``, what CPU kernels take for themselves is included. ``gloo``: the device is a CPU, whose tensors
    are communicated there.
    """
    halves = halves or program_halves(program)
    forward, backward = on_rank(halves["forward"], halves.get("backward"), program.context, rank)
    graphs = [forward] if backward is None else [forward, backward]
    shards = trained_shards(program.context, program.trained, rank)
    updates = update_memory(graphs, shards, optimizer, program.plan, on_cpu=gloo)
    return profile_step(forward, backward, granule, *updates, workspaces=workspaces, gloo=gloo)


def batch_of(program: Program) -> tuple[int, int]:
    """``(samples, tokens)`` of one call: the rows of the first input tensor, and its elements if it holds token ids."""
    roles = placeholders(program.joint.module).items()
    values = [node.meta.get("val") for role, node in roles if isinstance(role, Input)]
    first = next((value for value in values if isinstance(value, torch.Tensor) and value.dim()), None)
    if first is None:
        return 0, 0
    return first.shape[0], first.numel() if first.dim() == 2 and not first.is_floating_point() else 0
