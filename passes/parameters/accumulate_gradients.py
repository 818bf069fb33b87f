"""Gradient accumulation without a reduction per microbatch: variants of the backward graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardgraph.ir import (
    Accumulated,
    Gradient,
    Parameter,
    Role,
    SquaredNorm,
    buckets,
    copy_graph,
    outputs,
    set_outputs,
)
from shardgraph.ir.attributes import REDUCES, VALUE, Change, carried, new_placeholder, write
from shardgraph.ir.subgraph import subgraph
from shardgraph.passes.base import Context, Graphs, GraphsPass, Pass
from shardgraph.passes.builder import Builder
from shardgraph.passes.parameters.rewrite import replace_results


@dataclass(frozen=True)
class KeepGradientsLocal(Pass):
    """Takes a backward graph; makes it the ``no_sync`` variant, which returns whole, unreduced gradients.

    Squared norms of reduced gradients are no results of it.

    Must not change: gradients of inputs, and of parameters whose gradients are not reduced.
    """

    name = "keep-gradients-local"
    requires = frozenset({"split", "reduced-gradients"})
    provides = frozenset({"local-gradients"})
    excludes = frozenset({"local-gradients", "accumulated-gradients"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        replace_results(gm, Gradient, Parameter, lambda _, value: local_gradient(value))
        set_outputs(gm, [(role, value) for role, value in outputs(gm) if not _of_reduced(role)])
        for node in [n for n in reversed(gm.graph.nodes) if n in REDUCES]:
            gm.graph.erase_node(node)


@dataclass(frozen=True)
class AddAccumulated(Pass):
    """Takes a backward graph; makes it the variant that ends a ``no_sync`` run: it also takes the local gradients of
    earlier microbatches (role ``Accumulated``) and adds them to its own before reducing.

    Must not change: gradients that are not reduced.
    """

    name = "add-accumulated"
    requires = frozenset({"split", "reduced-gradients"})
    provides = frozenset({"accumulated-gradients"})
    excludes = frozenset({"local-gradients", "accumulated-gradients"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        first = next(iter(gm.graph.nodes))
        for role, value in outputs(gm):
            if not (isinstance(role, Gradient) and isinstance(role.of, Parameter) and isinstance(value, fx.Node)):
                continue
            local = local_gradient(value)
            if local is value:
                continue
            reductions = [user for user in local.users if user in REDUCES]
            with gm.graph.inserting_before(first):
                earlier = new_placeholder(gm.graph, f"accumulated_{local.name}", Accumulated(role.of), local)
            build = Builder(gm.graph, context.values, carried(Change.MERGED, local), after=local)
            total = build.call(torch.ops.aten.add.Tensor, local, earlier)
            for user in reductions:
                user.replace_input_with(local, total)


@dataclass(frozen=True)
class ReduceAlone(GraphsPass):
    """Takes backward graphs; replaces each by a graph of its reductions alone, of local gradients that it takes (role
    ``Accumulated``). Other gradients are no results of it.

    Must not change: how they are reduced.
    """

    name = "reduce-alone"
    requires = frozenset({"split", "reduced-gradients"})
    provides = frozenset({"accumulated-gradients"})
    excludes = frozenset({"local-gradients", "accumulated-gradients"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        for name, gm in graphs.items():
            graphs[name] = reductions_of(gm) or subgraph(gm, [], (), [])


def reductions_of(backward: fx.GraphModule) -> fx.GraphModule | None:
    """The graph from ``Accumulated`` to each ``Gradient`` that ``backward`` reduces; None if it reduces none."""
    inputs: list[tuple[str, Role, fx.Node]] = []
    results: list[tuple[Role, fx.Node]] = []
    for role, value in outputs(backward):
        if isinstance(role, Gradient) and isinstance(role.of, Parameter) and isinstance(value, fx.Node):
            local = local_gradient(value)
            if local is not value:
                inputs.append((f"accumulated_{local.name}", Accumulated(role.of), local))
                results.append((role, value))
    if not results:
        return None
    results += [(role, value) for role, value in outputs(backward) if _of_reduced(role)]
    return subgraph(backward, [node for node in backward.graph.nodes if node in REDUCES], inputs, results)


def adding_to_earlier(backward: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that returns unreduced gradients, for microbatches after the first: it takes the gradients of
    those before (role ``Accumulated``), and adds its own to each as soon as it has it, so that no microbatch holds a
    second set of gradients."""
    gm = copy_graph(backward)
    first = next(iter(gm.graph.nodes))
    body = next(node for node in gm.graph.nodes if node.op != "placeholder")

    def added(fqn: str, own: fx.Node) -> fx.Node:
        with gm.graph.inserting_before(first):
            earlier = new_placeholder(gm.graph, f"accumulated_{own.name}", Accumulated(Parameter(fqn)), own)
        with gm.graph.inserting_before(body if own.op == "placeholder" else own.next):
            total = gm.graph.call_function(torch.ops.aten.add.Tensor, (earlier, own))
        write(total, carried(Change.MERGED, own) | {VALUE: own.meta["val"]})
        return total

    replace_results(gm, Gradient, Parameter, added)
    return gm


def _of_reduced(role: Role | None) -> bool:
    """Whether a result is measured of a reduced gradient."""
    return isinstance(role, SquaredNorm) and role.reduced


def local_gradient(reduced: fx.Node) -> fx.Node:
    """This rank's own gradient, given the last node of the chain that reduces it."""
    node: Any = reduced
    while node in REDUCES:
        node = buckets.packed_as(node) or node.args[0]
    gradient: fx.Node = node
    return gradient
