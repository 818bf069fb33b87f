"""Removes the marks of annotated activations once placements have been chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from shardgraph.ir import outputs
from shardgraph.passes.base import Context, Pass
from shardgraph.plans.annotations.constrain import CONSTRAIN, describe, placement_of


@dataclass(frozen=True)
class RemoveConstraints(Pass):
    """Takes a joint graph, sharded or not; gives the same without ``shardgraph::constrain``.

    A mark that is an output of the graph, or whose strides differ from its operand's, becomes a copy, as the graph was
    traced with. A mark whose axis does not shard operators is noted. Must not change: any value.
    """

    name = "remove-constraints"
    provides = frozenset({"unconstrained"})
    excludes = frozenset({"split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        results = {value for _, value in outputs(gm) if isinstance(value, fx.Node)}
        for node in [node for node in gm.graph.nodes if node.target is CONSTRAIN]:
            marked, axis = node.args[0], placement_of(node).mesh_dim
            if context.plan.mesh and axis is not None and axis not in dict(context.plan.operators):
                note = f"{describe(node)} has no effect: {axis!r} is no axis of operators in plan {context.plan.name!r}"
                if note not in context.notes:
                    context.notes.append(note)
            if node in results or node.meta["val"].stride() != marked.meta["val"].stride():
                node.target, node.args = torch.ops.aten.clone.default, (marked,)
            else:
                node.replace_all_uses_with(marked)
                gm.graph.erase_node(node)
