"""Operations by name, so that a plan can speak of them and a person can edit it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import fx

from shardgraph.ir.operations import operation_name
from shardgraph.passes.analysis.modules import module_of

Name = tuple[str, str, int]
"""A module, the kind of an operation in it, and which of that kind it is, from 1."""


def names_of(operations: Iterable[fx.Node]) -> dict[fx.Node, Name]:
    """The name of every operation; ``operations`` are all that are counted, in order."""
    count: Counter[tuple[str, str]] = Counter()
    names: dict[fx.Node, Name] = {}
    for node in operations:
        key = (module_of(node), operation_name(node.target))
        count[key] += 1
        names[node] = (*key, count[key])
    return names
