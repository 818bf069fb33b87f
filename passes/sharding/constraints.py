"""Annotations as placement constraints along one axis: on activations in the graph, and on parameters by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.errors import PlanError
from shardgraph.ir import Parameter, placeholders
from shardgraph.passes.analysis.names import module_of
from shardgraph.passes.sharding.legal import Value, value_of
from shardgraph.passes.sharding.placements import REPLICATE, blocks, is_cut
from shardgraph.plans.annotations.constrain import CONSTRAIN, describe, placement_of
from shardgraph.plans.annotations.kinds import shard


@dataclass(frozen=True)
class Constraints:
    """``parameters`` by name, ``marks`` by the ``shardgraph::constrain`` node that passes the value on."""

    parameters: Mapping[str, Placement]
    marks: Mapping[fx.Node, Placement]

    def cut_parameters(self, gm: fx.GraphModule) -> dict[Value, Placement]:
        """The shardings required of parameters."""
        placements = {Parameter(fqn): placement for fqn, placement in self.parameters.items() if is_cut(placement)}
        return {(node, 0): placements[role] for role, node in placeholders(gm).items() if role in placements}

    def cut_activations(self) -> dict[Value, Placement]:
        """The shardings required of activations, before and after the mark."""
        cuts = {mark: placement for mark, placement in self.marks.items() if is_cut(placement)}
        return {value: cut for mark, cut in cuts.items() for value in ((mark, 0), value_of(mark.args[0]))}


def marks_of(gm: fx.GraphModule, axis: str, parts: int) -> dict[fx.Node, Placement]:
    """The placements along ``axis``, which has ``parts`` ranks, required of annotated activations.

    Raises:
        PlanError: a tensor cannot be sharded so; the message names the annotation, the shape and the sizes that work.
    """
    marks: dict[fx.Node, Placement] = {}
    for node in gm.graph.nodes:
        if node.target is CONSTRAIN and (annotation := placement_of(node)).mesh_dim in (None, axis):
            marks[node], shape = REPLICATE, node.meta["val"].shape
            try:
                if isinstance(annotation, shard):
                    marks[node] = blocks(annotation.part(shape, parts), annotation.blocks)
            except PlanError as error:
                place = f"a value of {module_of(node) or 'the model'}, of shape {list(shape)}"
                raise PlanError(f"{describe(node)} cannot be for {place}: {error}") from None
    return marks
