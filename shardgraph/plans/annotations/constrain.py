"""Annotated activations: a placement that a value of the captured graph, and its gradient, must have.

Such a value passes through an identity operation in the graph, ``shardgraph::constrain``. The search for placements of
operators treats it as a constraint (:mod:`shardgraph.passes.sharding.problem`); then
:mod:`shardgraph.passes.sharding.remove_constraints` removes it. For annotations of modules' inputs and outputs, hooks
add the operation while the model is traced, so they apply to the actual inputs and outputs of every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardgraph.arguments import TENSOR, instance, of_plan
from shardgraph.errors import FieldError
from shardgraph.ir.attributes import SOURCE
from shardgraph.plans.annotations.kinds import Placement, replicate, shard

_PLACEMENT = of_plan(instance("shard(...) or replicate(...)", Placement))


def constrain(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """``tensor``, constrained to ``placement`` under a plan that shards operators, and so is its gradient.

    For use inside a forward: ``hidden = shardgraph.constrain(hidden, shard(1, "tp"))``. It is an identity without a
    plan, or under a plan whose mesh has no such operator axis.
    """
    if not torch.compiler.is_compiling():
        _PLACEMENT.check("constrain(): placement", placement)
        return TENSOR.check("constrain(): tensor", tensor)
    if not isinstance(placement, Placement):  # the tracer follows this, and not the call of a kind
        raise FieldError("constrain(): placement may be shard(...) or replicate(...)")
    return constrain_to(tensor, placement, "")


def constrain_to(tensor: torch.Tensor, placement: Placement, of: str) -> torch.Tensor:
    """``tensor`` passed through the operation; ``of`` names the annotation in errors."""
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


def placement_of(node: fx.Node) -> Placement:
    """The placement that a ``constrain`` node requires."""
    _, dim, blocks, mesh_dim, _ = node.args
    return replicate(mesh_dim) if dim is None else shard(dim, mesh_dim, blocks)


def describe(node: fx.Node) -> str:
    """The annotation of a ``constrain`` node, for errors."""
    return str(node.args[-1]) or f"constrain(..., {placement_of(node)}) at {SOURCE.get(node, '')}"
