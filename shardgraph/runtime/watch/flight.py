"""The flight record: the last collectives of this rank, those of graphs as numbers that get names when they are read.

A graph notes the number of a collective when it starts and when it is awaited, with the time: two integers in a ring.
Others are those that torch has kept.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from shardgraph import ir
from shardgraph.ir.attributes import AXIS, SOURCE, SUBJECT
from shardgraph.runtime.watch import outside

LENGTH = 100  # collectives that are kept

_ring: deque[tuple[int, int]] = deque(maxlen=3 * LENGTH)  # starts, ends, and the graphs that they are in
_note, _clock = _ring.append, time.time_ns
_graphs: list[weakref.ref[fx.GraphModule]] = []
_collectives: list[tuple[int, str]] = []  # the graph of each, and its node's name


def begin(call: int) -> None:
    """Note that the graph of this number, the same on all ranks, begins."""
    _note((-call, _clock()))


def mark(number: int) -> None:
    """Note that a collective starts (an even number) or has been awaited (the next one)."""
    _note((number, _clock()))


@contextmanager
def noting(gm: fx.GraphModule) -> Iterator[None]:
    """Within, a bound graph has nodes that note its collectives while it runs, for the code that is made of it."""
    collectives = [node for node in gm.graph.nodes if ir.is_collective(node)]
    if collectives:
        _graphs.append(weakref.ref(gm))
    marks: list[fx.Node] = []
    for node in collectives:
        number = 2 * len(_collectives)
        _collectives.append((len(_graphs) - 1, node.name))
        with gm.graph.inserting_before(node):
            marks.append(gm.graph.call_function(mark, (number,)))
        for wait in filter(ir.is_wait, node.users):
            with gm.graph.inserting_after(wait):
                marks.append(gm.graph.call_function(mark, (number + 1,)))
    try:
        yield
    finally:
        for each in marks:
            gm.graph.erase_node(each)


def records() -> list[dict[str, Any]]:
    """The last collectives of this rank, the oldest first.

    Each has its ``kind``, mesh ``axis``, ``bytes``, ``value`` (the parameter, or what else it moves), source ``line``,
    ``call`` (the number of the graph, the same on all ranks) and its ``place`` in it, and the times when it ``started``
    and ``finished``, in seconds since 1970; ``finished`` is None if it has not been awaited. Those outside of graphs
    are as :mod:`shardgraph.runtime.watch.outside` says.
    """
    return sorted([*_of_graphs(), *outside.records(LENGTH)], key=lambda each: each["started"])[-LENGTH:]


def _of_graphs() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    running: dict[int, dict[str, Any]] = {}
    named: dict[int, dict[str, fx.Node]] = {}
    call = place = 0
    for number, when in list(_ring):
        if number < 0:
            call, place = -number, 0
        elif number % 2 == 0:
            place += 1
            running[number] = {**_described(number // 2, named), "call": call, "place": place, "started": when / 1e9}
            running[number]["finished"] = None
            found.append(running[number])
        elif number - 1 in running:
            running.pop(number - 1)["finished"] = when / 1e9
    return found


def _described(number: int, named: dict[int, dict[str, fx.Node]]) -> dict[str, Any]:
    graph_number, name = _collectives[number]
    gm = _graphs[graph_number]()
    if gm is None:
        return {"kind": name, "axis": "", "bytes": 0, "value": "of a program that is gone", "line": ""}
    if graph_number not in named:
        named[graph_number] = {node.name: node for node in gm.graph.nodes}
    node = named[graph_number][name]
    value = node.meta.get("val")
    return {
        "kind": node.target.__name__.partition(".")[0],  # type: ignore[union-attr]
        "axis": str(AXIS.get(node, ir.group_of(node))),
        "bytes": int(value.numel() * value.element_size()) if value is not None else 0,
        "value": str(SUBJECT.get(node, node.name)),
        "line": str(SOURCE.get(node, "")),
    }
