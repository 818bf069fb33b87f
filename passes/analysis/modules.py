"""The module of the user's model that a node belongs to."""

from __future__ import annotations

from torch import fx

from shardgraph.ir.attributes import FORWARD_MODULES, MODULES, SUBJECT


def module_of(node: fx.Node) -> str:
    """The fully qualified name of the node's module; ``""`` for the model itself, or if unknown.

    Nodes that a pass adds for a parameter or a buffer belong to the module that owns it.
    """
    if node in SUBJECT:
        fqn = str(SUBJECT.of(node)).split(" ")[-1]  # of "gradient of a.weight", "buffer a.mean"
        return fqn.rpartition(".")[0]
    stack = MODULES.get(node) or FORWARD_MODULES.get(node)
    return list(stack.values())[-1][0] if stack else ""
