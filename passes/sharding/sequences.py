"""Finds the sequence dimensions of a graph: the shardings that context parallelism uses, and no others.

They start at the inputs and at attention, and follow to everything that is computed from the same positions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import networkx as nx
import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.errors import PlanError
from shardgraph.ir import Input, Parameter, placeholders
from shardgraph.ir.attributes import ROLE, SOURCE
from shardgraph.ir.fused import ATTENTION
from shardgraph.passes.sharding.legal import Legal, Value, placed_values, value_of
from shardgraph.passes.sharding.options import named_arguments, results
from shardgraph.passes.sharding.placements import blocks, is_cut
from shardgraph.sizes import divisors


def input_sequences(gm: fx.GraphModule) -> dict[Value, int]:
    """The sequence dim of inputs that have one: integers ``[batch, positions]``, or ``[batch, positions, width]``."""
    inputs = {node: node.meta.get("val") for role, node in placeholders(gm).items() if isinstance(role, Input)}
    return {
        (node, 0): 1
        for node, value in inputs.items()
        if isinstance(value, torch.Tensor)
        and (value.dim() == 3 or (value.dim() == 2 and not value.is_floating_point()))
    }


def stripes(gm: fx.GraphModule, parts: int) -> dict[Value, set[Placement]]:
    """All sequences sharded in stripes; see :mod:`shardgraph.passes.sharding.ring_attention`.

    Raises:
        PlanError: there is no sequence, or a length is not a multiple of ``parts``.
    """
    # Queries of attention have positions even if no input does (as for images).
    attention = (node for node in gm.graph.nodes if node.target is ATTENTION)
    sequences = input_sequences(gm) | {value_of(named_arguments(node)["query"]): 2 for node in attention}
    if not sequences:
        raise PlanError(
            "a sequence is to be cut among the ranks, and there is none: no input holds tokens [batch, positions] or "
            "vectors [batch, positions, width], and there is no attention. Use 'tp' or a plan of data parallelism"
        )
    starts: dict[Value, set[Placement]] = {}
    for (node, index), dim in sequences.items():
        shape = results(node)[index].shape
        if shape[dim] % parts:
            raise PlanError(_indivisible(node, shape, dim, parts))
        if shape[dim]:
            starts[node, index] = {blocks(dim, shape[dim] // parts)}
    return starts


def _indivisible(node: fx.Node, shape: torch.Size, dim: int, parts: int) -> str:
    role, length = ROLE.get(node), shape[dim]
    value = f"the queries {list(shape)} of attention ({SOURCE.get(node) or node.name})"
    if isinstance(role, Input):
        value = f"the model's input number {role.index}, of shape {list(shape)},"
    sizes = " or ".join(map(str, divisors(length)[:3]))
    return (
        f"dimension {dim} of {value} is a sequence of {length} and is to be cut among {parts} ranks: it must be a "
        f"multiple of {parts}, such as {max(length // parts, 1) * parts} or {(length // parts + 1) * parts}. Pad the "
        f"batch, or give the axis another size{sizes and f', such as {sizes}'}"
    )


def connected(legal: Legal, starts: Mapping[Value, set[Placement]]) -> dict[Value, set[Placement]]:
    """Shardings connected to ``starts``: two are connected if a legal option has both. Parameters stay replicated."""
    known = defaultdict(set, {value: set(cuts) for value, cuts in starts.items()})
    links: nx.Graph = nx.Graph()
    for node in legal.nodes:
        for option in legal.options(node):
            cuts = [
                (value, cut)
                for value, cut in placed_values(node, option)
                if is_cut(cut) and (cut in starts.get(value, ()) or not isinstance(ROLE.get(value[0]), Parameter))
            ]
            nx.add_path(links, cuts)
    for component in nx.connected_components(links):
        if any(cut in starts.get(value, ()) for value, cut in component):
            for value, cut in component:
                known[value].add(cut)
    return known
