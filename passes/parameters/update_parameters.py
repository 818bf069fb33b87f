"""The optimizer's update in the backward graph: of each parameter once its gradient is reduced and nobody reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from shardgraph import ir
from shardgraph.ir.attributes import MADE_BY, ROLE, VALUE
from shardgraph.passes.analysis.liveness import Storage, storages_of
from shardgraph.passes.analysis.parameter_readers import Names, last_readers
from shardgraph.passes.analysis.places import on_host
from shardgraph.passes.base import Context, Graphs, GraphsPass, of_kind, sibling


@dataclass(frozen=True)
class UpdateParameters(GraphsPass):
    """Takes backward graphs; makes the ``update`` variant of each, with a further input, the updater, to which
    gradients of parameters are handed over instead of being results.

    That is done for those which are ready together in one place: when nothing reads the parameters afterwards, which
    ``saved`` values may be in the memory of, and neither their gradients. What is read until the end, or is in host
    memory, stays a result.

    Must not change: what is computed, nor its order.
    """

    saved: Mapping[ir.Role, Names]
    name = "update-parameters"
    requires = frozenset({"split", "reduced-gradients"})
    provides = frozenset({"updates"})
    excludes = frozenset({"local-gradients", "accumulated-gradients", "updates"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        for name in of_kind(graphs, "backward"):
            graphs[sibling(name, "update")] = _updating(graphs.pop(name), self.saved)


def _updating(gm: fx.GraphModule, saved: Mapping[ir.Role, Names]) -> fx.GraphModule:
    held = storages_of(gm)
    handed: dict[str, fx.Node] = {}
    for after, ready in list(_ready(gm, saved, held)):
        handed |= ready
        with gm.graph.inserting_after(after):
            node = gm.graph.call_function(ir.update, (None, tuple(ready), list(ready.values())))
        VALUE.set(node, None)
        MADE_BY.set(node, UpdateParameters.name)
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        updater = gm.graph.placeholder("updater")
    ROLE.set(updater, ir.Updater())
    for node in gm.graph.find_nodes(op="call_function", target=ir.update):
        node.args = (updater, *node.args[1:])
    ir.set_outputs(gm, [(role, value) for role, value in ir.outputs(gm) if not _is_handed(role, handed)])
    return gm


def _is_handed(role: ir.Role | None, handed: Mapping[str, fx.Node]) -> bool:
    return isinstance(role, ir.Gradient) and isinstance(role.of, ir.Parameter) and role.of.fqn in handed


def _ready(
    gm: fx.GraphModule, saved: Mapping[ir.Role, Names], held: Mapping[fx.Node, list[Storage]]
) -> Iterator[tuple[fx.Node, dict[str, fx.Node]]]:
    """The nodes after which parameters may be updated, with their gradients by name."""
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    end, hosted = gm.graph.output_node(), on_host(gm)
    memory, last = last_readers(gm, saved)
    touched: dict[Storage, int] = {}  # until when anything but the caller has what is in some memory
    for node in gm.graph.nodes:
        for storage in held[node]:
            users = (position[user] for user in node.users if user is not end)
            touched[storage] = max(touched.get(storage, 0), position[node], *users)
    ready: dict[int, dict[str, fx.Node]] = {}
    for role, value in ir.outputs(gm):
        if isinstance(role, ir.Gradient) and isinstance(role.of, ir.Parameter) and isinstance(value, fx.Node):
            (storage,) = held[value]
            reader = last.get(role.of.fqn, value)
            if reader is not end and not memory[value] and value not in hosted:
                ready.setdefault(max(touched[storage], position[reader]), {})[role.of.fqn] = value
    waiting: dict[str, fx.Node] = {}
    for node, at in position.items():
        waiting |= ready.get(at, {})
        if waiting and _computes(node.next, held):
            yield node, waiting
            waiting = {}


def _computes(node: fx.Node, held: Mapping[fx.Node, list[Storage]]) -> bool:
    """Whether a node does more than to say what is where."""
    given = {storage for each in node.all_input_nodes for storage in held[each]}
    return node.op == "output" or not (held[node] and given.issuperset(held[node])) or ir.is_wait(node)
