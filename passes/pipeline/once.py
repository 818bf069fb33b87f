"""What runs once per step and not per microbatch: all-gathers of parameters that are kept, reductions of gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardgraph import ir
from shardgraph.ir.attributes import EQUALS, MEMORY_KIND, RECOMPUTE, new_placeholder
from shardgraph.ir.subgraph import subgraph
from shardgraph.passes.base import Context, Graphs, GraphsPass, of_kind, sibling
from shardgraph.passes.parameters.accumulate_gradients import reductions_of


@dataclass(frozen=True)
class GatherOnce(GraphsPass):
    """Takes the forward graphs of stages; moves the gathers of parameters that are kept for backward into a ``gather``
    graph per stage, which runs once per step.

    Must not change: gathers that backward repeats, which run for every microbatch.
    """

    name = "gather-once"
    requires = frozenset({"split", "sharded-parameters"})
    provides = frozenset({"gathered-once"})
    excludes = frozenset({"gathered-once", "scheduled"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        for name in of_kind(graphs, "forward"):
            if gather := _take_gathers(graphs[name]):  # the same, whether forward is recomputed or not
                graphs[sibling(name.replace("/recompute/", "/"), "gather")] = gather


@dataclass(frozen=True)
class ReduceOnce(GraphsPass):
    """Takes the backward graphs of stages; copies the gradient reductions into a ``reduce`` graph per stage, which runs
    once per step. Must not change: backward, from which ``keep-gradients-local`` removes the reductions next.
    """

    name = "reduce-once"
    requires = frozenset({"split", "reduced-gradients"})
    provides = frozenset({"reduced-once"})
    excludes = frozenset({"reduced-once", "local-gradients", "scheduled"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        for name in of_kind(graphs, "backward"):
            if "/recompute/" not in name and (reduce := reductions_of(graphs[name])):
                graphs[sibling(name, "reduce")] = reduce


@dataclass(frozen=True)
class DropUntrained(GraphsPass):
    """Takes backward graphs; removes those without results, because neither their stage nor an earlier one is trained.

    Must not change: the others.
    """

    name = "drop-untrained"
    requires = frozenset({"split"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        for name in of_kind(graphs, "backward"):
            if not any(isinstance(value, fx.Node) for _, value in ir.outputs(graphs[name])):
                del graphs[name]


def _take_gathers(forward: fx.GraphModule) -> fx.GraphModule | None:
    """Move gathers from ``forward``, which then takes ``Gathered`` parameters, to a graph that returns them, if any."""
    named = {node.name: role for role, node in ir.placeholders(forward).items() if isinstance(role, ir.Parameter)}
    gathered = [node for node in forward.graph.nodes if MEMORY_KIND.get(node) == "gathered"]
    kept = [node for node in gathered if node in EQUALS and not RECOMPUTE.of(node)]
    if not kept:
        return None
    roles = [ir.Gathered(named[EQUALS.of(node)].fqn) for node in kept]
    chains = [_chain(node) for node in kept]
    gather = subgraph(forward, [node for chain in chains for node in chain], (), list(zip(roles, kept, strict=True)))
    for role, node, chain in zip(roles, kept, chains, strict=True):
        with forward.graph.inserting_before(chain[0]):
            whole = new_placeholder(forward.graph, f"gathered_{chain[0].name}", role, node)
        MEMORY_KIND.set(whole, "gathered")
        node.replace_all_uses_with(whole)
        for each in reversed(chain):
            if not each.users:
                forward.graph.erase_node(each)
    forward.graph.lint()
    return gather


def _chain(node: fx.Node) -> list[fx.Node]:
    """The nodes from a parameter's placeholder to its whole value."""
    chain = [node]
    while chain[-1].op != "placeholder":
        chain.append(chain[-1].all_input_nodes[0])
    return chain[::-1]
