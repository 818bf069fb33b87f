"""The generated Python of the graph module, one operation after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardgraph import torch_api
from shardgraph.passes.analysis.liveness import overwritten
from shardgraph.passes.analysis.overwrites import IN_PLACE
from shardgraph.runtime.backends.gloo import suit_gloo
from shardgraph.runtime.layouts import suit_layouts
from shardgraph.runtime.side_by_side import read_where_stored
from shardgraph.runtime.watch import flight


def backend(gm: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """The graph as Python, with gradients reduced and shards gathered where they are."""
    for node in overwritten(gm):
        node.target = IN_PLACE[node.target]
    read_where_stored(gm)
    suit_gloo(gm)
    suit_layouts(gm)
    return torch_api.boxed(flight.recorded(gm))


def check(device: torch.device) -> None:
    """It runs everywhere."""
