"""Parameter sharding: placeholders become shards, gathered where the computation needs them whole.

What FairScale calls fully sharded data parallel and ZeRO calls stage 3, as a rewrite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from shardgraph.ir import Parameter, placeholders
from shardgraph.passes.base import Context
from shardgraph.passes.emitter import Emitter, padded_rows


@dataclass(frozen=True)
class ShardParameters:
    """Takes a joint graph over whole parameters; gives one over local shards.

    Each sharded parameter's placeholder becomes this rank's shard (its value has rank 0's shape, the
    longest). Before its first use stand: a zero-padding of the shard where rows do not divide, an
    all-gather, its wait, and the cut back to the parameter's rows. These nodes have ``meta["kind"] ==
    "gathered"``; where the plan says ``reshard_after_forward`` they also have ``meta["again"]``, which tells the
    split to gather again in backward rather than to keep. A parameter nobody uses is not gathered.

    Must not change: anything downstream, which sees a tensor equal to the whole parameter.
    """

    name: ClassVar[str] = "shard-parameters"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset({"sharded-parameters"})
    excludes: ClassVar[frozenset[str]] = frozenset({"sharded-parameters", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        order = {node: i for i, node in enumerate(gm.graph.nodes)}
        for role, node in placeholders(gm).items():
            if isinstance(role, Parameter) and context.parameters[role.fqn].shard_axis is not None:
                _shard(gm, context, role.fqn, node, order)


def _shard(gm: fx.GraphModule, context: Context, fqn: str, node: fx.Node, order: dict[fx.Node, int]) -> None:
    entry = context.parameters[fqn]
    assert entry.shard_axis is not None
    axis, size = context.plan.mesh[entry.shard_axis]
    rows, *rest = context.shapes[fqn]
    longest = padded_rows(rows, size) // size
    users = [user for user in node.users if user.op != "output"]
    whole = node.meta["val"]
    with context.fake_mode:
        node.meta["val"] = torch.empty((longest, *rest), dtype=whole.dtype, device=whole.device)
    if not users:
        return

    first = min(users, key=order.__getitem__)
    tag = {"kind": "gathered", "again": entry.reshard_after_forward}
    emit = Emitter(gm, context, first.prev, fqn, first.meta.get("source", ""))
    even = longest * size == rows
    shard = node if even else emit.pad_rows(node, longest, **tag)
    full = emit.all_gather(shard, axis, **tag)
    if not even:
        full = emit.rows(full, rows, **tag)
    full.meta.update(equals=node.name, placed=node.meta.get("placed", {}))
    for user in users:
        user.replace_input_with(node, full)
