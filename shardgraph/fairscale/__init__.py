"""FairScale's names over shardgraph's plans, passes and optimizers."""

from shardgraph.fairscale.checkpoint_wrapper import checkpoint_wrapper
from shardgraph.fairscale.fsdp import FullyShardedDataParallel
from shardgraph.fairscale.grad_scaler import ShardedGradScaler
from shardgraph.fairscale.wrap import auto_wrap, default_auto_wrap_policy, enable_wrap, wrap

FSDP = FullyShardedDataParallel

__all__ = [
    "FSDP",
    "FullyShardedDataParallel",
    "ShardedGradScaler",
    "auto_wrap",
    "checkpoint_wrapper",
    "default_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]
