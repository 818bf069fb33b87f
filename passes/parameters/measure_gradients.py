"""Gradient statistics: how long gradients are before and after they are reduced over data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardgraph.ir import SQUARED_NORM, Gradient, Parameter, Role, SquaredNorm, outputs, set_outputs
from shardgraph.ir.attributes import REDUCES, SOURCE, SUBJECT, Labels
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.builder import Builder
from shardgraph.passes.parameters.accumulate_gradients import local_gradient


@dataclass(frozen=True)
class MeasureGradients(Pass):
    """Takes a joint graph that returns reduced gradients, under a plan with ``gradient_statistics``; returns beside
    each the squared norms of what this rank has of it: before its reduction, and after.

    Both are read where the gradient exists anyway, so nothing is copied, kept longer or computed again; other ranks'
    parts are added by the runtime, for all parameters in one reduction. The norm after the reduction has ``REDUCES``:
    it is awaited late with the gradient, and left out with the reduction under ``no_sync``.

    Must not change: any gradient, and collectives.
    """

    name = "measure-gradients"
    requires = frozenset({"reduced-gradients"})
    provides = frozenset({"measured-gradients"})
    excludes = frozenset({"measured-gradients", "offloaded-gradients", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        if not context.plan.measures_gradients:
            return
        results = outputs(gm)
        norms: list[tuple[Role | None, fx.Node]] = []
        for role, value in results:
            if isinstance(role, Gradient) and isinstance(role.of, Parameter) and isinstance(value, fx.Node):
                labels: Labels = {SUBJECT: f"gradient of {role.of.fqn}", SOURCE: SOURCE.get(value, "")}
                own = local_gradient(value)
                before = Builder(gm.graph, context.values, labels, after=own).call(SQUARED_NORM, own)
                labels = {**labels, REDUCES: role.of.fqn}
                after = Builder(gm.graph, context.values, labels, after=value).call(SQUARED_NORM, value)
                norms += [(SquaredNorm(role.of, reduced=False), before), (SquaredNorm(role.of, reduced=True), after)]
        set_outputs(gm, [*results, *norms])
