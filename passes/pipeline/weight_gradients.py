"""Backward in two halves for zero-bubble schedules (Qi et al., 2023, https://arxiv.org/abs/2401.10241)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from shardgraph import ir
from shardgraph.ir.attributes import CHUNK
from shardgraph.ir.subgraph import subgraph
from shardgraph.passes.base import Context, Graphs, GraphsPass, of_kind, sibling


@dataclass(frozen=True)
class SplitBackward(GraphsPass):
    """Takes the backward graphs of stages; splits each into gradients of the stage's ``inputs`` and of its ``weights``.

    ``inputs`` returns what the previous stage waits for (``Returned``) and, as further ``Saved`` values, the
    intermediates that ``weights`` needs; ``weights`` returns all other results. Each takes the inputs that it uses. If
    a previous stage waits, chunked computation is in ``inputs``, weight gradients included: saving the chunks would
    mean saving the whole.

    Must not change: what the halves compute together.
    """

    name = "split-backward"
    requires = frozenset({"split", "local-gradients"})
    provides = frozenset({"split-backward"})
    excludes = frozenset({"split-backward"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        for name in of_kind(graphs, "backward"):
            graphs[sibling(name, "inputs")], graphs[sibling(name, "weights")] = _split_backward(graphs.pop(name))


def _split_backward(gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    results = [(role, value) for role, value in ir.outputs(gm) if isinstance(value, fx.Node)]
    returned = [(role, value) for role, value in results if isinstance(role, ir.Returned)]
    rest = [(role, value) for role, value in results if not isinstance(role, ir.Returned)]
    chunks = [node for node in gm.graph.nodes if node in CHUNK] if returned else []
    first = _with_ancestors(gm, [*(value for _, value in returned), *chunks])
    second = _with_ancestors(gm, (value for _, value in rest))
    own = [node for node in gm.graph.nodes if node in second and node not in first]
    shared = dict.fromkeys(value for node in own for value in node.all_input_nodes if value in first)
    shared |= {value: None for _, value in rest if value in first}
    saved = [value for value in shared if value.op == "call_function"]
    unused = 1 + max((role.index for role in ir.placeholders(gm) if isinstance(role, ir.Saved)), default=-1)
    saved_results = [(ir.Saved(unused + i), value) for i, value in enumerate(saved)]
    saved_inputs = [(f"saved_{value.name}", role, value) for role, value in saved_results]
    inputs = subgraph(gm, [node for node in gm.graph.nodes if node in first], (), [*returned, *saved_results])
    nodes = {*own, *shared}.difference(saved)
    weights = subgraph(gm, [node for node in gm.graph.nodes if node in nodes], saved_inputs, rest)
    return inputs, weights


def _with_ancestors(gm: fx.GraphModule, values: Iterable[fx.Node]) -> set[fx.Node]:
    nodes = set(values)
    for node in reversed(gm.graph.nodes):
        if node in nodes:
            nodes.update(node.all_input_nodes)
    return nodes
