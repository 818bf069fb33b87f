"""A graph of a program as the eager backend runs it, without a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from shardgraph import ir
from shardgraph.passes.analysis.liveness import settle_memory
from shardgraph.runtime.backends import eager


def as_run(gm: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """What runs a copy of ``gm``, in which results may be in the memory of operands."""
    gm = ir.copy_graph(gm)
    settle_memory(gm)
    return eager.backend(gm)
