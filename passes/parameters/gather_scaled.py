"""Parameters that products take in 8 bits are gathered in 8 bits.

As float8 all-gathers of FSDP2 with torchao: every rank scales its shard by the largest magnitude of all shards, and
sends bytes, a quarter of those of single precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from shardgraph.ir import Parameter, placeholders
from shardgraph.ir.attributes import EQUALS, MADE_BY, MEMORY_KIND, RECOMPUTE, SOURCE, SUBJECT, Labels
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.builder import Builder, padded_rows

aten = torch.ops.aten


@dataclass(frozen=True)
class GatherScaled(Pass):
    """Takes a joint graph over whole parameters; shards along dim 0, as :class:`ShardParameters`, those of which only
    the largest magnitude and values in 8 bits are used.

    Both are computed from the padded shard. The largest magnitude is reduced over ranks, and saved for backward; values
    in 8 bits are gathered, and gathered again in backward if the parameter is resharded after forward.

    Must not change: anything downstream. A parameter that is used in another way too is left to ShardParameters.
    """

    name = "gather-scaled"
    provides = frozenset({"gathered-scaled"})
    excludes = frozenset({"gathered-scaled", "sharded-parameters", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        if context.plan.precision.products is None:
            return
        for role, node in placeholders(gm).items():
            if not isinstance(role, Parameter) or context.parameters[role.fqn].shard_axis is None:
                continue
            if chain := _scaling(node):
                _shard(gm, context, role.fqn, node, chain)


def is_gathered(parameter: fx.Node) -> bool:
    """Whether the pass has made a parameter's placeholder its shard."""
    return any(MADE_BY.get(user) == GatherScaled.name for user in parameter.users)


def _scaling(parameter: fx.Node) -> list[fx.Node]:
    """The operations on a parameter, element by element, up to its largest magnitude and its values in 8 bits, in
    order; none if it is used in another way."""
    inside, chain = {parameter}, list[fx.Node]()
    pending = list(parameter.users)
    while pending:
        node = pending.pop()
        if node in chain:
            continue
        if not (_is_largest(node) or _is_coarse(node)):
            if not _is_elementwise(node, inside):
                return []
            inside.add(node)
            pending += node.users
        chain.append(node)
    return sorted(chain)


def _is_largest(node: fx.Node) -> bool:
    return node.target is aten.amax.default and not node.meta["val"].dim()


def _is_coarse(node: fx.Node) -> bool:
    """Whether a node casts to 8 bits."""
    return node.target is aten._to_copy.default and node.meta["val"].dtype.itemsize == 1


def _is_elementwise(node: fx.Node, inside: set[fx.Node]) -> bool:
    if node.target is aten.div.Tensor:
        value, unit = node.args
        return value in inside and isinstance(unit, fx.Node) and not unit.meta["val"].dim()
    return node.target in (aten.abs.default, aten._to_copy.default)


def _shard(gm: fx.GraphModule, context: Context, fqn: str, parameter: fx.Node, chain: list[fx.Node]) -> None:
    axis, size = context.plan.mesh[context.parameters[fqn].shard_axis]
    rows, *rest = context.shapes[fqn]
    longest = padded_rows(rows, size) // size
    again = context.parameters[fqn].reshard_after_forward
    parameter.meta["val"] = context.values.empty((longest, *rest), parameter.meta["val"])
    gathered: Labels = {SUBJECT: fqn, SOURCE: SOURCE.get(chain[0], ""), MEMORY_KIND: "gathered", RECOMPUTE: again}
    reduced: Labels = {SUBJECT: f"largest magnitude of {fqn}", SOURCE: SOURCE.get(chain[0], "")}

    now = {parameter: parameter}
    if longest * size != rows:
        pad = Builder(gm.graph, context.values, gathered, after=chain[0].prev)
        now[parameter] = pad.pad_rows(parameter, longest)
    measured = {node for node in chain if any(map(_is_largest, node.users))}  # only for the scale
    for node in chain:
        labels = reduced if _is_largest(node) or node in measured else gathered
        build = Builder(gm.graph, context.values, labels, after=node)
        args = fx.map_arg(node.args, lambda each: now.get(each, each))
        now[node] = value = build.call(node.target, *args, **node.kwargs)
        if _is_largest(node):
            value = build.all_reduce(value, axis, "max")
        elif _is_coarse(node):
            value = build.all_gather(value, axis)
            value = value if longest * size == rows else build.rows(value, rows)
        else:
            continue
        EQUALS.set(value, node.name)
        node.replace_all_uses_with(value)
    for node in reversed(chain):
        gm.graph.erase_node(node)
