"""The module of the model that an operation belongs to, and its name in a plan, which a person can edit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torch import fx

from shardgraph.ir.attributes import FORWARD_MODULES, MODULES, SUBJECT
from shardgraph.ir.operations import operation_name

_LAYER = re.compile(r"(?:.*?\.)??\d+\.")

Name = tuple[str, str, int]
"""A module, the kind of an operation in it, and which of that kind it is, from 1."""


def module_of(node: fx.Node) -> str:
    """The fully qualified name of the node's module; ``""`` for the model itself, or if unknown.

    Nodes that a pass adds for a parameter or a buffer belong to the module that owns it; for several, to the model.
    """
    if stack := MODULES.get(node) or FORWARD_MODULES.get(node):
        return str(list(stack.values())[-1][0])
    subject = SUBJECT.get(node, "")  # such as "gradient of a.weight", "buffer a.mean", "a.weight, b.weight"
    return "" if ", " in subject else subject.split(" ")[-1].rpartition(".")[0]


def layer_of(path: str) -> str:
    """The outermost numbered module that a module is, or is in, such as ``"model.layers.3."``; else ``""``."""
    found = _LAYER.match(f"{path}.")
    return found[0] if found else ""


def names_of(operations: Iterable[fx.Node]) -> dict[fx.Node, Name]:
    """The name of every operation; ``operations`` are all that are counted, in order."""
    count: Counter[tuple[str, str]] = Counter()
    names: dict[fx.Node, Name] = {}
    for node in operations:
        key = (module_of(node), operation_name(node.target))
        count[key] += 1
        names[node] = (*key, count[key])
    return names
