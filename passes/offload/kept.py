"""Values saved for backward that could leave the device between forward and backward."""

from __future__ import annotations

from collections import Counter, defaultdict
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
    """A value saved for backward that has a storage of its own, of ``nbytes`` bytes.

    ``value`` is the node in forward, ``placeholder`` that in backward. ``done`` is the last forward node that uses the
    storage, ``first`` the first backward node. ``layer`` is the layer that computes it, ``""`` outside of layers;
    ``marked`` are the patterns of the annotations that name it.
    """

    value: fx.Node
    placeholder: fx.Node
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
    held, layers, inputs = storages_of(forward), layers_of(forward), placeholders(backward)
    saved = [(role, node) for role, node in outputs(forward) if isinstance(role, Saved) and isinstance(node, fx.Node)]
    times = Counter(storage for _, node in saved for storage in held[node])
    stays = set(_staying(forward, held))
    done: dict[Storage, fx.Node] = {}
    marked: dict[Storage, frozenset[str]] = defaultdict(frozenset)
    for node in forward.graph.nodes:
        for storage in held[node]:
            marked[storage] |= OFFLOADED_BY.get(node, frozenset())
        for used in (node, *node.all_input_nodes) if node.op != "output" else ():
            done |= dict.fromkeys(held[used], node)
    kept = []
    for role, node in saved:
        if len(held[node]) != 1 or not inputs[role].users or not isinstance(value := node.meta["val"], torch.Tensor):
            continue
        (storage,) = held[node]
        if value.nbytes == storage.nbytes and times[storage] == 1 and storage not in stays:
            first, layer = min(inputs[role].users), layers.get(node, "")
            kept.append(Kept(node, inputs[role], storage.nbytes, done[storage], first, layer, marked[storage]))
    return sorted(kept, key=lambda each: each.done)


def window_of(kept: Sequence[Kept]) -> int:
    """The bytes that may be on the device during copies: the largest layer's, without layers the largest value's."""
    layers: Counter[str] = Counter()
    for each in kept:
        layers[each.layer] += each.nbytes
    del layers[""]
    return max(layers.values(), default=max((each.nbytes for each in kept), default=0))


def _staying(forward: fx.GraphModule, held: dict[fx.Node, list[Storage]]) -> Iterator[Storage]:
    for node in forward.graph.nodes:
        is_input = node.op == "get_attr" or (node.op == "placeholder" and not isinstance(ROLE.of(node), Forwarded))
        if is_input or MEMORY_KIND.get(node) == "gathered":
            yield from held[node]
    for role, node in outputs(forward):
        if isinstance(role, (Output, IntermediateBase)) and isinstance(node, fx.Node):
            yield from held[node]
