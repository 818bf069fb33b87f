"""The check for random numbers: no random operation may be recomputed.

A random operation that backward recomputed would draw different numbers than forward: gradients of another function,
without an error. torch's own memory budget has produced such gradients
(https://github.com/pytorch/pytorch/issues/190717).
"""

from __future__ import annotations

import torch
from torch import fx

from shardgraph.errors import RandomStateError
from shardgraph.ir.attributes import SOURCE


def draws(node: fx.Node) -> bool:
    """Whether the node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def check_random_state(forward: fx.GraphModule, backward: fx.GraphModule | None) -> None:
    """Check that no operation of forward that draws random numbers is in backward too.

    Raises:
        RandomStateError: one is; the message names it and its source line.
    """
    drawn = {node.name for node in forward.graph.nodes if draws(node)}
    for node in backward.graph.nodes if backward is not None else ():
        if draws(node) and node.name in drawn:
            raise RandomStateError(
                f"{node.name} ({SOURCE.get(node) or 'no line known'}) draws random numbers in forward, and in "
                "backward, which computes it again, it would draw others: save its result, without RECOMPUTE"
            )
