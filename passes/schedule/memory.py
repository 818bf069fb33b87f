"""The live bytes of a step at each of its nodes, as the order of its graphs makes them, and their peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from shardgraph import ir
from shardgraph.passes.analysis.liveness import profile_step
from shardgraph.passes.base import Context
from shardgraph.passes.partition.drop_zero_tangents import DropZeroTangents, absent_beside_a_scalar


@dataclass
class Memory:
    """``live`` are the bytes at nodes; ``peak`` is the limit that they are not to exceed."""

    live: dict[fx.Node, int]
    peak: int


def memory_of(step: Sequence[fx.GraphModule], context: Context) -> Memory:
    """The memory of a forward graph and its backward, or of one graph.

    Without what gloo takes: the order must not depend on the device that the model was captured on.
    """
    forward, *rest = step
    backward = _as_called(forward, rest[0], context) if rest else None
    profile = profile_step(forward, backward, gloo=False)
    at = dict(zip(profile.nodes, profile.timeline, strict=True))
    halves = zip(("forward", "backward"), step, strict=False)
    live = {node: at.get((half, node.name), 0) for half, gm in halves for node in gm.graph.nodes}
    return Memory(live, max(live.values()))


def _as_called(forward: fx.GraphModule, backward: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Backward without the outputs that the loss leaves out, such as logits, which would hold memory."""
    lean = ir.copy_graph(backward)
    DropZeroTangents(absent_beside_a_scalar(forward, backward)).run(lean, context)
    return lean
