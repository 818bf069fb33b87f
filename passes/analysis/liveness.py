"""Predicted peak memory: exact liveness of the storages of one graph, in program order.

What the eager executor allocates is known before it runs: each node's results, once per storage however
many views it has, freed after the last node that uses any of them. Not seen is what a kernel allocates
and frees inside (workspaces), and what the allocator adds (rounding, fragmentation).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardgraph.ir import (
    ALL_REDUCE,
    WAIT,
    Accumulated,
    Buffer,
    Gradient,
    Input,
    IntermediateBase,
    Mutation,
    Output,
    Parameter,
    Saved,
    Tangent,
    is_collective,
    local_chunk,
    outputs,
    pad_shard,
    trim_shard,
)

KINDS = {
    Parameter: "parameters",
    Buffer: "buffers",
    Input: "inputs",
    Tangent: "gradients",
    Gradient: "gradients",
    Accumulated: "gradients",
    Saved: "saved",
    Mutation: "buffers",
    Output: "activations",
    IntermediateBase: "activations",
}

# Alias their first argument although their schema does not say so.
_UNDECLARED_VIEWS = frozenset({WAIT, trim_shard, local_chunk, torch.ops.aten._unsafe_view.default})


@dataclass(frozen=True)
class MemoryProfile:
    """The memory of one run of a graph, on the rank whose shapes its values have (rank 0).

    ``peak_bytes``, ``peak_node``
        The most bytes live at once, and the first node that computes at that moment.
    ``timeline``
        Bytes live as each node ends, while what it used last is not yet freed; its maximum is the peak.
    ``composition``
        Bytes at the peak by kind: parameters, gathered parameters, buffers, inputs, saved, activations
        (what the model returns), gradients, temporaries (all else).
    """

    peak_bytes: int
    peak_node: str
    timeline: tuple[int, ...]
    composition: dict[str, int]


def profile_memory(gm: fx.GraphModule) -> MemoryProfile:
    """Follow every storage of ``gm`` from the node that makes it to the last that uses a view of it.

    Inputs are there from the start. Parameters, buffers and the user's inputs belong to the caller and stay;
    saved values and tangents are handed over and die after their last use. Results live to the end. The input of a
    collective that is under way lives until its wait, save for an all-reduce, which works on a copy.
    """
    nodes = list(gm.graph.nodes)
    storages = _storages(nodes)
    _set_kinds(gm, storages)
    _set_deaths(nodes, storages)
    distinct = {id(storage): storage for held in storages.values() for storage in held}.values()

    change = [0] * (len(nodes) + 1)
    for storage in distinct:
        change[storage.birth] += storage.nbytes
        change[storage.death + 1] -= storage.nbytes
    timeline, live = [], 0
    for delta in change[:-1]:
        live += delta
        timeline.append(live)

    peak = max(timeline)
    at = timeline.index(peak)
    composition: Counter[str] = Counter()
    for storage in distinct:
        if storage.birth <= at <= storage.death:
            composition[storage.kind] += storage.nbytes
    return MemoryProfile(peak, nodes[at].name, tuple(timeline), {k: v for k, v in composition.items() if v})


@dataclass
class _Storage:
    """One allocation; it is live from node ``birth`` to node ``death``, both included."""

    nbytes: int
    birth: int
    death: int = 0
    kind: str = "temporaries"


# -- which storages a node's value holds -----------------------------------------------------------


def _storages(nodes: list[fx.Node]) -> dict[fx.Node, list[_Storage]]:
    """The storages of each node's value, one per tensor in it; views share those of their base."""
    held: dict[fx.Node, list[_Storage]] = {}
    given: dict[torch.UntypedStorage, _Storage] = {}
    for index, node in enumerate(nodes):
        tensors = _tensors(node.meta.get("val"))
        if node.op in ("placeholder", "get_attr"):
            # Inputs whose values share a storage are views of each other: a saved tensor and its transpose.
            held[node] = [given.setdefault(t.untyped_storage(), _Storage(_nbytes(t), 0)) for t in tensors]
        elif node.op == "output":
            held[node] = []
        elif node.target is operator.getitem:
            held[node] = _element(node, held)
        else:
            held[node] = [
                held[base][0] if base is not None and held[base] else _Storage(_nbytes(tensor), index)
                for value, base in _results(node)
                for tensor in _tensors(value)
            ]
    return held


def _element(node: fx.Node, held: dict[fx.Node, list[_Storage]]) -> list[_Storage]:
    source, position = node.args
    values = source.meta.get("val")
    before = len(_tensors(values[:position]))
    return held[source][before : before + len(_tensors(values[position]))]


def _results(node: fx.Node) -> list[tuple[Any, fx.Node | None]]:
    """What the node's operation returns, each value with the argument whose storage it shares, if any."""
    value = node.meta.get("val")
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if node.target in _UNDECLARED_VIEWS:
        return [(value, first)]
    if node.target is pad_shard:
        whole = first is not None and first.meta["val"].shape[0] == node.args[1]
        return [(value, first if whole else None)]
    schema = getattr(node.target, "_schema", None)
    if schema is None or not isinstance(value, (tuple, list, torch.Tensor)):
        return [(value, None)]
    values = [value] if len(schema.returns) == 1 else value  # the one may be a list of views, as of split
    return [(v, _aliased_argument(node, schema, r)) for v, r in zip(values, schema.returns, strict=True)]


def _aliased_argument(node: fx.Node, schema: Any, result: Any) -> fx.Node | None:
    if result.alias_info is None:
        return None
    wanted = result.alias_info.before_set
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and (not wanted or wanted & info.before_set):
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return value if isinstance(value, fx.Node) else None
    return None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


# -- how long a storage lives, and what it is ------------------------------------------------------


def _set_deaths(nodes: list[fx.Node], storages: dict[fx.Node, list[_Storage]]) -> None:
    """A storage dies after the last use of the last value that holds it."""
    index = {node: i for i, node in enumerate(nodes)}
    end = len(nodes) - 1
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            handed_over = isinstance(node.meta.get("role"), (Saved, Tangent)) and node.users
            last = max(index[user] for user in node.users) if handed_over else end
        else:
            last = max((index[user] for user in _uses(node)), default=index[node])
        for storage in storages[node]:
            storage.death = max(storage.death, last)


def _uses(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes until which the node's value is needed."""
    for user in node.users:
        yield user
        if is_collective(user) and user.target is not ALL_REDUCE:
            yield from user.users


def _set_kinds(gm: fx.GraphModule, storages: dict[fx.Node, list[_Storage]]) -> None:
    """Name each storage by its most telling node; the later a rule stands, the more it tells."""
    nodes = list(gm.graph.nodes)
    rules: list[tuple[fx.Node, str]] = []
    rules += [(node, "gradients") for node in nodes if "reduces" in node.meta]
    results = [(role, value) for role, value in outputs(gm) if role is not None and isinstance(value, fx.Node)]
    rules += sorted(((value, KINDS[type(role)]) for role, value in results), key=lambda rule: rule[1] == "saved")
    rules += [(node, "gathered parameters") for node in nodes if node.meta.get("kind") == "gathered"]
    rules += [(node, "buffers") for node in nodes if node.op == "get_attr"]
    rules += [(node, KINDS[type(node.meta["role"])]) for node in nodes if node.op == "placeholder"]
    for node, kind in rules:
        for storage in storages[node]:
            storage.kind = kind
