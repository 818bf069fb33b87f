"""Annotated activations: a placement that a value of the captured graph, and its gradient, must have.

In the graph such a value goes through one operation, ``shardgraph::constrain``, an identity. What finds placements for
operators honours it (:mod:`shardgraph.passes.sharding.problem`); then
:mod:`shardgraph.passes.sharding.remove_constraints` takes it out. Annotations of outputs and inputs of modules become
that operation by hooks that are there while the model is traced, so they see what the module really takes and gives,
however often it is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardgraph.ir.attributes import SOURCE
from shardgraph.plans.annotations.kinds import Placement, replicate, shard


def constrain(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """``tensor``, which under a plan that divides operators lies as ``placement`` says, and its gradient equally.

    For use inside of a forward: ``hidden = shardgraph.constrain(hidden, shard(1, "tp"))``. Without a plan, or under one
    whose mesh has no such axis of operators, it does nothing.
    """
    if not torch.compiler.is_compiling():
        return tensor
    return constrain_to(tensor, placement, "")


def constrain_to(tensor: torch.Tensor, placement: Placement, of: str) -> torch.Tensor:
    """``tensor`` through the operation; ``of`` names the annotation in errors."""
    if isinstance(placement, shard):
        return _operation(tensor, placement.dim, placement.blocks, placement.mesh_dim, of)
    return _operation(tensor, None, 1, placement.mesh_dim, of)


@torch.library.custom_op("shardgraph::constrain", mutates_args=())
def _operation(tensor: torch.Tensor, dim: int | None, blocks: int, mesh_dim: str | None, of: str) -> torch.Tensor:
    return tensor.clone()


@_operation.register_fake
def _(tensor: torch.Tensor, *placement: Any) -> torch.Tensor:
    return torch.empty_like(tensor)


def _keep_placement(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.placement = inputs[1:]


def _constrain_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return _operation(gradient, *ctx.placement), None, None, None, None


_operation.register_autograd(_constrain_gradient, setup_context=_keep_placement)

CONSTRAIN = torch.ops.shardgraph.constrain.default


# -- in a captured graph -----------------------------------------------------------------------------------


def placement_of(node: fx.Node) -> Placement:
    """The placement that a node of the operation demands."""
    _, dim, blocks, mesh_dim, _ = node.args
    return replicate(mesh_dim) if dim is None else shard(dim, mesh_dim, blocks)


def describe(node: fx.Node) -> str:
    """Which annotation a node of the operation is from."""
    return str(node.args[-1]) or f"constrain(..., {placement_of(node)}) at {SOURCE.get(node, '')}"
