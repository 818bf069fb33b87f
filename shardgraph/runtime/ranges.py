"""Named ranges of a graph's modules and collectives in torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from torch import fx

from shardgraph import ir, torch_api
from shardgraph.ir.attributes import FORWARD_MODULES, MODULES, SUBJECT


def in_ranges(gm: fx.GraphModule, name: str) -> Any:
    """What runs a bound graph under a profiler: in a range ``name``, and in it ranges named as the modules that
    operations are of, one inside the other, and as what collectives move."""
    ranged = ir.copy_graph(gm)
    graph, entered = ranged.graph, list[tuple[str, fx.Node]]()

    def leave(depth: int) -> None:
        while len(entered) > depth:
            graph.call_function(torch_api.LEAVE_RANGE, (entered.pop()[1],))

    for node in list(graph.nodes):
        if node.op == "placeholder":
            continue
        names = [] if node.op == "output" else [f"shardgraph {name}", *_names(node)]
        with graph.inserting_before(node):
            leave(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1][0], zip(names, entered, strict=False))))
            for each in names[len(entered) :]:
                entered.append((each, graph.call_function(torch_api.ENTER_RANGE, (each, None))))
    return torch_api.boxed(ranged)


def _names(node: fx.Node) -> Iterator[str]:
    if ir.is_collective(node) or ir.is_wait(node):
        start: Any = node if ir.is_collective(node) else node.args[0]
        verb = "" if node is start else "wait for "
        yield f"{verb}{start.target.__name__.partition('.')[0]} of {SUBJECT.get(start, 'values')}"
        return
    modules = FORWARD_MODULES.get(node) or MODULES.get(node) or {}
    yield from (path for path, _ in modules.values() if path)
