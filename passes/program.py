"""A program: what the passes make of a captured graph for one kind of call, the same text on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.ir import JointGraph, Tangent
from shardgraph.passes.base import Context, Pass, run_passes
from shardgraph.passes.parameters.accumulate_gradients import AddAccumulated, KeepGradientsLocal
from shardgraph.passes.partition.drop_zero_tangents import DropZeroTangents
from shardgraph.plans.parameter_plan import ParameterPlan
from shardgraph.plans.plan import Plan


class Emitted:
    """What a compilation emits: graphs that are the same text on every rank, and what is needed to call them.

    ``joint`` is the graph as captured, before any rewrite; ``context`` what the passes knew.
    """

    joint: JointGraph
    context: Context

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """All graphs that a step runs."""
        raise TypeError(f"{type(self).__name__} does not say which graphs it has")

    @property
    def forwards(self) -> list[fx.GraphModule]:
        """Those of forward."""
        raise TypeError(f"{type(self).__name__} does not say which graphs are forward's")

    @property
    def out_spec(self) -> Any:
        """The pytree of what the model returns."""
        return self.joint.out_spec

    @property
    def aliases(self) -> dict[int, ir.OutputAlias]:
        """Outputs that are views of something else."""
        return self.joint.aliases

    @property
    def notes(self) -> list[str]:
        """Decisions of the passes that are worth knowing, such as what every rank computes whole."""
        return self.context.notes

    @cached_property
    def random(self) -> bool:
        """Whether forward draws random numbers."""
        tag = torch.Tag.nondeterministic_seeded
        return any(tag in getattr(node.target, "tags", ()) for gm in self.forwards for node in gm.graph.nodes)

    @cached_property
    def text(self) -> str:
        """All graphs as text, the same on every rank: what ranks compare before they run."""
        return "\n".join(node.format_node() or "" for gm in self.graphs for node in gm.graph.nodes)


@dataclass(eq=False)
class Program(Emitted):
    """Forward and backward graphs, the same on every rank, and what is needed to call them."""

    joint: JointGraph
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    plan: Plan
    parameters: Mapping[str, ParameterPlan]
    shapes: Mapping[str, torch.Size]
    context: Context

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """Forward and, of what is trained, backward."""
        return [half for half in (self.forward, self.backward) if half is not None]

    @property
    def forwards(self) -> list[fx.GraphModule]:
        """Forward."""
        return [self.forward]

    def backward_variant(self, name: str, absent: frozenset[Tangent] = frozenset()) -> fx.GraphModule:
        """The backward graph ``"reduce"``, ``"local"`` (of ``no_sync``) or ``"accumulate"`` (that ends it).

        ``absent`` are the tangents that it does without, because the loss does not depend on their outputs.
        """
        assert self.backward is not None
        steps: list[Pass] = [DropZeroTangents(absent)] if absent else []
        steps += _ENDINGS[name]
        variant = ir.copy_graph(self.backward)
        run_passes(variant, steps, self.context.of_graph())
        return variant


_ENDINGS: dict[str, list[Pass]] = {"reduce": [], "local": [KeepGradientsLocal()], "accumulate": [AddAccumulated()]}
