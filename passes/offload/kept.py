"""Values saved for backward that could leave the device between forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from shardgraph.ir import Forwarded, IntermediateBase, Output, Saved, outputs, placeholders
from shardgraph.ir.attributes import MEMORY_KIND, OFFLOADED_BY, ROLE
from shardgraph.passes.analysis.liveness import Storage, storages_of
from shardgraph.passes.recompute.values import layers_of


@dataclass(frozen=True)
class Kept:
    """A value saved for backward that has a storage of its own.

    ``value``, ``given``
        The node in forward, and the placeholder in backward.
    ``nbytes``
        The bytes of its storage.
    ``done``
        The last forward node that uses the storage.
    ``first``
        The first backward node that uses it.
    ``layer``
        The layer that computes it, ``""`` outside of layers.
    ``marked``
        The patterns of the annotations that name it.
    """

    value: fx.Node
    given: fx.Node
    nbytes: int
    done: fx.Node
    first: fx.Node
    layer: str
    marked: frozenset[str]


def kept_values(forward: fx.GraphModule, backward: fx.GraphModule) -> list[Kept]:
    """All such values, in the order of their last use in forward.

    Parameters, buffers, inputs and model outputs are left out, since they stay on the device anyway; so are gathered
    parameters, whose lifetime the plan sets (``reshard_after_forward``).
    """
    held, layers = storages_of(forward), layers_of(forward)
    given = placeholders(backward)
    saved = [(role, node) for role, node in outputs(forward) if isinstance(role, Saved) and isinstance(node, fx.Node)]
    times = Counter(storage for _, node in saved for storage in held[node])
    stays = set(_staying(forward, held))
    order = {node: i for i, node in enumerate(backward.graph.nodes)}
    done = _last_uses(forward, held)
    marked: dict[Storage, frozenset[str]] = {}
    for node in forward.graph.nodes:
        for storage in held[node]:
            marked[storage] = marked.get(storage, frozenset()) | OFFLOADED_BY.get(node, frozenset())
    found = []
    for role, node in saved:
        if len(held[node]) != 1 or not given[role].users or not isinstance(value := node.meta["val"], torch.Tensor):
            continue
        storage = held[node][0]
        whole = value.nbytes == storage.nbytes and times[storage] == 1
        if whole and storage not in stays:
            first = min(given[role].users, key=order.__getitem__)
            layer = layers.get(node, "")
            found.append(Kept(node, given[role], storage.nbytes, done[storage], first, layer, marked[storage]))
    position = {node: i for i, node in enumerate(forward.graph.nodes)}
    return sorted(found, key=lambda kept: position[kept.done])


def window_of(kept: Sequence[Kept]) -> int:
    """The bytes that may be on the device during copies: the largest layer's, without layers the largest value's."""
    layers: Counter[str] = Counter()
    for each in kept:
        layers[each.layer] += each.nbytes
    del layers[""]
    return max(layers.values(), default=max((each.nbytes for each in kept), default=0))


def _staying(forward: fx.GraphModule, held: dict[fx.Node, list[Storage]]) -> Iterator[Storage]:
    for node in forward.graph.nodes:
        given = node.op == "get_attr" or (node.op == "placeholder" and not isinstance(ROLE.of(node), Forwarded))
        if given or MEMORY_KIND.get(node) == "gathered":
            yield from held[node]
    for role, node in outputs(forward):
        if isinstance(role, (Output, IntermediateBase)) and isinstance(node, fx.Node):
            yield from held[node]


def _last_uses(gm: fx.GraphModule, held: dict[fx.Node, list[Storage]]) -> dict[Storage, fx.Node]:
    last: dict[Storage, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op != "output":
            for used in (node, *node.all_input_nodes):
                last |= dict.fromkeys(held[used], node)
    return last
