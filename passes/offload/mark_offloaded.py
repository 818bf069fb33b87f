"""Marks the values to offload to host memory if they are saved, and makes each storage be saved as one value."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from shardgraph.ir import Forwarded
from shardgraph.ir.attributes import MEMORY_KIND, MODULES, OFFLOADED_BY, RECOMPUTE, ROLE
from shardgraph.ir.operations import makes_view
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.partition.split import forward_nodes
from shardgraph.plans.annotations.kinds import offload
from shardgraph.plans.annotations.match import matches
from shardgraph.plans.plan import Plan


@dataclass(frozen=True)
class MarkOffloaded(Pass):
    """Takes a joint graph; marks with ``OFFLOADED_BY``, a set of patterns, the values that ``offload()`` names.

    These are the values the module computes or, if backward recomputes them, the values they are recomputed from. If
    anything is offloaded, by annotations or by the plan, forward's views get ``RECOMPUTE``: the split then saves their
    base, so that each storage is saved and moved as one value, however many views of it backward reads. Recomputing a
    view takes no memory.

    Must not change: the computation.
    """

    name = "mark-offloaded"
    requires = frozenset({"recomputed"})
    provides = frozenset({"marked-offloaded"})
    excludes = frozenset({"split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        if not offloads(context.plan):
            return
        patterns = [pattern for pattern, annotation in context.plan.annotations if isinstance(annotation, offload)]
        inside = forward_nodes(gm)
        views = _views(gm, inside)
        for node in gm.graph.nodes:
            if node.op == "call_function" and node in inside and node not in views:
                around = ["", *(path for path, _ in MODULES.get(node, {}).values())]
                marks = {pattern for pattern in patterns if any(matches(pattern, path) for path in around)}
                for each in _kept_for(node) if marks else ():
                    OFFLOADED_BY.set(each, OFFLOADED_BY.get(each, frozenset()) | marks)
        for view, base in views.items():
            kept = base.op == "call_function" or isinstance(ROLE.get(base), Forwarded)
            if kept and not RECOMPUTE.get(base):
                RECOMPUTE.set(view, True)


def offloads(plan: Plan) -> bool:
    """Whether any activations may be offloaded."""
    return plan.offload.activations or any(isinstance(annotation, offload) for _, annotation in plan.annotations)


def _kept_for(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes to save so that backward has the value of ``node``: itself, or what it is recomputed from."""
    stack, seen = [node], {node}
    while stack:
        each = stack.pop()
        if RECOMPUTE.get(each):
            stack += [operand for operand in each.all_input_nodes if operand not in seen]
            seen.update(each.all_input_nodes)
        else:
            yield each


def _views(gm: fx.GraphModule, inside: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Forward's views, each with its base, which is not a view."""
    views: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or node not in inside or node in MEMORY_KIND or not node.all_input_nodes:
            continue
        viewed = node.all_input_nodes[0]
        is_view = node.target is torch.ops.aten._unsafe_view.default or makes_view(node.target)
        if is_view or (node.target is operator.getitem and viewed in views):  # a piece of what returns several views
            views[node] = views.get(viewed, viewed)
    return views
