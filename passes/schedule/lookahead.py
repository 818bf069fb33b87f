"""Starts gathers earlier than a fixed number of them ahead, where the graph's peak of live bytes has room.

List scheduling under a limit of memory: the computation keeps its order, gathers are placed one after the other in the
order of their use, each at the earliest point from which its bytes fit under the peak that the graph has without that.
The order of collectives follows from the text of the graph alone, so it is the same on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from shardgraph import ir
from shardgraph.ir.attributes import MEMORY_KIND
from shardgraph.passes.analysis.liveness import profile_step
from shardgraph.passes.base import Context
from shardgraph.passes.partition.drop_zero_tangents import DropZeroTangents, absent_beside_a_scalar
from shardgraph.passes.schedule.merge import made_ready, wait_of

Line = npt.NDArray[np.int64]


def fill_memory(forward: fx.GraphModule, backward: fx.GraphModule | None, context: Context, most: int) -> None:
    """Move the gathers of a step's graphs, with what makes them ready, up to ``most`` gathers ahead where they fit."""
    if not any(gathers_of(gm) for gm in (forward, backward) if gm is not None):
        return
    # Without what gloo takes: the order must not depend on the device that the model was captured on.
    memory = profile_step(forward, backward and _as_called(forward, backward, context), gloo=False)
    at = dict(zip(memory.nodes, memory.timeline, strict=True))
    graphs = {"forward": forward} | ({} if backward is None else {"backward": backward})
    lines = [np.array([at.get((half, node.name), 0) for node in gm.graph.nodes]) for half, gm in graphs.items()]
    peak = max(int(live.max()) for live in lines)
    for gm, live in zip(graphs.values(), lines, strict=True):
        _fill(gm, live, peak, most)


def _as_called(forward: fx.GraphModule, backward: fx.GraphModule, context: Context) -> fx.GraphModule:
    """Backward without the outputs that the loss leaves out, such as logits, which would hold memory."""
    lean = ir.copy_graph(backward)
    DropZeroTangents(absent_beside_a_scalar(forward, backward)).run(lean, context)
    return lean


def _fill(gm: fx.GraphModule, live: Line, peak: int, most: int) -> None:
    nodes = list(gm.graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    first = next((i for i, node in enumerate(nodes) if node.op not in ("placeholder", "get_attr")), len(nodes))
    gathers = [[start, *made_ready(start)] for start in gathers_of(gm)]
    waits = [index[wait_of(start)] for start, *_ in gathers]
    before: dict[int, list[fx.Node]] = defaultdict(list)  # what is put before the node of that index
    moved: set[fx.Node] = set()
    free = first  # where the next may be put at the earliest, to come after the previous one
    for i, (start, *ready) in enumerate(gathers):
        block = [*reversed(ready), start]
        begin = index[block[0]]
        at = max(free, waits[i - most] + 1 if i >= most else first)
        held = sum(map(_nbytes, block))
        full = np.flatnonzero(live[at:begin] + held > peak)
        at += int(full[-1]) + 1 if full.size else 0
        if at < begin and not any(map(ir.is_wait, block)):  # which waits for the copy of an offloaded parameter
            live[at:begin] += held
            before[at] += block
            moved.update(block)
            free = at
        else:
            free = index[start] + 1
    if moved:
        _reorder([each for i, node in enumerate(nodes) for each in (*before[i], *([] if node in moved else [node]))])


def gathers_of(gm: fx.GraphModule) -> list[fx.Node]:
    """The starts of all-gathers of parameters, in order."""
    return [node for node in ir.collectives(gm) if MEMORY_KIND.get(node) == "gathered"]


def _nbytes(node: fx.Node) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, torch.Tensor))


def _reorder(order: Sequence[fx.Node]) -> None:
    """Put the nodes of a graph in this order."""
    for last, node in pairwise(order):
        if last.next is not node:
            last.append(node)
