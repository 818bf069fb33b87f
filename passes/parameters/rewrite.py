"""What passes on parameters and gradients share: another value for a parameter's users, and for a graph's results."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import fx

from shardgraph.ir import Gradient, Mutation, outputs, set_outputs
from shardgraph.ir.attributes import EQUALS, MEMORY_KIND, PLACEMENTS, RECOMPUTE, SHARD_OF, SOURCE, SUBJECT
from shardgraph.passes.base import Context
from shardgraph.passes.builder import Builder


def insert_before_use(
    gm: fx.GraphModule,
    context: Context,
    fqn: str,
    node: fx.Node,
    users: Collection[fx.Node],
    make: Callable[[Builder], fx.Node],
    *,
    equal: bool = True,
) -> None:
    """Let ``users`` of the parameter ``fqn`` use what ``make`` builds from ``node``, right before the first of them.

    The new nodes are repeated in backward if the parameter is resharded after forward. ``equal`` says that the result
    has the value that ``node`` had in the captured graph; else it has each rank's shard.
    """
    if not users:
        return
    first = min(users)
    again = context.parameters[fqn].reshard_after_forward
    labels = {SUBJECT: fqn, SOURCE: SOURCE.get(first, ""), MEMORY_KIND: "gathered", RECOMPUTE: again}
    value = make(Builder(gm.graph, context.values, labels, after=first.prev))
    if equal:
        EQUALS.set(value, node.name)
        PLACEMENTS.set(value, PLACEMENTS.get(node, {}))
    else:
        SHARD_OF.set(value, fqn)
    for user in users:
        user.replace_input_with(node, value)


def replace_results(
    gm: fx.GraphModule, kind: type[Gradient | Mutation], of: type, change: Callable[[str, fx.Node], fx.Node]
) -> None:
    """Return ``change(name, value)`` instead of each result ``kind`` of a parameter or buffer, as ``of`` says."""
    results = outputs(gm)
    for i, (role, value) in enumerate(results):
        if isinstance(role, kind) and isinstance(role.of, of) and isinstance(value, fx.Node):
            results[i] = (role, change(role.of.fqn, value))
    set_outputs(gm, results)
