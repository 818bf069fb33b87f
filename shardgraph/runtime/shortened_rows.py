"""Shortens rows of stored parameters before a call that looks them up, as ``max_norm`` of an embedding asks.

All data-parallel ranks shorten the rows that any of them looks up, so that parameters are those that one process with
the whole batch would have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from shardgraph import ir, torch_api
from shardgraph.mesh import coordinates
from shardgraph.passes.program import Program
from shardgraph.plans.parameter_plan import OWN
from shardgraph.plans.shards import indices_of
from shardgraph.runtime.executor import State, mesh_rank

Values = Callable[[ir.Role], Any]


def shorten_rows(program: Program, state: State, calls: Sequence[tuple[Program, Values]]) -> None:
    """Shorten what ``calls`` look up, in place: programs of one model with the values of their inputs and buffers.

    ``calls`` are the microbatches of a step, one for all without a pipeline, none on a rank without data. All ranks
    that hold parts of a parameter must call this, and of pipelines all that share its stage.
    """
    if not program.joint.shortened:
        return
    agreement = state.agreement if program.plan.pipeline is None else None
    with torch.no_grad(), nullcontext() if agreement is None else agreement.communicating():
        for number in range(len(program.joint.shortened)):
            rows = [each.joint.shortened[number].rows_of(value) for each, value in calls]
            _shorten(program, state, program.joint.shortened[number], rows)


def _shorten(program: Program, state: State, how: ir.ShortenedRows, looked_up: Sequence[torch.Tensor]) -> None:
    shard = torch_api.local_tensor(state.layout.parameter(how.fqn))
    if shard.is_meta:  # of another pipeline stage
        return
    shape, entry, plan = program.shapes[how.fqn], program.parameters[how.fqn], program.plan
    used = torch.zeros(shape[0], dtype=torch.int32, device=state.device)
    for rows in looked_up:
        used.scatter_(0, rows.long(), 1)
    here: tuple[int, ...] = ()
    if state.mesh is not None:
        here = coordinates(plan.mesh, mesh_rank(state.mesh))
        for axis, _ in plan.data_mesh if entry.gradient != OWN else ():
            dist.all_reduce(used, dist.ReduceOp.MAX, state.mesh.get_group(axis))
    held = indices_of(shape, entry, plan.mesh, here)[0].to(state.device)
    chosen = used[held].nonzero().squeeze(1)
    part = shard[chosen.to(shard.device)].to(state.device)
    powers = how.powers(part)
    if state.mesh is not None:
        operation = dist.ReduceOp.MAX if how.norm_type == float("inf") else dist.ReduceOp.SUM
        for position, (dim, _) in entry.splits.items():
            if dim == 1:  # ranks along this axis have other columns of the same rows
                dist.all_reduce(powers, operation, state.mesh.get_group(plan.mesh[position][0]))
    shortened = part * how.factors(powers).to(part.dtype).unsqueeze(1)
    shard[chosen.to(shard.device)] = shortened.to(shard.device)
