"""FairScale's names over shardgraph's plans, passes and optimizers."""

from shardgraph.fairscale.adascale import AdaScale
from shardgraph.fairscale.checkpoint_wrapper import checkpoint_wrapper
from shardgraph.fairscale.fsdp import FullyShardedDataParallel
from shardgraph.fairscale.grad_scaler import ShardedGradScaler
from shardgraph.fairscale.oss import OSS
from shardgraph.fairscale.pipe import Pipe
from shardgraph.fairscale.sharded_ddp import ShardedDataParallel
from shardgraph.fairscale.slowmo import SlowMoDistributedDataParallel
from shardgraph.fairscale.wrap import auto_wrap, default_auto_wrap_policy, enable_wrap, wrap

FSDP = FullyShardedDataParallel

__all__ = [
    "FSDP",
    "OSS",
    "AdaScale",
    "FullyShardedDataParallel",
    "Pipe",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "SlowMoDistributedDataParallel",
    "auto_wrap",
    "checkpoint_wrapper",
    "default_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]
