"""Starts transfers earlier than a lane of them allows, where the limit of live bytes has room.

List scheduling: the computation keeps its order, transfers are placed one after the other in the order of their use,
each at the earliest point from which its bytes fit under the limit.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from torch import fx

from shardgraph import ir
from shardgraph.passes.schedule.memory import Memory
from shardgraph.passes.schedule.transfers import Lane, gathers_of, made_ready, nbytes, reorder, wait_of

FURTHER = 2
"""How many times as many transfers as a lane allows may be in flight where memory has room for them."""


def fill_memory(gm: fx.GraphModule, memory: Memory, depth: int) -> None:
    """Move gathers, with what makes them ready, up to ``FURTHER`` times ``depth`` gathers ahead where they fit."""
    lane = Lane.counted(gathers_of(gm), depth)
    if not lane.starts:
        return
    nodes = list(gm.graph.nodes)
    live = np.array([memory.live[node] for node in nodes])
    index = {node: i for i, node in enumerate(nodes)}
    first = next((i for i, node in enumerate(nodes) if node.op not in ("placeholder", "get_attr")), len(nodes))
    waits = [index[wait_of(start)] for start in lane.starts]
    before: dict[int, list[fx.Node]] = defaultdict(list)  # what is put before the node of that index
    moved: set[fx.Node] = set()
    free = first  # where the next may be put at the earliest, to come after the previous one
    for start, beside in zip(lane.starts, lane.first_beside(FURTHER), strict=True):
        block = [*reversed(made_ready(start)), start]
        begin = index[block[0]]
        at = max(free, waits[beside - 1] + 1 if beside else first)
        held = sum(map(nbytes, block))
        full = np.flatnonzero(live[at:begin] + held > memory.peak)
        at += int(full[-1]) + 1 if full.size else 0
        if at < begin and not any(map(ir.is_wait, block)):  # which waits for the copy of an offloaded parameter
            live[at:begin] += held
            before[at] += block
            moved.update(block)
            free = at
        else:
            free = index[start] + 1
    if moved:
        memory.live.update(zip(nodes, live.tolist(), strict=True))
        reorder([each for i, node in enumerate(nodes) for each in (*before[i], *([] if node in moved else [node]))])
