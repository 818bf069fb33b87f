"""Finds the sequence dimensions of a graph: the shardings that context parallelism uses, and no others.

They start at the inputs and at attention, and follow to everything that is computed from the same positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.errors import PlanError
from shardgraph.ir import Input, Parameter, placeholders
from shardgraph.ir.attributes import ROLE, SOURCE
from shardgraph.passes.sharding.legal import Legal, Value, placed_values, value_of
from shardgraph.passes.sharding.options import named_arguments, results
from shardgraph.passes.sharding.placements import blocks, is_cut
from shardgraph.passes.sharding.rules import ATTENTION
from shardgraph.sizes import divisors

Cuts = Mapping[Value, set[Placement]]


def input_sequences(gm: fx.GraphModule) -> dict[Value, int]:
    """The sequence dim of inputs that have one: integers ``[batch, positions]``, or ``[batch, positions, width]``."""
    found: dict[Value, int] = {}
    for role, node in placeholders(gm).items():
        value = node.meta.get("val")
        if isinstance(role, Input) and isinstance(value, torch.Tensor):
            tokens = value.dim() == 2 and not value.is_floating_point()
            if tokens or value.dim() == 3:
                found[node, 0] = 1
    return found


def stripes(gm: fx.GraphModule, parts: int) -> dict[Value, set[Placement]]:
    """All sequences sharded in stripes; see :mod:`shardgraph.passes.sharding.ring_attention`.

    Raises:
        PlanError: there is no sequence, or a length is not a multiple of ``parts``.
    """
    sequences = input_sequences(gm) | _attended(gm)
    lengths = {(node, index): results(node)[index].shape[dim] for (node, index), dim in sequences.items()}
    if not sequences:
        raise PlanError(
            "a sequence is to be cut among the ranks, and there is none: no input holds tokens [batch, positions] or "
            "vectors [batch, positions, width], and there is no attention. Use 'tp' or a plan of data parallelism"
        )
    for value, length in lengths.items():
        if length % parts:
            raise PlanError(
                f"dimension {sequences[value]} of {_described(value)} is a sequence of {length} and is to be cut among "
                f"{parts} ranks: it must be a multiple of {parts}, such as {max(length // parts, 1) * parts} or "
                f"{(length // parts + 1) * parts}. Pad the batch, or give the axis another size"
                f"{_sizes_that_divide(length)}"
            )
    return {value: {blocks(sequences[value], length // parts)} for value, length in lengths.items() if length}


def _attended(gm: fx.GraphModule) -> dict[Value, int]:
    """The queries of attention, which have positions even if no input does (as for images)."""
    nodes = (node for node in gm.graph.nodes if node.target in ATTENTION)
    return {value_of(named_arguments(node)["query"]): 2 for node in nodes}


def _described(value: Value) -> str:
    node, index = value
    role, shape = ROLE.get(node), list(results(node)[index].shape)
    if isinstance(role, Input):
        return f"the model's input number {role.index}, of shape {shape},"
    return f"the queries {shape} of attention ({SOURCE.get(node) or node.name})"


def _sizes_that_divide(length: int) -> str:
    fitting = divisors(length)[:3]
    return f", such as {' or '.join(map(str, fitting))}" if fitting else ""


def connected(legal: Legal, starts: Cuts) -> dict[Value, set[Placement]]:
    """Shardings connected to ``starts``: two are connected if a legal option has both. Parameters stay replicated."""
    found: dict[Value, set[Placement]] = {value: set(cuts) for value, cuts in starts.items()}
    pairs = [
        [(value, placement) for value, placement in placed_values(node, option) if is_cut(placement)]
        for node in legal.nodes
        for option in legal.options(node)
    ]
    pairs = [together for together in pairs if together]
    grown = True
    while grown:
        grown = False
        for together in (*pairs, *reversed(pairs)):
            if not any(placement in found.get(value, ()) for value, placement in together):
                continue
            for (node, index), placement in together:
                cuts = found.setdefault((node, index), set())
                if placement not in cuts and not isinstance(ROLE.get(node), Parameter):
                    cuts.add(placement)
                    grown = True
    return found
