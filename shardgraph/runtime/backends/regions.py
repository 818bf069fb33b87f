"""Regions of a bound graph: computation between collectives and copies, of one layer, for a backend to compile.

A graph whose regions are calls starts and awaits everything where the schedule has put it. Equal layers have equal
regions, which are compiled once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardgraph import ir, torch_api
from shardgraph.ir.attributes import IN_PLACE
from shardgraph.ir.operations import is_view
from shardgraph.passes.analysis.names import layer_of, module_of
from shardgraph.passes.analysis.overwrites import REDUCTIONS, write_in_place
from shardgraph.runtime.backends.gloo import add_parts

aten = torch.ops.aten

_BUCKETS = {ir.buckets.pack, ir.buckets.unpack, ir.buckets.unpack_parts}
_TRACED = {operator.getitem, *_BUCKETS, ir.pad_shard, ir.take_part, add_parts}
"""Functions that do what operations of PyTorch do and nothing else. What others do is not known: they are called."""

_LEAST = 2
"""Operations beside views that a region has at least: one alone is a kernel as it is."""


@dataclass(eq=False)
class Region:
    """Operations in the order of the graph. Its inputs and results are known when it has all of them."""

    layer: str
    nodes: list[fx.Node] = field(default_factory=list)

    @cached_property
    def inputs(self) -> list[fx.Node]:
        """What it reads, in the order of first reads."""
        own = set(self.nodes)
        return list(dict.fromkeys(read for node in self.nodes for read in node.all_input_nodes if read not in own))

    @cached_property
    def results(self) -> list[fx.Node]:
        """What others read of it."""
        own = set(self.nodes)
        return [node for node in self.nodes if not own.issuperset(node.users)]

    @property
    def is_worth_it(self) -> bool:
        """Whether compiling it changes anything."""
        return sum(not is_view(node) for node in self.nodes) >= _LEAST

    def text(self) -> tuple[Any, ...]:
        """Equal for regions that compute the same of inputs that are alike."""
        places = {node: _Place(i) for i, node in enumerate([*self.inputs, *self.nodes])}
        lines = [(node.target, repr(fx.map_arg((node.args, node.kwargs), places.__getitem__))) for node in self.nodes]
        return (*lines, *map(places.__getitem__, self.results))

    def graph(self, gm: fx.GraphModule) -> fx.GraphModule:
        """The region of ``gm`` as a graph of its own."""
        graph = fx.Graph()
        env = {node: graph.placeholder(node.name) for node in self.inputs}
        for node in self.nodes:
            env[node] = ir.copy_node(graph, node, env.__getitem__)
        graph.output(tuple(map(env.__getitem__, self.results)))
        return ir.UnboundGraph(gm, graph)


@dataclass(frozen=True)
class _Place:
    number: int


Run = Callable[[list[Any]], Sequence[Any]]
"""Runs a graph on a list of inputs, which it empties, so that each is freed at its last use."""


def call_regions(gm: fx.GraphModule, compiled: Callable[[Region], Run]) -> fx.GraphModule:
    """The graph with calls of its regions, each ``compiled`` once for all that are equal."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    made: dict[tuple[Any, ...], Run] = {}
    for unit in regions_of(gm):
        if isinstance(unit, fx.Node) or not unit.is_worth_it:
            for node in [unit] if isinstance(unit, fx.Node) else unit.nodes:
                env[node] = ir.copy_node(graph, node, env.__getitem__)
                if node.target in REDUCTIONS and IN_PLACE.get(node) and _is_alone(node.args[0]):
                    write_in_place(env[node])
            continue
        if (text := unit.text()) not in made:
            made[text] = compiled(unit)
        given = graph.call_function(boxed_inputs, tuple(map(env.__getitem__, unit.inputs)))
        called = graph.call_function(made[text], (given,))
        for i, node in enumerate(unit.results):
            env[node] = torch_api.append_node(graph, "call_function", operator.getitem, (called, i), {}, node.name)
    return ir.UnboundGraph(gm, graph)


def boxed_inputs(*values: Any) -> list[Any]:
    """A list for a region to empty, so that each of its inputs is freed at its last use there."""
    return list(values)


def regions_of(gm: fx.GraphModule) -> list[fx.Node | Region]:
    """The nodes of a graph in order, those that a compiler may take in regions.

    A region ends where something starts, is awaited or called, and where a layer begins or ends that is made of further
    modules. Views of what has just arrived are in none, since equal layers are in different places of their buckets.
    """
    places = {node: module_of(node) for node in gm.graph.nodes if node.op == "call_function"}
    layers = {node: layer_of(path) for node, path in places.items()}
    composed = {layer for node, layer in layers.items() if layer and f"{places[node]}." != layer}
    around = {layer[:i] for layer in composed for i, letter in enumerate(layer) if letter == "."} | {""}

    units: list[fx.Node | Region] = []
    within: dict[fx.Node, Region] = {}
    arrived: set[fx.Node] = set()
    begun: set[str] = set()
    region = Region("")

    def end() -> Region:
        if region.nodes:
            units.append(region)
        return Region("")

    for node in gm.graph.nodes:
        if node.target is operator.getitem and node.args[0] in within:
            within[node] = within[node.args[0]]  # which has all its results, whatever is between
            within[node].nodes.append(node)
        elif node.op in ("placeholder", "get_attr"):
            units.append(node)
        elif _is_taken(node) and arrived.issuperset(node.all_input_nodes):
            arrived.add(node)
            units.append(node)
        elif not _is_computation(node):
            region = end()
            units.append(node)
            if ir.is_wait(node):
                arrived.add(node)
        else:
            layer = layers.get(node, "")
            layer = layer if layer in composed else ""
            begins = layer and layer not in begun
            leaves = not layer and region.layer and places[node] not in around
            if begins or leaves:
                region = end()
            region.layer = layer or region.layer
            begun.add(layer)
            region.nodes.append(node)
            within[node] = region
    end()
    return units


def _is_alone(value: Any) -> bool:
    """Whether nothing else is in the memory of a value if it is in that of no other by its graph: a compiler may place
    what is joined to others where they are joined."""
    while is_view(value):
        value = value.args[0]
    joins = value.target in (ir.buckets.pack, aten.cat.default, aten.stack.default)
    return not joins or all(len(each.users) == 1 for each in value.args[0])


def _is_taken(node: fx.Node) -> bool:
    """Whether an operation takes a tensor out of another, or sees it in another shape."""
    return is_view(node) or node.target in (ir.buckets.unpack, ir.buckets.unpack_parts)


def _is_computation(node: fx.Node) -> bool:
    """Whether a compiler may take an operation: it makes tensors of tensors, and does nothing else."""
    target, values = node.target, [each.meta.get("val") for each in node.all_input_nodes]
    if node.op != "call_function" or not all(isinstance(each, torch.Tensor) for each in values):
        return False
    if not isinstance(node.meta.get("val"), torch.Tensor) and not all(map(is_view, node.users)):
        return False
    if target in _TRACED or (values and ir.fused.is_kernel(target, values[0].device.type)):
        return True
    if not isinstance(target, torch_api.OpOverload) or ir.is_started(node) or ir.is_wait(node):
        return False
    draws_aside = target.namespace == "shardgraph" and torch.Tag.nondeterministic_seeded in target.tags
    return not (target._schema.is_mutable or draws_aside or target is aten.new_empty.default)
