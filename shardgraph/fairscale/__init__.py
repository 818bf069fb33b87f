"""FairScale's names over shardgraph's plans, passes and optimizers."""

from shardgraph.fairscale.adascale import AdaScale
from shardgraph.fairscale.oss import OSS
from shardgraph.fairscale.pipe import Pipe
from shardgraph.fairscale.sharded_ddp import ShardedDataParallel
from shardgraph.fairscale.slowmo import SlowMoDistributedDataParallel

__all__ = ["OSS", "AdaScale", "Pipe", "ShardedDataParallel", "SlowMoDistributedDataParallel"]
