"""What autograd is told of a program, whether one graph is its backward or the steps of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardgraph import ir
from shardgraph.errors import BackwardError
from shardgraph.passes.program import Program
from shardgraph.plans.plan import Plan
from shardgraph.runtime.executor import State


def tangent_of(role: ir.Role | None, program: Program) -> ir.Tangent | None:
    """The incoming gradient of a result, if autograd returns that result."""
    if isinstance(role, ir.Output):
        return None if role.index in program.joint.aliases else ir.Tangent(role.index)
    return ir.Tangent(-1 - role.index) if isinstance(role, ir.IntermediateBase) else None


def on_any_data_rank(flags: list[bool], plan: Plan, state: State) -> list[bool]:
    """Each flag, true where it is on any of the data-parallel ranks that this one averages gradients with."""
    if state.mesh is None:
        return flags
    on_device = torch.tensor(flags, dtype=torch.int32, device=state.device)
    for axis, _ in plan.data_mesh:
        dist.all_reduce(on_device, dist.ReduceOp.MAX, state.mesh.get_group(axis))
    return list(map(bool, on_device.tolist()))


def check_plain(gradients: Sequence[torch.Tensor | None]) -> None:
    """Raise BackwardError if a loss has combined outputs with parameters outside of programs.

    A DTensor takes a number that it is computed with as the same on all ranks. Of a rank's own loss that is not so, and
    gradients of the parameter would be those of one rank's batch.
    """
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        raise BackwardError(
            "the loss computes with an output of the module and with parameters, which are shards outside of forward: "
            "compute what needs both in a method of the model, called as sharded.method(output, ...), in forward, or "
            "in the loss_fn of train_step. A penalty on parameters alone, such as a sum of their norms, can be a "
            "method too, or be differentiated by itself: loss.backward(), then penalty.backward()"
        )


def check_unchanged(versions: Sequence[tuple[str, torch.Tensor, int]], stepped: bool = False) -> None:
    """Raise BackwardError if a parameter whose value backward needs was changed in place after forward: by itself, or
    with all others where an optimizer has ``stepped``."""
    for fqn, shard, version in versions:
        if stepped or shard._version != version:
            raise BackwardError(
                f"the parameter {fqn!r} was changed in place between forward and backward, and backward needs the "
                "value that forward used: step the optimizer after backward, or call the module again before it"
            )
