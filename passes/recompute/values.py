"""Forward as recomputation sees it: operations, the storages they produce, and the readers of those."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from shardgraph.ir import Gradient, Mutation, Parameter, local_part, outputs, placeholders
from shardgraph.ir.operations import makes_view
from shardgraph.passes.analysis.liveness import Storage, storages_of
from shardgraph.passes.analysis.names import module_of
from shardgraph.passes.analysis.random_state import draws
from shardgraph.passes.partition.split import forward_nodes


@dataclass(frozen=True)
class Values:
    """The values that the forward half of a joint graph produces.

    ``makes`` are the storages that each operation produces, in order, ``reads`` those of other operations that it
    reads, and ``maker`` is the operation that produces a storage. Nodes that produce none (views, waits) are not
    operations. ``held`` are the storages of each node's value, if operations produce all of them; ``demanded`` are
    those that backward reads. For ``once`` see :func:`computed_once`, for ``layer`` :func:`layers_of`.
    """

    makes: dict[fx.Node, list[Storage]]
    reads: dict[fx.Node, list[Storage]]
    maker: dict[Storage, fx.Node]
    held: dict[fx.Node, list[Storage]]
    demanded: set[Storage]
    once: set[fx.Node]
    layer: dict[fx.Node, str]

    def leaving(self) -> set[fx.Node]:
        """The operations whose results are read outside their layer."""
        readers = ((node, storage) for node, taken in self.reads.items() for storage in taken)
        return {self.maker[s] for node, s in readers if self.layer[self.maker[s]] != self.layer[node]}

    def kept(self, again: Collection[fx.Node]) -> int:
        """The bytes saved for backward if it recomputes the operations ``again``."""
        needed = self.demanded.union(*(self.reads[node] for node in again))
        return sum(storage.nbytes for storage in needed if self.maker[storage] not in again)

    def dropped(self, again: Collection[fx.Node]) -> int:
        """The bytes that backward reads and that are not saved if it recomputes the operations ``again``."""
        return sum(storage.nbytes for storage in self.demanded if self.maker[storage] in again)

    def together_with(self, operations: Collection[fx.Node]) -> list[fx.Node]:
        """``operations`` with the views and pieces of their results: all nodes that are recomputed with them."""
        return [node for node, held in self.held.items() if all(self.maker[each] in operations for each in held)]


def values_of(gm: fx.GraphModule, granule: int = 1) -> Values:
    """The forward values of ``gm``, with each storage rounded up to ``granule`` bytes."""
    inside = forward_nodes(gm)
    stored = storages_of(gm, granule)
    values = Values({}, {}, {}, {}, set(), computed_once(gm), layers_of(gm))
    inputs = {storage for node in gm.graph.nodes if node.op in ("placeholder", "get_attr") for storage in stored[node]}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        read = dict.fromkeys(s for operand in node.all_input_nodes for s in stored[operand] if s in values.maker)
        if node not in inside:
            values.demanded.update(read)
            continue
        if new := [s for s in dict.fromkeys(stored[node]) if s not in values.maker and s not in inputs]:
            values.makes[node], values.reads[node] = new, list(read)
            values.maker.update(dict.fromkeys(new, node))
        if stored[node] and all(s in values.maker for s in stored[node]):
            values.held[node] = stored[node]
    for role, value in outputs(gm):
        if isinstance(role, Gradient) and value in values.held:
            values.demanded.update(values.held[value])
    return values


def computed_once(gm: fx.GraphModule) -> set[fx.Node]:
    """The forward nodes that backward must not recompute, because their values would differ.

    They draw random numbers or read a buffer that forward writes; pieces of such values are included.
    """
    inside = forward_nodes(gm)
    written = {placeholders(gm)[role.of] for role, _ in outputs(gm) if isinstance(role, Mutation)}
    once: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or node not in inside:
            continue
        piece = node.target in (operator.getitem, local_part) and node.args[0] in once
        if makes_view(node.target) and node.args[0] in written:
            written.add(node)
        elif draws(node) or piece or not written.isdisjoint(node.all_input_nodes):
            once.add(node)
    return once


_NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")


def layers_of(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """The layer of each operation, such as ``"model.layers.7"``; ``""`` outside of layers.

    A layer is the outermost module in a list of at least two that hold two or more matrices each.
    """
    matrices: Counter[str] = Counter()
    for role, node in placeholders(gm).items():
        if isinstance(role, Parameter) and node.meta["val"].dim() > 1:
            matrices.update(_numbered(role.fqn))
    lists = Counter(path.rpartition(".")[0] for path, count in matrices.items() if count > 1)
    layers = {path for path, count in matrices.items() if count > 1 and lists[path.rpartition(".")[0]] > 1}
    nodes = (node for node in gm.graph.nodes if node.op == "call_function")
    return {node: next((path for path in _numbered(module_of(node)) if path in layers), "") for node in nodes}


def _numbered(path: str) -> list[str]:
    """The modules enclosing ``path``, itself included, whose own name is a number, outermost first."""
    return [path[: number.end()] for number in _NUMBER.finditer(path)]
