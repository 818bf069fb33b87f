"""Backward in two halves for zero-bubble schedules: gradients of a stage's inputs, then gradients of its weights.

Qi et al., 2023, "Zero Bubble Pipeline Parallelism", https://arxiv.org/abs/2401.10241.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from shardgraph.ir import Returned, Role, Saved, UnboundGraph, add_output, outputs, placeholders
from shardgraph.ir.attributes import CHUNK, new_placeholder
from shardgraph.passes.base import Context, Graphs, of_kind, sibling


@dataclass(frozen=True)
class SplitBackward:
    """Takes the backward graphs of stages; splits each into two halves, ``inputs`` and ``weights``.

    Must not change: what the halves compute together.
    """

    name: ClassVar[str] = "split-backward"
    requires: ClassVar[frozenset[str]] = frozenset({"split", "local-gradients"})
    provides: ClassVar[frozenset[str]] = frozenset({"split-backward"})
    excludes: ClassVar[frozenset[str]] = frozenset({"split-backward"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        for name in of_kind(graphs, "backward"):
            graphs[sibling(name, "inputs")], graphs[sibling(name, "weights")] = split_backward(graphs.pop(name))


def split_backward(gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """``(inputs, weights)``: the two halves of a stage's backward graph.

    ``inputs`` returns what the previous stage waits for (``Returned``) and, as further ``Saved`` values, the
    intermediates that ``weights`` needs; ``weights`` returns all other results. Each takes the inputs that it uses. If
    a previous stage waits, chunked computation is in ``inputs``, weight gradients included: saving the chunks would
    mean saving the whole.
    """
    results = [(role, value) for role, value in outputs(gm) if isinstance(value, fx.Node)]
    returned = [(role, value) for role, value in results if isinstance(role, Returned)]
    rest = [(role, value) for role, value in results if not isinstance(role, Returned)]
    chunks = [node for node in gm.graph.nodes if node in CHUNK] if returned else []
    first = _ancestors([*(value for _, value in returned), *chunks])
    second = _ancestors(value for _, value in rest) - first
    shared = {
        value: None for node in gm.graph.nodes if node in second for value in node.all_input_nodes if value in first
    }
    shared |= {value: None for _, value in rest if value in first}
    made = [value for value in shared if value.op == "call_function"]
    numbers = [role.index for role in placeholders(gm) if isinstance(role, Saved)]
    number = max(numbers, default=-1) + 1
    kept: list[tuple[Role | None, fx.Node]] = [(Saved(number + i), value) for i, value in enumerate(made)]
    inputs = _graph(gm, first, {}, [*returned, *kept])
    weights = _graph(gm, second, {value: role for role, value in kept if role is not None}, rest)
    return inputs, weights


def _ancestors(values: Iterable[fx.Node]) -> set[fx.Node]:
    stack, found = list(values), set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _graph(
    gm: fx.GraphModule, nodes: set[fx.Node], given: dict[fx.Node, Role], results: list[tuple[Role | None, fx.Node]]
) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = graph.node_copy(node)
    for node, role in given.items():
        env[node] = new_placeholder(graph, f"saved_{node.name}", role, node)
    for node in gm.graph.nodes:
        if node.op == "get_attr" or (node in nodes and node.op == "call_function"):
            env[node] = graph.node_copy(node, env.__getitem__)
    add_output(graph, [(role, env[value]) for role, value in results])
    for node in [n for n in reversed(graph.nodes) if n.op in ("placeholder", "get_attr") and not n.users]:
        graph.erase_node(node)
    graph.lint()
    return UnboundGraph(gm, graph)
