"""The generated Python of the graph module, one operation after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardgraph import torch_api
from shardgraph.ir.attributes import IN_PLACE
from shardgraph.passes.analysis.overwrites import write_in_place
from shardgraph.runtime.backends.gloo import suit_gloo
from shardgraph.runtime.layouts import suit_layouts
from shardgraph.runtime.quick_calls import quickened
from shardgraph.runtime.side_by_side import read_where_stored
from shardgraph.runtime.watch import flight


def backend(gm: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """The graph as Python, with gradients reduced and shards gathered where they are, and no memory for what may be in
    that of an operand."""
    overwrite(gm)
    suit(gm)
    with flight.noting(gm):
        return torch_api.boxed(quickened(gm))


def overwrite(gm: fx.GraphModule) -> None:
    """Let the operations of a bound graph that may do so work in place."""
    for node in gm.graph.nodes:
        if IN_PLACE.get(node):
            write_in_place(node)


def suit(gm: fx.GraphModule) -> None:
    """Let a bound graph communicate, and see, what is in memory as it is."""
    read_where_stored(gm)
    suit_gloo(gm)
    suit_layouts(gm)


def check(device: torch.device) -> None:
    """It runs everywhere."""
