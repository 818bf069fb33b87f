"""Checkpoints without ranks: shards become whole tensors, and the other way round, in one process on a CPU."""

from shardgraph.offline.consolidate import consolidate
from shardgraph.offline.split import split

__all__ = ["consolidate", "split"]
