"""Rows of parameters that a program's runtime shortens before a step, shortened in all ranks' shards in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardgraph import ir
from shardgraph.mesh import coordinates
from shardgraph.passes.program import Program
from shardgraph.plans.shards import indices_of


def shorten_shards(
    programs: Sequence[Program],
    shards: Sequence[dict[str, torch.Tensor]],
    calls: Sequence[Sequence[Callable[[ir.Role], Any]]],
) -> None:
    """Shorten what a step looks up in the ``shards`` of each rank, in place.

    ``programs`` are those of each microbatch, and ``calls`` the values of their inputs and buffers, for each data rank.
    """
    program = programs[0]
    mesh = program.plan.mesh
    for number, how in enumerate(program.joint.shortened):
        shape, entry = program.shapes[how.fqn], program.parameters[how.fqn]
        mine = [each[how.fqn].data for each in shards]
        held = [indices_of(shape, entry, mesh, coordinates(mesh, rank)) for rank in range(len(shards))]
        whole = torch.empty(shape, dtype=mine[0].dtype, device="cpu")
        for shard, (rows, columns) in zip(mine, held, strict=True):
            whole[rows.unsqueeze(1), columns] = shard
        looked_up = [
            each.joint.shortened[number].rows_of(value)
            for values in calls
            for each, value in zip(programs, values, strict=True)
        ]
        chosen = torch.cat(looked_up).unique()
        whole[chosen] *= how.factors(how.powers(whole[chosen])).to(whole.dtype).unsqueeze(1)
        for shard, (rows, columns) in zip(mine, held, strict=True):
            shard.copy_(whole[rows.unsqueeze(1), columns])
