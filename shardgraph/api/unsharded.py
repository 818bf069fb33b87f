"""A model that is given to be sharded must not be sharded already."""

from __future__ import annotations

from itertools import chain

from torch import nn
from torch.distributed.tensor import DTensor

from shardgraph.errors import ShardGraphError
from shardgraph.findings.model_rules import sharded_already
from shardgraph.module.sharded import ShardedModule


def check_unsharded(model: nn.Module) -> None:
    """Check that no one has sharded or replicated ``model``.

    Raises:
        ShardGraphError: the model is compiled, or sharded by other means.
    """
    tensors = chain(model.named_parameters(), model.named_buffers())
    distributed = [name for name, each in tensors if isinstance(each, DTensor)]
    if isinstance(model, ShardedModule) or distributed:
        which = f" ({distributed[0]!r} is a DTensor)" if distributed else ""
        raise ShardGraphError(
            f"the model is compiled already, or sharded by other means{which}: its parameters are "
            "shards. Compile it once, and build it anew for another plan; state_dict() of one loads into the other. "
            "Placements of your own are annotations: shardgraph.annotate(model, {name: shard(dim, axis)})"
        )
    for wrapped in sharded_already(model):
        raise ShardGraphError(f"{wrapped.where}: {wrapped.message}: {wrapped.remedy}")
