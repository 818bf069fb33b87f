"""Copies of what is kept for backward in host memory, where people read: at the value, and where backward reads it."""

from __future__ import annotations

from torch import fx

from shardgraph import ir


def copy_at_once(gm: fx.GraphModule) -> None:
    """Have each copy to the host awaited where it starts, and each to the device start where it is awaited, in place.

    A compiled module starts copies ahead and awaits them late, so that computation goes on beside them; an emitted
    program does one thing after the other.
    """
    for wait in gm.graph.find_nodes(op="call_function", target=ir.WAIT_COPY):
        start = wait.args[0]
        if start.target is ir.TO_HOST:
            start.append(wait)
        else:
            wait.prepend(start)
