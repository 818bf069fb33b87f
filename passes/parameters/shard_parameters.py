"""Parameter sharding: placeholders become shards, all-gathered where the computation needs them whole.

Fully sharded data parallel (FairScale), or ZeRO stage 3, as a graph rewrite.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardgraph.ir import Parameter, placeholders
from shardgraph.ir.attributes import PADDED, PADDED_SHARD, PLACEMENTS, write
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.builder import Builder, padded_rows
from shardgraph.passes.parameters.gather_scaled import is_gathered
from shardgraph.passes.parameters.rewrite import insert_before_use


@dataclass(frozen=True)
class ShardParameters(Pass):
    """Takes a joint graph over whole parameters; replaces them by local shards along dim 0.

    The placeholder of each sharded parameter becomes this rank's shard (its value has rank 0's shape, the longest).
    Inserted before its first use: zero-padding of the shard if the rows do not divide evenly, an all-gather, its wait,
    and a slice back to the parameter's rows. These nodes have the ``MEMORY_KIND`` ``"gathered"``; their ``RECOMPUTE``
    is the plan's ``reshard_after_forward``, and makes the split gather again in backward instead of saving. An unused
    parameter is not gathered, nor one whose axis has one rank.

    Must not change: anything downstream, which sees a tensor equal to the whole parameter.
    """

    name = "shard-parameters"
    provides = frozenset({"sharded-parameters"})
    excludes = frozenset({"sharded-parameters", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for role, node in placeholders(gm).items():
            if not isinstance(role, Parameter) or context.parameters[role.fqn].shard_axis is None:
                continue
            if not is_gathered(node):
                _shard(gm, context, role.fqn, node)


def _shard(gm: fx.GraphModule, context: Context, fqn: str, node: fx.Node) -> None:
    axis, size = context.plan.mesh[context.parameters[fqn].shard_axis]
    if size == 1:
        return  # its shard is the parameter
    rows, *rest = context.shapes[fqn]
    longest = padded_rows(rows, size) // size
    node.meta["val"] = context.values.empty((longest, *rest), node.meta["val"])

    def gather(build: Builder) -> fx.Node:
        if longest * size == rows:
            return build.all_gather(node, axis)
        shard = build.pad_rows(node, longest)
        whole = build.all_gather(shard, axis)
        write(shard, {PADDED_SHARD: fqn})
        write(whole, {PADDED: fqn, PLACEMENTS: PLACEMENTS.get(node, {})})
        return build.rows(whole, rows)

    users = [user for user in node.users if user.op != "output"]
    insert_before_use(gm, context, fqn, node, users, gather)
