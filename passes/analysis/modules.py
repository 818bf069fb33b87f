"""The module of the user's model that a node belongs to."""

from __future__ import annotations

from torch import fx


def module_of(node: fx.Node) -> str:
    """The fully qualified name of the node's module; ``""`` for the model itself, or if unknown.

    Nodes that a pass adds for a parameter or a buffer belong to the module that owns it.
    """
    if "subject" in node.meta:
        fqn = str(node.meta["subject"]).split(" ")[-1]  # of "gradient of a.weight", "buffer a.mean"
        return fqn.rpartition(".")[0]
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return list(stack.values())[-1][0] if stack else ""
