"""What runs once per step and not per microbatch: all-gathers of parameters that are kept, reductions of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from shardgraph.ir import (
    Accumulated,
    Gathered,
    Gradient,
    Parameter,
    Role,
    UnboundGraph,
    add_output,
    outputs,
    placeholders,
)
from shardgraph.ir.attributes import EQUALS, MEMORY_KIND, RECOMPUTE, REDUCES, new_placeholder
from shardgraph.passes.base import Context, Graphs, of_kind, sibling
from shardgraph.passes.parameters.accumulate_gradients import local_gradient


@dataclass(frozen=True)
class GatherOnce:
    """Takes the forward graphs of stages; moves the gathers of parameters that are kept for backward into a ``gather``
    graph per stage, which runs once per step.

    Must not change: gathers that backward repeats, which run for every microbatch.
    """

    name: ClassVar[str] = "gather-once"
    requires: ClassVar[frozenset[str]] = frozenset({"split", "sharded-parameters"})
    provides: ClassVar[frozenset[str]] = frozenset({"gathered-once"})
    excludes: ClassVar[frozenset[str]] = frozenset({"gathered-once", "overlapped"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        for name in of_kind(graphs, "forward"):
            gather = take_gathers(graphs[name])
            if gather is not None:  # the same, whether forward is recomputed or not
                graphs[sibling(name.replace("/recompute/", "/"), "gather")] = gather


@dataclass(frozen=True)
class ReduceOnce:
    """Takes the backward graphs of stages; copies the gradient reductions into a ``reduce`` graph per stage, which runs
    once per step. Must not change: backward, from which ``keep-gradients-local`` removes the reductions next.
    """

    name: ClassVar[str] = "reduce-once"
    requires: ClassVar[frozenset[str]] = frozenset({"split", "reduced-gradients"})
    provides: ClassVar[frozenset[str]] = frozenset({"reduced-once"})
    excludes: ClassVar[frozenset[str]] = frozenset({"reduced-once", "local-gradients", "overlapped"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        for name in of_kind(graphs, "backward"):
            reduce = None if "/recompute/" in name else reductions_of(graphs[name])
            if reduce is not None:
                graphs[sibling(name, "reduce")] = reduce


@dataclass(frozen=True)
class DropUntrained:
    """Takes backward graphs; removes those without results, because neither their stage nor an earlier one is trained.

    Must not change: the others.
    """

    name: ClassVar[str] = "drop-untrained"
    requires: ClassVar[frozenset[str]] = frozenset({"split"})
    provides: ClassVar[frozenset[str]] = frozenset()
    excludes: ClassVar[frozenset[str]] = frozenset()

    def run_on(self, graphs: Graphs, context: Context) -> None:
        for name in of_kind(graphs, "backward"):
            if not any(isinstance(value, fx.Node) for _, value in outputs(graphs[name])):
                del graphs[name]


def take_gathers(forward: fx.GraphModule) -> fx.GraphModule | None:
    """Move the gathers of parameters that are kept for backward out of ``forward``; returns the graph that runs them.

    It takes ``Parameter`` shards and returns ``Gathered`` parameters, which ``forward`` takes instead. None if no
    parameter is kept gathered. Gathers that backward repeats stay, for every microbatch.
    """
    named = {node.name: role for role, node in placeholders(forward).items() if isinstance(role, Parameter)}
    kept = [node for node in forward.graph.nodes if _is_whole(node) and not RECOMPUTE.of(node)]
    if not kept:
        return None
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    chains = [(named[EQUALS.of(node)], node, _chain(node)) for node in kept]
    for _, _, chain in chains:
        env[chain[0]] = graph.node_copy(chain[0])
    for _, _, chain in chains:
        for node in chain[1:]:
            env[node] = graph.node_copy(node, env.__getitem__)
    add_output(graph, [(Gathered(role.fqn), env[node]) for role, node, _ in chains])
    for role, node, chain in chains:
        with forward.graph.inserting_before(chain[0]):
            whole = new_placeholder(forward.graph, f"gathered_{chain[0].name}", Gathered(role.fqn), node)
        MEMORY_KIND.set(whole, "gathered")
        node.replace_all_uses_with(whole)
        for each in reversed(chain):
            if not each.users:
                forward.graph.erase_node(each)
    forward.graph.lint()
    return UnboundGraph(forward, graph)


def _is_whole(node: fx.Node) -> bool:
    return MEMORY_KIND.get(node) == "gathered" and node in EQUALS


def _chain(node: fx.Node) -> list[fx.Node]:
    """The nodes from a parameter's placeholder to its whole value."""
    chain = [node]
    while chain[-1].op != "placeholder":
        chain.append(chain[-1].all_input_nodes[0])
    return chain[::-1]


def reductions_of(backward: fx.GraphModule) -> fx.GraphModule | None:
    """The graph that reduces gradients accumulated over microbatches: ``Accumulated`` to ``Gradient``.

    It covers the parameters whose gradient ``backward`` reduces; None if there are none.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    results: list[tuple[Role, fx.Node]] = []
    for role, value in outputs(backward):
        if isinstance(role, Gradient) and isinstance(role.of, Parameter) and isinstance(value, fx.Node):
            local = local_gradient(value)
            if local is not value:
                env[local] = new_placeholder(graph, f"accumulated_{local.name}", Accumulated(role.of), local)
                results.append((role, value))
    if not results:
        return None
    for node in backward.graph.nodes:
        if node in REDUCES:
            env[node] = graph.node_copy(node, env.__getitem__)
    add_output(graph, [(role, env[value]) for role, value in results])
    graph.lint()
    return UnboundGraph(backward, graph)
